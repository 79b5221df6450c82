"""Measures the noise of the data order: trains an anneal several more times from the checkpoint before it, and compares the models.

A replica has the anneal's recipe, code, precision and steps. Its data plan names the next documents of another permutation of the same token
shards (``DataPlan.reshuffled``). A replica is not a segment of the ledger, so no training continues from it, and it cannot become a candidate.
After a kill, the factory continues from the replica's folder below ``replicas/<anneal>/`` (``factory.runs``). One event records the results of all
replicas, and then the folder is removed. A permutation may repeat documents that the trunk has read in this epoch, so with little data the
measured noise is an upper estimate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from factory.computing.compute_settings import format_kernels_file
from factory.core.errors import FactoryError, SegmentError
from factory.core.faults import is_temporary_read_failure
from factory.core.path_removal import remove_path
from factory.core.workspace import Workspace
from factory.evals.policy import EvalPolicy
from factory.evals.suite import hash_suite, make_held_out_document_identity
from factory.gates.patch.held_out_scores import measure_bits_per_byte, read_held_out_texts
from factory.gates.release.policy import ReleasePolicy
from factory.gates.release.replica_noise import MEASURED, ReplicaNoise, find_anneal_due_for_replicas, may_start_replicas
from factory.ledger.ledger import record_event
from factory.ledger.plant import Plant
from factory.ledger.removals import replace_erased_token_shards
from factory.ledger.rows import SegmentRow, SqlReader, Subject
from factory.retrying.watchdog import find_usual_durations
from factory.runs.arm import Arm
from factory.runs.arm_runner import ArmRunner
from factory.runs.live_code import LiveCode
from factory.runs.trace import read_checkpoint
from factory.runs.trainer_folder import read_result
from factory.training.planning import read_last_checkpoint
from factory.training.segment_folder import make_segment_spec
from kernels.contract.message import Message


def train_next_replica(plant: Plant, anneal: int) -> None:
    """Train the next replica of an anneal. Once all are trained, measure them and record the results. Safe to repeat.

    If the anneal's replicas are not due, only its folder of replicas is removed. Raises: FactoryError if a trainer fails; PausedError.
    """
    policy = ReleasePolicy.load(plant.workspace.policy_path("gates/release.yaml"))
    wanted = find_anneal_to_replicate(plant.workspace, plant.ledger, policy)
    runs = make_replica_runner(plant, anneal)
    if wanted is None or wanted[0].id != anneal:
        remove_path(runs.home)
        return
    row, release = wanted
    arms = [make_replica_arm(plant, row, number) for number in range(1, policy.replicas.count + 1)]
    for number, arm in enumerate(arms, 1):
        if _fault(runs, arm):
            _train(runs, row, number, arm)
            return
    _measure(plant, row, release, [runs.open_arm_trace(arm).final_checkpoint_path for arm in arms], policy)
    remove_path(runs.home)


def find_anneal_with_unfinished_replicas(workspace: Workspace, db: SqlReader, policy: ReleasePolicy) -> int | None:
    """Return the number of an anneal whose replicas must be trained, measured or removed; None: no such anneal."""
    if wanted := find_anneal_to_replicate(workspace, db, policy):
        return wanted[0].id
    left = sorted(int(path.name) for path in find_replicas_folder(workspace).glob("*") if path.name.isdigit())
    return left[0] if left else None


def find_anneal_to_replicate(
    workspace: Workspace, db: SqlReader, policy: ReleasePolicy
) -> tuple[SegmentRow, int] | None:
    """Return the anneal whose replicas are due, and its release; None: no such anneal.

    An anneal is skipped if its parent's checkpoint is missing, or if no replica has begun and they would take more than their share of all steps.
    """
    wanted = find_anneal_due_for_replicas(db, policy.replicas)
    if wanted is None:
        return None
    begun = (find_replicas_folder(workspace) / f"{wanted[0].id:05d}").is_dir()
    if not begun and not may_start_replicas(db, policy.replicas, wanted[0]):
        return None
    sql = "SELECT path FROM checkpoints WHERE segment = :segment ORDER BY step DESC LIMIT 1"
    there = db.read(sql, segment=wanted[0].parent)
    return wanted if there and (Path(there[0]["path"]) / "manifest.json").is_file() else None


def find_replicas_folder(workspace: Workspace) -> Path:
    return workspace.root / "replicas"


def make_replica_runner(plant: Plant, anneal: int) -> ArmRunner:
    return ArmRunner(
        plant, find_replicas_folder(plant.workspace) / f"{anneal:05d}", "replica", Subject("segment", anneal)
    )


def make_replica_arm(plant: Plant, row: SegmentRow, number: int) -> Arm:
    """Return the arm of a replica: the anneal with a data plan that names the next documents of another order of the same data."""
    spec = make_segment_spec(plant.ledger, row)
    spec["data_plan"] = replace_erased_token_shards(plant.ledger, spec["data_plan"])
    order = {"reshuffled": spec["data_plan"].get("reshuffled", 0) + number}
    return Arm(f"replica {number}", spec, row.code_commit, plan=order, kernels=format_kernels_file(row.computing))


def _fault(runs: ArmRunner, arm: Arm) -> str:
    """Return why a replica is unfinished or damaged; '' if it is neither."""
    from trainer.contract.checkpoint.format import find_checkpoint_fault

    try:
        return find_checkpoint_fault(Path(read_result(runs.find_arm_folder(arm), arm.last_step)["checkpoint"]))
    except (SegmentError, OSError) as error:
        if is_temporary_read_failure(error):
            raise
        return str(error)


def _train(runs: ArmRunner, row: SegmentRow, number: int, arm: Arm) -> None:
    plant, folder = runs.plant, runs.find_arm_folder(arm)
    if (folder / "result.json").exists():
        remove_path(folder)  # the replica is damaged
    plant.progress.line(
        Message(
            "replicas.training",
            "  training replica {number} of segment {segment} with another order of the same data (steps {first}–{last})",
            segment=row.id, number=number, first=row.first_step, last=row.last_step,
        )
    )  # fmt: skip
    title = f"replica {number} of segment {row.id}"
    done = runs.train_with_live_code(
        LiveCode.check_out_commit(plant, row.code_commit), [arm], title, find_usual_durations(plant.ledger, row)
    )
    if done.code:
        raise FactoryError(
            "replicas.failed",
            "{title} failed: {problem} (log: {log}). To train no replicas, write 'replicas: {{count: 0}}' in gates/release.yaml.",
            title=title.capitalize(), problem=done.line, log=f"{folder}.log",
        )  # fmt: skip


def _measure(plant: Plant, row: SegmentRow, release: int, replicas: Sequence[Path], policy: ReleasePolicy) -> None:
    """Measure bits per byte of the anneal and its replicas on the dev half, and record an event. The sealed half is for candidates."""
    from trainer.contract.checkpoint.format import hash_manifest

    evals = EvalPolicy.load(plant.workspace.policy_path("evals.yaml"))
    texts, _ = read_held_out_texts(evals.documents_per_domain, evals.document_bytes, plant)
    if not texts:
        raise FactoryError(
            "replicas.nothing_held_out",
            "No held-out document can be read, so the replicas of segment {segment} cannot be measured. To train no replicas, write 'replicas: "
            "{{count: 0}}' in gates/release.yaml.",
            segment=row.id,
        )
    checkpoints = [Path(read_last_checkpoint(plant.ledger, row.id)["path"]), *replicas]
    runs = []
    title = Message("replicas.measuring", "measuring replicas of segment {segment}", segment=row.id)
    with plant.progress.task(title, len(checkpoints)) as task:
        for checkpoint in checkpoints:
            found = measure_bits_per_byte(read_checkpoint(checkpoint).model, row.recipe_json, texts, evals)
            task.advance(1, "bits per byte")
            if broken := sorted(domain for domain, bits in found.items() if not math.isfinite(bits)):
                raise FactoryError(
                    "replicas.no_finite_loss",
                    "{checkpoint} has no finite loss on held-out documents of {domains}, so the replicas of segment {segment} do not show the noise "
                    "of the data order. To train no replicas, write 'replicas: {{count: 0}}' in gates/release.yaml.",
                    checkpoint=checkpoint, domains=broken, segment=row.id,
                )  # fmt: skip
            runs.append(found)
    documents = {"items": [make_held_out_document_identity(text.document) for text in texts]}
    detail: dict[str, Any] = {
        "release": release, "recipe_sha256": row.recipe_sha256, "documents_sha256": hash_suite(documents), "runs": runs,
        "checkpoints": [hash_manifest(checkpoint) for checkpoint in checkpoints],
    }  # fmt: skip
    with plant.ledger.begin() as tx:
        record_event(tx, MEASURED, Subject("segment", row.id), detail)
    noise = describe_data_order_noise(ReplicaNoise.compute_from_runs(runs, policy.target.weights))
    plant.progress.line(Message("replicas.measured", "  {noise}", noise=noise))


def describe_data_order_noise(noise: ReplicaNoise) -> Message:
    """Return the noise as a line for a person.

    >>> describe_data_order_noise(ReplicaNoise(3, {"code": 0.0042, "docs": 0.005}, 0.0031))
    'If only the order of the data changes, the standard deviation of bits per byte is 0.0042 (code), 0.0050 (docs) in 3 trainings.'
    """
    return Message(
        "replicas.noise",
        "If only the order of the data changes, the standard deviation of bits per byte is {named} in {runs} trainings.",
        named=[f"{value:.4f} ({domain})" for domain, value in sorted(noise.by_domain.items())],
        domains=dict(noise.by_domain), runs=noise.runs,
    )  # fmt: skip
