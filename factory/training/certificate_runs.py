"""Runs that a certificate needs: N steps with the old code, with the new code, and with the old code and other seeds.

Together the runs take (3 + seeds) × N steps. Their files are below the segment's folder until the verdict is recorded.
Nothing here judges.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

from factory.computing import compute_settings
from factory.core.faults import is_machine_fault_unrelated_to_files
from factory.git.repository import CheckoutError, RepositoryError, read_file_changes
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.ledger.removals import replace_erased_token_shards
from factory.ledger.rows import SegmentRow, Subject
from factory.runs.arm import Arm, Spec
from factory.runs.arm_runner import ArmRunner
from factory.runs.distance import Tensors, measure_tensor_distances, measure_tensor_norms, sum_distances
from factory.runs.live_code import LiveCode
from factory.runs.trace import RunTrace, merge_adapted_weights, read_checkpoint
from factory.runs.untrusted_files import UntrustedFileError
from factory.training.certificate import (
    SERIES,
    TRAINING_FILES,
    CertificateEvidence,
    CertificatePolicy,
    JudgedRunNumbers,
)
from factory.training.planning import read_data_plan
from factory.training.segment_folder import make_segment_spec
from kernels.contract.message import Message

EXIT_INVALID_INPUT = 2  # the trainer cannot run this spec, recipe, data or checkpoint


def list_changed_training_files(repository: Path, old: str, new: str) -> list[str]:
    """The files that training reads and that differ between two commits. Raises: RepositoryError."""
    return [change.path for change in read_file_changes(repository, old, new) if change.path.startswith(TRAINING_FILES)]


def gather_certificate_evidence(
    plant: Plant, row: SegmentRow, before: SegmentRow, policy: CertificatePolicy
) -> CertificateEvidence:
    """Make the runs that the certificate needs; returns their evidence.

    Raises: SegmentError when the trainer was stopped or the disk is full; CheckoutError; any error that a fault of the machine causes.
    After each of them the caller may begin again.
    """
    evidence = CertificateEvidence(before.code_commit, row.code_commit, [])
    try:
        files = list_changed_training_files(plant.workspace.repository, before.code_commit, row.code_commit)
        changed = files + compute_settings.describe_compute_changes(before, row)
        if not changed:
            return evidence
        sides = {
            name: LiveCode.check_out_commit(plant, side.code_commit) for name, side in (("old", before), ("new", row))
        }
    except RepositoryError as error:
        if isinstance(error, CheckoutError) or is_machine_fault_unrelated_to_files(error):
            raise
        return replace(evidence, changed=["(unknown)"], old_failed=str(error))
    what = f"{before.code_commit[:12]} → {row.code_commit[:12]}, {len(files)} files" if files else ""
    plant.progress.line(
        Message(
            "training.certificate_needed",
            "  The code, precision or kernels changed since segment {parent} ({changes}). Segment {segment} needs a certificate.",
            parent=before.id,
            segment=row.id,
            changes=[change for change in (what, *changed[len(files) :]) if change],
        )  # fmt: skip
    )
    steps = min(policy.steps, row.last_step - row.first_step)
    plan = replace_erased_token_shards(plant.ledger, read_data_plan(plant.ledger, row))
    seeds = tuple(derive_noise_seed(plan, number) for number in range(policy.seeds))
    evidence = replace(evidence, changed=changed, seeds=seeds)
    runs = ArmRunner(plant, Path(row.folder) / "certificate", "certificate", Subject("segment", row.id))
    for basis, spec in list_specs_for_both_commits(plant.ledger, row, before, steps).items():
        evidence = replace(evidence, basis=basis, old_failed="", first_step=spec["first_step"])
        evidence = replace(evidence, steps=spec["last_step"] - spec["first_step"])
        old, again, others, new = make_certificate_arms(spec, before, row, seeds)
        done = runs.train_with_live_code(sides["old"], [old, *again, *others], "certificate, old code")
        if done.code == 0:
            break
        evidence = replace(evidence, old_failed=done.line)
        if done.code != EXIT_INVALID_INPUT:
            return evidence
    else:
        return evidence
    done = runs.train_with_live_code(sides["new"], [new], "certificate, new code")
    evidence = replace(evidence, new_failed=done.line)
    ours, repeated, after, *seeded = map(runs.open_arm_trace, (old, (*again, old)[0], new, *others))
    return compare_certificate_runs(evidence, Path(spec["initial_checkpoint"]), ours, repeated, seeded, after)


def derive_noise_seed(plan: dict[str, Any], number: int) -> int:
    """The seed of a noise run. It depends on the content of the data plan alone.

    After a kill, the factory therefore resumes the same runs, and the same data give the same noise on every machine.
    """
    shards = sorted(shard["id"] for shard in plan["token_shards"])
    return int(hashlib.sha256(f"{plan['seed']}/{shards}/{number}".encode()).hexdigest()[:7], 16)


def list_specs_for_both_commits(ledger: Ledger, row: SegmentRow, before: SegmentRow, steps: int) -> dict[Any, Spec]:
    """The specs that both commits can be run with, best first: that of the segment, that with the recipe and data of the segment with the old code,
    and that of this segment alone.

    The later ones are for a segment whose recipe, data plan or checkpoint has keys that the old code cannot read. An anneal is shortened
    to ``steps`` steps, so that its whole schedule is run.
    """
    spec = make_segment_spec(ledger, row) | {"last_step": row.first_step + steps}
    plain = {key: spec[key] for key in ("kind", "first_step", "last_step", "initial_checkpoint")}
    known: Spec = {
        "recipe": before.recipe_json,
        "data_plan": replace_erased_token_shards(ledger, read_data_plan(ledger, before)),
        "restart_data": True,
    }
    found = {"segment": spec, "parent": plain | known}
    if before.kind == row.kind and before.id != row.parent and before.parent:
        own = make_segment_spec(ledger, before) | known
        if Path(own["initial_checkpoint"]).exists():
            last = before.first_step + min(steps, before.last_step - before.first_step)
            found["before"] = own | {"last_step": last}
    return found


def make_certificate_arms(
    spec: Spec, before: SegmentRow, row: SegmentRow, seeds: Sequence[int]
) -> tuple[Arm, list[Arm], list[Arm], Arm]:
    """The runs of one spec: (old code, old code a second time or none, old code with each other seed, new code).

    Each commit computes as its own segment does. Where the precision changes, the old precision can be a hundred times slower on this
    machine. Then only the first run uses the old precision, and the runs with other seeds use the new precision.
    """
    precisions = [one.recipe_json["precision"] for one in (before, row)]
    old, new = (
        Arm(
            f"{side} code", spec | {"code_commit": one.code_commit}, one.code_commit, precision=precision,
            kernels=compute_settings.format_kernels_file(one.computing),
        )
        for side, one, precision in zip(("old", "new"), (before, row), precisions)
    )  # fmt: skip
    again = [replace(old, name="old code, again", repeat=1)] if precisions[0] == precisions[1] else []
    others = [replace(old, name=f"old code, seed {seed}", seed=seed, precision=precisions[1]) for seed in seeds]
    return old, again, others, new


# -- what the runs left ------------------------------------------------------------------------------------------------
def compare_certificate_runs(
    evidence: CertificateEvidence,
    start: Path,
    old: RunTrace,
    old_again: RunTrace,
    other_seeds: Sequence[RunTrace],
    new: RunTrace,
) -> CertificateEvidence:
    """Add the numbers of each run and the distances between weights. Holds the weights of three runs in memory.

    Raises: any error that a fault of the machine causes; such an error is no evidence about the runs.
    """
    try:
        origin = merge_adapted_weights(read_checkpoint(start))
        old_numbers, old_weights = _read(old, origin)
        again_numbers, weights = (old_numbers, old_weights) if old_again == old else _read(old_again, origin)
        # Each checkpoint is read again, so that only two are in memory.
        between = [
            _weights_apart(*(merge_adapted_weights(replace(one).final_checkpoint) for one in pair))
            for pair in combinations(other_seeds, 2)
        ]
        evidence = replace(
            evidence, old=old_numbers, again=again_numbers, others=tuple(_read(one, origin)[0] for one in map(replace, other_seeds)),
            apart_again=_weights_apart(old_weights, weights), apart_seeds=math.hypot(*between) / math.sqrt(len(between)),
        )  # fmt: skip
    except UntrustedFileError as error:
        return replace(evidence, old_failed=make_unreadable_run_message(error))
    if evidence.new_failed:
        return evidence
    try:
        numbers, weights = _read(new, origin)
    except UntrustedFileError as error:
        return replace(evidence, new_failed=make_unreadable_run_message(error))
    return replace(evidence, new=numbers, apart=_weights_apart(old_weights, weights))


def make_unreadable_run_message(error: Exception) -> Message:
    """The message that files of a run cannot be read."""
    return Message("training.run_not_readable", "the files of the run cannot be read: {error}", error=str(error))


def _weights_apart(a: Tensors, b: Tensors) -> float:
    return sum_distances(measure_tensor_distances(a, b).values()).apart


def _read(trace: RunTrace, origin: Tensors) -> tuple[JudgedRunNumbers, Tensors]:
    """Raises: UntrustedFileError when a file or tensor is missing or a tensor has another shape."""
    left = trace.final_checkpoint
    weights = merge_adapted_weights(left)
    moved = {name: one.apart for name, one in measure_tensor_distances(origin, weights).items()}
    if not all(map(math.isfinite, moved.values())):
        raise UntrustedFileError(
            Message(
                "training.weights_do_not_fit",
                "the weights are not finite, or their names or shapes differ from those of the checkpoint",
            )
        )
    return JudgedRunNumbers(trace.collect_metric_series(SERIES), moved, measure_tensor_norms(left.optimizer)), weights
