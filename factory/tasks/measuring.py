"""Measures a candidate on a task and records the evaluation with its items in one transaction.

The table ``evaluations`` has the evaluations of tasks, each under its task's identity, and those of the held-out suite. If a task cannot be
measured, a TaskError names it and nothing is recorded.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from factory.core.progress import Progress
from factory.evals.evaluator import refuse_damaged_export
from factory.evals.tasks import EvalItem
from factory.ingest.document_index import DocumentIndex
from factory.ingest.rules.policy import DataPolicy
from factory.ingest.rules.task_items import hash_item_ngrams
from factory.ingest.tokenizer import Tokenizer
from factory.ledger.ledger import Ledger, eval_items, evaluations, record_event
from factory.ledger.plant import Plant
from factory.ledger.rows import CandidateRow, EvaluationRow, Subject
from factory.ledger.writing import insert_row
from factory.tasks.answer_generation import generate_and_check
from factory.tasks.comparing import compute_metric_scores
from factory.tasks.items import TaskError
from factory.tasks.libraries import refuse_missing_libraries
from factory.tasks.lm_eval_run import run_lm_eval
from factory.tasks.model import Advance, TaskModel
from factory.tasks.multiple_choice import score_choices
from factory.tasks.policy import TasksPolicy
from factory.tasks.proving import is_proven, prove_task
from factory.tasks.task_file import EvalTask, TaskFile
from kernels.contract.files import replace_non_finite


def measure_task(plant: Plant, candidate_id: int, task: EvalTask, policy: TasksPolicy) -> int:
    """Measure a candidate and return the evaluation's id. Idempotent for the same candidate, task file, items and tokenizer.

    Raises: TaskError if the task cannot be measured; IsolationError without a sandbox; DamagedExportError; NoMemoryError; InputError for an
    unknown candidate.
    """
    candidate = CandidateRow.get(plant.ledger, candidate_id)
    tokenizer = Tokenizer.load(plant.workspace.tokenizer)
    identity = task.make_evaluation_identity(tokenizer.sha256)
    mine = "WHERE candidate = :candidate AND suite_sha256 = :identity"
    if known := EvaluationRow.find_first(plant.ledger, mine, candidate=candidate_id, identity=identity):
        return known.id
    contaminated = find_contaminated_items(plant, task)
    share = len(contaminated) / len(task.records)
    if share > policy.contaminated_max:
        raise TaskError(
            "measuring.contaminated",
            "task {task}: {count:,} of {items:,} items are in training data that was ingested before the task "
            "was added. At most {limit:.0%} is allowed (contaminated_max in tasks.yaml). First: record {record} "
            "in document {document}",
            task=task.name, count=len(contaminated), items=len(task.records), limit=policy.contaminated_max,
            record=contaminated[0][0] + 1, document=contaminated[0][1],
        )  # fmt: skip
    refuse_damaged_export(candidate)
    _prove(plant.ledger, task, policy, plant.progress)
    started = time.monotonic()
    model = TaskModel.load(Path(candidate.export_path), tokenizer, policy.batch_tokens, policy.device)
    with plant.progress.task(f"task {task.name}, candidate {candidate_id}", None) as bar:
        rows, said = _run(task, model, policy, lambda n: bar.advance(n))
    broken = [row for row in rows if not math.isfinite(row.value) or not row.weight > 0]
    if not rows:
        raise TaskError("measuring.no_items", "task {task}: no item was measured", task=task.name)
    if broken:
        raise TaskError(
            "measuring.not_measured", "task {task}: {count:,} of {values:,} values are not finite or have no weight",
            task=task.name, count=len(broken), values=len(rows),
        )  # fmt: skip
    summary = {
        "task": task.name,
        "kind": task.kind,
        "format": task.format,
        "protocol": task.protocol_sha256,
        "items": len({row.item for row in rows}),
        "clusters": len({row.cluster for row in rows}),
        "metrics": {
            name: {"value": gain.gain, "error": gain.error, "effective_clusters": gain.effective}
            for name, gain in compute_metric_scores(rows).items()
        },
        "contaminated": len(contaminated),
        "cut": model.cut_contexts,
        "device": model.model.device.type,
        "seconds": round(time.monotonic() - started, 3),
    } | said
    return _write(plant.ledger, candidate_id, identity, summary, rows)


def find_contaminated_items(plant: Plant, task: EvalTask) -> list[tuple[int, str]]:
    """(record number from 0, key of a training document) for each item that shares words with training data.

    Ingest keeps only a sample of n-grams, so 44 shared words in a row are always found, and 13 words only by chance.
    """
    n = DataPolicy.load(plant.workspace.policy_path("data.yaml")).decontamination.ngram
    grams = [hash_item_ngrams(item, n) for item in task.records]
    found: dict[int, str] = {}
    for gram, key in DocumentIndex(plant.ledger).find_training_documents_by_ngram(np.unique(np.concatenate(grams))):
        found.setdefault(gram, key)
    hits = np.array(sorted(found), np.uint64)
    return [
        (number, found[int(mine[shared][0])])
        for number, mine in enumerate(grams)
        if (shared := np.isin(mine, hits)).any()
    ]


def _run(
    task: EvalTask, model: TaskModel, policy: TasksPolicy, advance: Advance
) -> tuple[list[EvalItem], dict[str, Any]]:
    try:
        if task.kind == "multiple_choice":
            return score_choices(task, model, advance), {}
        if task.kind == "lm-eval":
            return run_lm_eval(task, model, policy, advance)
        if task.kind == "code":
            refuse_missing_libraries(task.items, policy.running)
        return generate_and_check(task, model, policy.running, advance)
    except TaskError as error:
        if error.code == "model.no_room" and isinstance(task.file, TaskFile) and task.path.suffix != ".yaml":
            raise TaskError(
                "measuring.no_room",
                "task {task}: {problem}. To set max_tokens, write a file {task}.yaml with 'published: {published}', "
                "'items: {items}' and 'max_tokens: NUMBER'",
                task=task.name, problem=error.message, published=task.file.published, items=task.path.name,
            ) from error  # fmt: skip
        raise TaskError("measuring.failed", "task {task}: {problem}", task=task.name, problem=error.message) from error


def _prove(ledger: Ledger, task: EvalTask, policy: TasksPolicy, progress: Progress) -> None:
    try:
        if not is_proven(ledger, task):
            prove_task(ledger, task, policy, progress)
    except TaskError as error:
        raise TaskError(
            "measuring.not_sound",
            "task {task} has an error: {problem}. Correct the task's file, then test the file with 'factory "
            "tasks check FILE'",
            task=task.name, problem=error.message,
        ) from error  # fmt: skip


def _write(ledger: Ledger, candidate: int, identity: str, summary: dict[str, Any], rows: list[EvalItem]) -> int:
    with ledger.begin() as tx:
        mine = (evaluations.c.candidate == candidate) & (evaluations.c.suite_sha256 == identity)
        known = tx.execute(evaluations.select().where(mine)).scalar()
        if known is not None:  # another process was faster; its measurement stands
            return int(known)
        values = {"candidate": candidate, "suite_sha256": identity, "summary": replace_non_finite(summary)}
        number = insert_row(tx, evaluations, **values, created_at=time.time())
        tx.execute(eval_items.insert(), [asdict(row) | {"evaluation": number} for row in rows])
        detail = {"evaluation": number, "task": summary["task"], "items": summary["items"]}
        record_event(tx, "task_measured", Subject("candidate", candidate), detail)
    return number
