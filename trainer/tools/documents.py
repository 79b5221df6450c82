"""``python -m trainer.tools.documents SEGMENT STEP``: list the documents of a segment's step, one key a line.

SEGMENT is the segment's folder (segment.json and its checkpoints); STEP is counted as in metrics.jsonl. The order is
computed again from the newest checkpoint at or before the step, in about a millisecond for each step between.

    python -m trainer.tools.documents workspace/segments/00001-trunk 57
    python -m trainer.tools.documents workspace/segments/00001-trunk 57 --json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from kernels.contract.message import format_error_with_code
from trainer.contract.checkpoint import format as checkpoints
from trainer.contract.data.data_order import DataOrder, list_document_keys_at_step
from trainer.contract.data.token_shard import hash_file
from trainer.contract.errors import CheckpointError, SpecError, TrainerError
from trainer.contract.plan.spec import SegmentSpec


def list_step_documents(segment: Path, step: int) -> list[str]:
    """Sorted keys of the documents in the global batch of a step of a segment.

    Raises: SpecError if the segment has no such step. TrainerError or TokenShardError if a file of the segment cannot be read.
    """
    spec = SegmentSpec.load(segment)
    if not spec.first_step <= step < spec.last_step:
        raise SpecError(
            "trainer.no_step",
            "{segment}: step {step} is not in this segment, which has the steps {first} to {last}.",
            segment=str(segment),
            step=step,
            first=spec.first_step,
            last=spec.last_step - 1,
        )
    return list_document_keys_at_step(restore_data_order_before(segment, spec, step), step)


def restore_data_order_before(segment: Path, spec: SegmentSpec, step: int) -> DataOrder:
    """The segment's data order at the newest checkpoint at or before a step."""
    state = None
    for path in sorted((segment / "checkpoints").glob("step-[0-9]*"), reverse=True):
        if spec.first_step < int(path.name.removeprefix("step-")) <= step:
            try:
                state = read_sampler_state(path)
                break
            except CheckpointError:
                continue  # an older one gives the same order, after more steps
    if state is None and spec.initial_checkpoint is not None and not spec.restart_data:
        state = read_sampler_state(Path(spec.initial_checkpoint))
    recipe = spec.recipe
    order = DataOrder(
        spec.data_plan,
        context=recipe.model.context,
        batch=recipe.batch,
        vocab_size=recipe.model.vocab_size,
        state=state,
    )
    return order if state is not None else order.copy_at_step(spec.first_step)


def read_sampler_state(checkpoint: Path) -> dict[str, Any] | None:
    """The data order's state in a checkpoint; None for an imported model. Only state.json is read and verified. Raises: CheckpointError."""
    expected = checkpoints.read_manifest(checkpoint)["files"].get("state.json", {}).get("sha256")
    state = checkpoints.read_checkpoint_state(checkpoint)
    if hash_file(checkpoint / "state.json") != expected:
        raise CheckpointError(checkpoints.make_hash_mismatch_fault(checkpoint / "state.json"))
    return None if state["kind"] == checkpoints.IMPORT else dict(state["sampler"])


def main(arguments: list[str]) -> int:
    head, _, tail = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m trainer.tools.documents",
        description=head.partition(": ")[2],
        epilog=tail,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("segment", type=Path, metavar="SEGMENT", help="folder with segment.json and checkpoints/")
    parser.add_argument("step", type=int, metavar="STEP", help="number of the step, as in metrics.jsonl")
    parser.add_argument("--json", action="store_true", help='print {"step": …, "documents": […]} instead')
    asked = parser.parse_args(arguments)
    try:
        found = list_step_documents(asked.segment, asked.step)
    except TrainerError as error:
        print(f"trainer.tools.documents: {format_error_with_code(error)}", file=sys.stderr)
        return error.exit_code
    print(json.dumps({"step": asked.step, "documents": found}) if asked.json else "\n".join(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
