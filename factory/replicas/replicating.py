"""The noise that another data order makes: an anneal trained again and again from the checkpoint that it branched off, and measured.

A replica has the anneal's recipe, code, precision and steps; its data plan names the next documents of another permutation of the same token
shards (``DataPlan.reshuffled``). It is no segment of the ledger, so nothing goes on from it and it cannot be exported as a candidate. Its
folder, ``replicas/<anneal>/<number>``, holds all that a killed factory goes on from; one event records what all of them showed, and the folder is
removed. A permutation may bring documents that the trunk saw in this epoch: the noise is an upper estimate where the data are few.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from factory.core.errors import FactoryError, SegmentError
from factory.core.faults import cannot_be_read_now
from factory.core.removal import remove
from factory.evals.policy import EvalPolicy
from factory.evals.reference_model import ReferenceModel
from factory.evals.suite import held_out_documents, identity_sha256, item_identity
from factory.evals.tasks import bits_per_byte, encode_documents, ratio_bits
from factory.evals.token_bytes import TokenBytes
from factory.gates.release.policy import ReleasePolicy
from factory.gates.release.replicas import MEASURED, ReplicaNoise
from factory.ingest.tokenizer import Tokenizer
from factory.ledger.ledger import data_plans, record
from factory.ledger.places import portable
from factory.ledger.plant import Plant
from factory.ledger.removals import with_contents
from factory.ledger.rows import SegmentRow, Subject
from factory.replicas.waiting import folder_of, wanted_now
from factory.runs.folders import clear, result_of
from factory.runs.live_code import LiveCode
from factory.training.planning import last_checkpoint, plan_of
from factory.training.segment_folder import EXPORT, name_in
from factory.training.training import run_trainer

ENDS_THEM = "'replicas: {count: 0}' in gates/release.yaml ends them"


def replicate(plant: Plant, anneal: int) -> None:
    """Train the next replica of an anneal; once all are trained, measure them and record what they showed. Safe to repeat.

    What is left of an anneal that is not due is removed. Raises: FactoryError when a trainer or an export fails; PausedError.
    """
    policy = ReleasePolicy.load(plant.workspace.policy("gates/release.yaml"))
    wanted = wanted_now(plant.workspace, plant.ledger, policy)
    folder = folder_of(plant.workspace) / f"{anneal:05d}"
    if wanted is None or wanted[0].id != anneal:
        remove(folder)
        return
    row, release = wanted
    folders = [folder / str(number) for number in range(1, policy.replicas.count + 1)]
    for number, one in enumerate(folders, 1):
        if _fault(one, row):
            _train(plant, row, number, one)
            return
    _measure(plant, row, release, folders, policy)
    remove(folder)


def _fault(folder: Path, row: SegmentRow) -> str:
    """Why a replica is not there, whole."""
    from trainer.contract.checkpoint.format import find_fault

    try:
        return find_fault(Path(result_of(folder, row.last_step)["checkpoint"]))
    except (SegmentError, OSError) as error:
        if cannot_be_read_now(error):
            raise
        return str(error)


def _train(plant: Plant, row: SegmentRow, number: int, folder: Path) -> None:
    if (folder / "result.json").exists():
        remove(folder)  # it is damaged
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    plant.progress.line(
        f"  segment {row.id}: replica {number}, another order of the same data (steps {row.first_step}–{row.last_step})"
    )
    own = replace(row, data_plan=_reshuffled(plant, row, number))
    code, hung = run_trainer(plant, own, folder, None)
    if hung or code or not (folder / "result.json").exists():
        how = hung.says if hung else f"ended with exit {code}"
        log = plant.workspace.logs / f"segment-{row.id:05d}.log"
        raise FactoryError(f"replica {number} of segment {row.id} {how} (log: {log}); {ENDS_THEM}")


def _reshuffled(plant: Plant, row: SegmentRow, number: int) -> str:
    """The id of an anneal's plan with other documents next, in the ledger."""
    from trainer.contract.data.data_plan import DataPlan

    planned = DataPlan.from_json(with_contents(plant.ledger, plan_of(plant.ledger, row)))
    values = json.loads(planned.model_copy(update={"reshuffled": planned.reshuffled + number}).to_json())
    plan = DataPlan.from_json(portable(plant.workspace.root, values))
    with plant.ledger.begin() as tx:
        if tx.execute(sa.select(data_plans.c.id).where(data_plans.c.id == plan.id)).first() is None:
            tx.execute(data_plans.insert().values(id=plan.id, plan=json.loads(plan.to_json()), created_at=time.time()))
    return plan.id


def _measure(
    plant: Plant,
    row: SegmentRow,
    release: int,
    folders: Sequence[Path],
    policy: ReleasePolicy,
) -> None:
    """Bits per byte of the anneal and of its replicas on the dev half; one event."""
    from trainer.contract.checkpoint.format import manifest_sha256

    own = Path(last_checkpoint(plant.ledger, row.id)["path"])
    checkpoints = [own, *(Path(result_of(folder, row.last_step)["checkpoint"]) for folder in folders)]
    code = LiveCode.of(plant, row.code_commit)
    measured, documents = _ruler(plant)
    runs = []
    with plant.progress.task(f"measuring replicas of segment {row.id}", None) as task:
        for checkpoint in checkpoints:
            scratch = folders[0].parent / "export"
            remove(scratch)
            scratch.mkdir()
            done = code.run(
                "-m", name_in(code, EXPORT), str(checkpoint), str(scratch), writable=[scratch], readonly=[checkpoint]
            )
            clear(scratch, plant.progress)
            if done.returncode:
                last = done.stderr.strip().splitlines()[-1:] or ["no message"]
                raise FactoryError(f"the export of {checkpoint}, to be measured, failed: {last[0]}")
            found = measured(scratch, lambda n: task.advance(n, "bits per byte"))
            if broken := sorted(domain for domain, bits in found.items() if not math.isfinite(bits)):
                raise FactoryError(
                    f"{checkpoint} has no finite loss on held-out documents of {', '.join(broken)}, so segment {row.id}'s replicas say "
                    f"nothing of the data order's noise; {ENDS_THEM}"
                )
            runs.append(found)
    detail: dict[str, Any] = {
        "release": release, "recipe_sha256": row.recipe_sha256, "documents_sha256": documents, "runs": runs,
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


def _ruler(plant: Plant) -> tuple[Callable[[Path, Callable[[float], None]], dict[str, float]], str]:
    """What gives an export's bits per byte by domain on the dev half, and the hash of the documents. The sealed half is for candidates."""
    policy = EvalPolicy.load(plant.workspace.policy("evals.yaml"))
    dev = held_out_documents(plant.ledger, policy.documents_per_domain, sealed=False)
    tokenizer, token_bytes = Tokenizer.load(plant.workspace.tokenizer), TokenBytes.load(plant.workspace.tokenizer)
    texts = encode_documents(dev, tokenizer, token_bytes, policy.document_bytes)

    def measured(export: Path, advance: Callable[[float], None]) -> dict[str, float]:
        return ratio_bits(bits_per_byte(ReferenceModel.load(export), texts, policy, advance))

    return measured, identity_sha256({"items": list(map(item_identity, dev)), "tokenizer": tokenizer.sha256})
