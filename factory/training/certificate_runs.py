"""The runs behind a certificate: N steps under the old code and the new, and under the old code with other seeds.

They lie below the segment's folder until the verdict stands, and take (3 + seeds) × N steps. Nothing here judges.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

from factory.computing import computing
from factory.core.faults import is_of_no_file
from factory.git.repository import CheckoutError, RepositoryError, changes
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.ledger.removals import with_contents
from factory.ledger.rows import SegmentRow, Subject
from factory.runs.arm import Arm, Spec
from factory.runs.distance import Tensors, apart, sizes, together
from factory.runs.live_code import LiveCode
from factory.runs.running import Runs
from factory.runs.trace import Trace, read_checkpoint
from factory.runs.untrusted_files import UntrustedFileError
from factory.training.certificate import SERIES, TRAINED_WITH, CertificateEvidence, CertificatePolicy, Numbers
from factory.training.planning import plan_of
from factory.training.segment_folder import spec_of

EXIT_WRONG_INPUT = 2  # the trainer cannot run this spec, recipe, data or checkpoint


def changed_files(repository: Path, old: str, new: str) -> list[str]:
    """Files that training reads and that differ between two commits. Raises: RepositoryError."""
    return [change.path for change in changes(repository, old, new) if change.path.startswith(TRAINED_WITH)]


def gather(plant: Plant, row: SegmentRow, parent: SegmentRow, policy: CertificatePolicy) -> CertificateEvidence:
    """Run what has to be run. Raises: SegmentError when the trainer was stopped or the disk is full, CheckoutError, and what a fault of the
    machine makes of it: begin again then."""
    evidence = CertificateEvidence(parent.code_commit, row.code_commit, [])
    try:
        files = changed_files(plant.workspace.repository, parent.code_commit, row.code_commit)
        changed = files + computing.changed(parent, row)
        if not changed:
            return evidence
        sides = {name: LiveCode.of(plant, side.code_commit) for name, side in (("old", parent), ("new", row))}
    except RepositoryError as error:
        if isinstance(error, CheckoutError) or is_of_no_file(error):
            raise
        return replace(evidence, changed=["(unknown)"], old_failed=str(error))
    what = f"{parent.code_commit[:12]} → {row.code_commit[:12]}, {len(files)} files" if files else ""
    what = "; ".join(filter(None, (what, *changed[len(files) :])))
    plant.progress.line(
        f"  what training runs changed since segment {parent.id} ({what}): a certificate is needed before segment "
        f"{row.id} starts"
    )
    steps = min(policy.steps, row.last_step - row.first_step)
    plan = with_contents(plant.ledger, plan_of(plant.ledger, row))
    seeds = tuple(seed_of(plan, number) for number in range(policy.seeds))
    evidence = replace(evidence, changed=changed, first_step=row.first_step, steps=steps, seeds=seeds)
    runs = Runs(plant, Path(row.folder) / "certificate", "certificate", Subject("segment", row.id))
    for basis, spec in bases(plant.ledger, row, parent, steps).items():
        evidence = replace(evidence, basis=basis, old_failed="")
        old, again, others, new = arms(spec, parent, row, seeds)
        done = runs.live(sides["old"], [old, *again, *others], "certificate, old code")
        if done.code == 0:
            break
        evidence = replace(evidence, old_failed=done.line)
        if done.code != EXIT_WRONG_INPUT:
            return evidence
    else:
        return evidence
    done = runs.live(sides["new"], [new], "certificate, new code")
    evidence = replace(evidence, new_failed=done.line)
    before, repeated, after, *seeded = map(runs.trace, (old, (*again, old)[0], new, *others))
    return compare(evidence, Path(spec["initial_checkpoint"]), before, repeated, seeded, after)


def seed_of(plan: dict[str, Any], number: int) -> int:
    """The seed of a noise run: of what is in the data plan, wherever it lies, so that a killed factory goes on with its runs
    and the same data gives the same noise on every machine."""
    shards = sorted(shard["id"] for shard in plan["token_shards"])
    return int(hashlib.sha256(f"{plan['seed']}/{shards}/{number}".encode()).hexdigest()[:7], 16)


def bases(ledger: Ledger, row: SegmentRow, parent: SegmentRow, steps: int) -> dict[Any, Spec]:
    """What to run both codes on, best first: as the segment will run, else as its parent ran.

    The second is for a segment whose recipe or data plan has keys that the old code cannot read. An anneal is squeezed
    into ``steps`` steps, so that all of its schedule is run.
    """
    spec = spec_of(ledger, row) | {"last_step": row.first_step + steps}
    plain = {key: spec[key] for key in ("kind", "first_step", "last_step", "initial_checkpoint")}
    before = {
        "recipe": parent.recipe_json,
        "data_plan": with_contents(ledger, plan_of(ledger, parent)),
        "restart_data": True,
    }
    return {"segment": spec, "parent": plain | before}


def arms(
    spec: Spec, parent: SegmentRow, row: SegmentRow, seeds: Sequence[int]
) -> tuple[Arm, list[Arm], list[Arm], Arm]:
    """Of one basis: the old code, the old code a second time (or nothing), the old code under other seeds, the new code. Each side computes as
    its own segment does.

    Where the precision changes, the old one may be a hundred times as slow on this machine: only the first is run in it, once; the old code's
    other seeds, which the noise is measured over, run in the new one.
    """
    precisions = [one.recipe_json["precision"] for one in (parent, row)]
    old, new = (
        Arm(
            f"{side} code", spec | {"code_commit": one.code_commit}, one.code_commit, precision=precision,
            kernels=computing.kernels_text(one.computing),
        )
        for side, one, precision in zip(("old", "new"), (parent, row), precisions)
    )  # fmt: skip
    again = [replace(old, name="old code, again", repeat=1)] if precisions[0] == precisions[1] else []
    others = [replace(old, name=f"old code, seed {seed}", seed=seed, precision=precisions[1]) for seed in seeds]
    return old, again, others, new


# -- what the runs left ------------------------------------------------------------------------------------------------
def compare(
    evidence: CertificateEvidence, start: Path, old: Trace, again: Trace, others: Sequence[Trace], new: Trace
) -> CertificateEvidence:
    """Fill in the numbers and the distances between weights. Holds the weights of three runs at a time.

    Raises: what a fault of the machine makes of it, which says nothing about the runs.
    """
    try:
        origin = read_checkpoint(start).model
        old_numbers, old_weights = _read(old, origin)
        again_numbers, weights = (old_numbers, old_weights) if again == old else _read(again, origin)
        # each is read anew, so that two are held at a time
        between = [_weights_apart(*(replace(one).left.model for one in pair)) for pair in combinations(others, 2)]
        evidence = replace(
            evidence, old=old_numbers, again=again_numbers, others=tuple(_read(one, origin)[0] for one in map(replace, others)),
            apart_again=_weights_apart(old_weights, weights), apart_seeds=math.hypot(*between) / math.sqrt(len(between)),
        )  # fmt: skip
    except UntrustedFileError as error:
        return replace(evidence, old_failed=f"what it left cannot be read: {error}")
    if evidence.new_failed:
        return evidence
    try:
        numbers, weights = _read(new, origin)
    except UntrustedFileError as error:
        return replace(evidence, new_failed=f"what it left cannot be read: {error}")
    return replace(evidence, new=numbers, apart=_weights_apart(old_weights, weights))


def _weights_apart(a: Tensors, b: Tensors) -> float:
    return together(apart(a, b).values()).apart


def _read(trace: Trace, origin: Tensors) -> tuple[Numbers, dict[str, Any]]:
    """Raises: UntrustedFileError when something is missing or of another shape."""
    left = trace.left
    moved = {name: one.apart for name, one in apart(origin, left.model).items()}
    if not all(map(math.isfinite, moved.values())):
        raise UntrustedFileError("its weights are not finite, or have other names or shapes than the checkpoint's")
    return Numbers(trace.series(SERIES), moved, sizes(left.optimizer)), left.model
