"""Replays an average of checkpoints without the patches, and compares its weights, optimiser state and records with the live average.

An average trains nothing, so its replay is one run of the averaging tool in the sandbox, with the weights that the factory chose. Weights of the two
may differ by a few rounding errors of the stored precision. The other parts are copies, and must be equal.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from factory.audit.live_records import remove_layout_keys
from factory.audit.policy import AuditPolicy
from factory.core.errors import FactoryError
from factory.gates.patch.checkpoint_difference import find_checkpoint_difference
from factory.git import repository
from factory.ledger.rows import SegmentRow
from factory.runs.arm_runner import ArmRunner
from factory.runs.distance import find_unmatched_tensor, have_same_bits, measure_tensor_distances
from factory.runs.trace import read_checkpoint
from factory.runs.untrusted_files import UntrustedFileError
from factory.sandbox import sandbox
from factory.sandbox.sandbox import SandboxLimits
from factory.training.averaging import read_average_plan
from kernels.contract.message import Message
from trainer.contract.checkpoint.format import Checkpoint, format_checkpoint_name


class AverageReplayError(FactoryError):
    """The average could not be made again. This says nothing about the patches."""


def compare_average(
    runs: ArmRunner,
    row: SegmentRow,
    commit: str,
    live_checkpoint: Path,
    policy: AuditPolicy,
    wall_seconds: float,
    patches: Sequence[int],
) -> dict[str, Any]:
    """Return the evidence of how a live average differs from the average that ``commit`` makes of the same checkpoints.

    Raises: AverageReplayError if the replay fails; RepositoryError, IsolationError.
    """
    replay = replay_average(runs, row, commit, wall_seconds)
    settled = {"again": {"same_bits": True}, "suspects": list(patches)}
    try:
        live = read_checkpoint(live_checkpoint)
    except UntrustedFileError as error:
        unreadable = Message(
            "audit.average_unreadable",
            "The checkpoint of the average of segment {segment} cannot be read: {error}",
            segment=row.id, error=error.message,
        )  # fmt: skip
        return settled | {"told": [unreadable]}
    found = compare_averages(live, replay, policy.times)
    return found | settled if found["told"] else found


def compare_averages(live: Checkpoint, replay: Checkpoint, times: float) -> dict[str, Any]:
    """Return the evidence of two averages of the same checkpoints. ``average``: the largest distance of a tensor, in rounding errors of its dtype; at
    most ``times`` errors are allowed."""
    if missing := find_unmatched_tensor(live, replay):
        unlike = Message(
            "audit.average_tensor_unlike",
            "Tensor {tensor} is missing from the live average, or its shape or dtype differs from the replay's.",
            tensor=missing,
        )
        return {"same_bits": False, "told": [unlike]}
    told: list[Message | None] = [
        find_checkpoint_difference(remove_layout_keys(live), remove_layout_keys(replay), {}, 0.0)
    ]
    if live.state.get("averaged_from") != replay.state.get("averaged_from"):
        told.append(
            Message("audit.sources_unlike", "The live average names other checkpoints or weights than the replay.")
        )
    distances = measure_tensor_distances(replay.model, live.model)
    errors = {
        name: distance.relative_distance / torch.finfo(replay.model[name].dtype).eps
        for name, distance in distances.items()
        if distance.apart and replay.model[name].is_floating_point()
    }
    worst = max(errors, key=errors.__getitem__, default="")
    if worst and not errors[worst] <= times:
        told.append(
            Message(
                "audit.average_apart",
                "Tensor {tensor} of the live average differs from the replay's by {errors:.2g} rounding errors. At most {allowed:g} are allowed.",
                tensor=worst, errors=errors[worst], allowed=times,
            )
        )  # fmt: skip
    return {
        "same_bits": have_same_bits(live, replay),
        "told": [one for one in told if one],
        "average": {"errors": errors.get(worst, 0.0), "allowed": times},
    }


def replay_average(runs: ArmRunner, row: SegmentRow, commit: str, wall_seconds: float) -> Checkpoint:
    """Make the average of a finished segment again, with the code of ``commit``, in the sandbox. Raises: as ``compare_average``."""
    workspace, parts = runs.plant.workspace, (row.result or {})["averaged"]["sources"]
    paths = [Path(source["path"]) for source in read_average_plan(runs.plant.ledger, row.id)["sources"]]
    code = repository.checkout_commit(workspace.repository, commit, workspace.worktrees / f"audit-{row.id}")
    output = runs.home / "average"
    words = [
        str(output / "checkpoints"),
        *map(str, paths),
        "--weights",
        ",".join(repr(part["weight"]) for part in parts),
    ]
    size = max((sum(file.stat().st_size for file in path.iterdir()) for path in paths if path.is_dir()), default=0)
    limits = SandboxLimits(
        wall_seconds=wall_seconds,
        memory=max(SandboxLimits.memory, 8 * size),
        file=max(SandboxLimits.file, 2 * size),
        output=max(SandboxLimits.output, 4 * size),
    )
    command = [sys.executable, "-m", "trainer.tools.average", *words]
    ended = sandbox.run_in_sandbox(command, output=output, readonly=[code, *paths], cwd=code, limits=limits)
    try:
        if ended.ok:
            return read_checkpoint(
                output / "checkpoints" / format_checkpoint_name(row.last_step), [output, output / "checkpoints"]
            )
        why: str = ended.describe_ending()
    except UntrustedFileError as error:
        why = error.message
    raise AverageReplayError(
        "audit.average_replay_failed",
        "The average of segment {segment} could not be made again from the checkpoints {steps}: {why}",
        segment=row.id, steps=[path.name for path in paths], why=why,
    )  # fmt: skip
