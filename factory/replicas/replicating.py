"""The noise that another data order makes: an anneal trained again and again from the checkpoint that it branched off, and measured.

A replica has the anneal's recipe, code, precision and steps; its data plan names the next documents of another permutation of the same token
shards (``DataPlan.reshuffled``). It is no segment of the ledger, so nothing goes on from it and it cannot be exported as a candidate. Its
folder below ``replicas/<anneal>/`` (``factory.runs``) holds all that a killed factory goes on from; one event records what all of them showed, and
the folder is removed. A permutation may bring documents that the trunk saw in this epoch: the noise is an upper estimate where the data are few.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from factory.computing.computing import kernels_text
from factory.core.errors import FactoryError, SegmentError
from factory.core.faults import cannot_be_read_now
from factory.core.removal import remove
from factory.core.workspace import Workspace
from factory.evals.policy import EvalPolicy
from factory.evals.suite import identity_sha256, item_identity
from factory.gates.patch.held_out import held_out_texts, weights_bits
from factory.gates.release.policy import ReleasePolicy
from factory.gates.release.replicas import MEASURED, ReplicaNoise, due, may_start
from factory.ledger.ledger import record
from factory.ledger.plant import Plant
from factory.ledger.removals import with_contents
from factory.ledger.rows import Reads, SegmentRow, Subject
from factory.retrying.watchdog import usual_of
from factory.runs.arm import Arm
from factory.runs.folders import result_of
from factory.runs.live_code import LiveCode
from factory.runs.running import Runs
from factory.runs.trace import read_checkpoint
from factory.training.planning import last_checkpoint
from factory.training.segment_folder import spec_of

ENDS_THEM = "'replicas: {count: 0}' in gates/release.yaml ends them"


def replicate(plant: Plant, anneal: int) -> None:
    """Train the next replica of an anneal; once all are trained, measure them and record what they showed. Safe to repeat.

    What is left of an anneal that is not due is removed. Raises: FactoryError when a trainer fails; PausedError.
    """
    policy = ReleasePolicy.load(plant.workspace.policy("gates/release.yaml"))
    wanted = wanted_now(plant.workspace, plant.ledger, policy)
    runs = runs_of(plant, anneal)
    if wanted is None or wanted[0].id != anneal:
        remove(runs.home)
        return
    row, release = wanted
    arms = [replica(plant, row, number) for number in range(1, policy.replicas.count + 1)]
    for number, arm in enumerate(arms, 1):
        if _fault(runs, arm):
            _train(runs, row, number, arm)
            return
    _measure(plant, row, release, [runs.trace(arm).checkpoint for arm in arms], policy)
    remove(runs.home)


def waits(workspace: Workspace, db: Reads, policy: ReleasePolicy) -> int | None:
    """The anneal whose replicas are to be trained, measured or cleared away; None: there is none."""
    if wanted := wanted_now(workspace, db, policy):
        return wanted[0].id
    left = sorted(int(path.name) for path in folder_of(workspace).glob("*") if path.name.isdigit())
    return left[0] if left else None


def wanted_now(workspace: Workspace, db: Reads, policy: ReleasePolicy) -> tuple[SegmentRow, int] | None:
    """The anneal that is due, and its release. One whose parent's checkpoint is gone is not: the next release's is; nor is one while replicas
    would take more than their share of all steps, unless some of its are there."""
    wanted = due(db, policy.replicas)
    if wanted is None:
        return None
    begun = (folder_of(workspace) / f"{wanted[0].id:05d}").is_dir()
    if not begun and not may_start(db, policy.replicas, wanted[0]):
        return None
    sql = "SELECT path FROM checkpoints WHERE segment = :segment ORDER BY step DESC LIMIT 1"
    there = db.read(sql, segment=wanted[0].parent)
    return wanted if there and (Path(there[0]["path"]) / "manifest.json").is_file() else None


def folder_of(workspace: Workspace) -> Path:
    return workspace.root / "replicas"


def runs_of(plant: Plant, anneal: int) -> Runs:
    return Runs(plant, folder_of(plant.workspace) / f"{anneal:05d}", "replica", Subject("segment", anneal))


def replica(plant: Plant, row: SegmentRow, number: int) -> Arm:
    """The anneal, on the next documents of another order of the same data."""
    spec = spec_of(plant.ledger, row)
    spec["data_plan"] = with_contents(plant.ledger, spec["data_plan"])
    order = {"reshuffled": spec["data_plan"].get("reshuffled", 0) + number}
    return Arm(f"replica {number}", spec, row.code_commit, plan=order, kernels=kernels_text(row.computing))


def _fault(runs: Runs, arm: Arm) -> str:
    """Why a replica is not there, whole."""
    from trainer.contract.checkpoint.format import find_fault

    try:
        return find_fault(Path(result_of(runs.folder(arm), arm.last)["checkpoint"]))
    except (SegmentError, OSError) as error:
        if cannot_be_read_now(error):
            raise
        return str(error)


def _train(runs: Runs, row: SegmentRow, number: int, arm: Arm) -> None:
    plant, folder = runs.plant, runs.folder(arm)
    if (folder / "result.json").exists():
        remove(folder)  # it is damaged
    plant.progress.line(
        f"  segment {row.id}: replica {number}, another order of the same data (steps {row.first_step}–{row.last_step})"
    )
    title = f"replica {number} of segment {row.id}"
    done = runs.live(LiveCode.of(plant, row.code_commit), [arm], title, usual_of(plant.ledger, row))
    if done.code:
        raise FactoryError(f"{title} failed: {done.line} (log: {folder}.log); {ENDS_THEM}")


def _measure(plant: Plant, row: SegmentRow, release: int, replicas: Sequence[Path], policy: ReleasePolicy) -> None:
    """Bits per byte of the anneal and of its replicas on the dev half; one event. The sealed half is for candidates."""
    from trainer.contract.checkpoint.format import manifest_sha256

    evals = EvalPolicy.load(plant.workspace.policy("evals.yaml"))
    texts, _ = held_out_texts(evals.documents_per_domain, evals.document_bytes, plant)
    if not texts:
        raise FactoryError(
            f"no held-out document can be read, so segment {row.id}'s replicas cannot be measured; {ENDS_THEM}"
        )
    checkpoints = [Path(last_checkpoint(plant.ledger, row.id)["path"]), *replicas]
    runs = []
    with plant.progress.task(f"measuring replicas of segment {row.id}", len(checkpoints)) as task:
        for checkpoint in checkpoints:
            found = weights_bits(read_checkpoint(checkpoint).model, row.recipe_json, texts, evals)
            task.advance(1, "bits per byte")
            if broken := sorted(domain for domain, bits in found.items() if not math.isfinite(bits)):
                raise FactoryError(
                    f"{checkpoint} has no finite loss on held-out documents of {', '.join(broken)}, so segment {row.id}'s replicas say "
                    f"nothing of the data order's noise; {ENDS_THEM}"
                )
            runs.append(found)
    documents = {"items": [item_identity(text.document) for text in texts]}
    detail: dict[str, Any] = {
        "release": release, "recipe_sha256": row.recipe_sha256, "documents_sha256": identity_sha256(documents), "runs": runs,
        "checkpoints": [manifest_sha256(checkpoint) for checkpoint in checkpoints],
    }  # fmt: skip
    with plant.ledger.begin() as tx:
        record(tx, MEASURED, Subject("segment", row.id), detail)
    plant.progress.line(f"  {describe(ReplicaNoise.of(runs, policy.target.weights))}")


def describe(noise: ReplicaNoise) -> str:
    """In words.

    >>> describe(ReplicaNoise(3, {"code": 0.0042, "docs": 0.005}, 0.0031))
    'another order of the same data moves bits per byte by 0.0042 (code), 0.0050 (docs): standard deviation of 3 trainings'
    """
    each = ", ".join(f"{value:.4f} ({domain})" for domain, value in sorted(noise.by_domain.items()))
    return f"another order of the same data moves bits per byte by {each}: standard deviation of {noise.runs} trainings"
