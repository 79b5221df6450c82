"""What lies in policies/tasks/ is kept out of training data, from the next shard on, whatever becomes of the file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from factory.core.errors import InputError
from factory.core.progress import SILENT
from factory.core.workspace import Workspace
from factory.ingest.chain import ShardReport
from factory.ingest.rules.held_tasks import hold_task_items
from factory.ledger.ledger import Ledger, documents, ngrams, token_shards
from factory.repairs.token_shards import rebuild_token_shard
from tests.support.factory.made_up_text import MIT, prose, texts

Ingest = Callable[..., ShardReport]
QUESTION = (
    "which of these seventeen wandering planets was first seen by a lighthouse keeper on the coast of the northern sea"
)
CHOICES = ["the one that bears the name of his dog because it came to him at dusk", "none"]


@pytest.fixture
def exam(workspace: Workspace) -> Path:
    folder = workspace.root / "policies" / "tasks"
    folder.mkdir(parents=True)
    path = folder / "planets.jsonl"
    path.write_text(json.dumps({"id": 1, "question": QUESTION, "choices": CHOICES, "answer": 0}) + "\n")
    return path


def leaking(number: int, words: str) -> dict[str, Any]:
    return {"id": f"leak-{number}", "text": f"{prose(number)}\n\n{words}\n\n{prose(number + 1000)}", **MIT}


def fates(ledger: Ledger) -> dict[str, dict[str, object]]:
    return {row["id"]: row for row in ledger.rows(sa.select(documents).where(documents.c.id.startswith("leak-")))}


def test_words_of_items_are_cut_out_and_a_repair_cuts_them_again(
    workspace: Workspace, ledger: Ledger, ingest: Ingest, exam: Path
) -> None:
    leaks = [leaking(500, QUESTION), leaking(501, CHOICES[0]), leaking(502, "nothing of it")]
    ingest([*texts(0, 60), *leaks])
    found = fates(ledger)
    assert "characters cut out" in str(found["leak-500"]["detail"]) and "characters cut out" in str(
        found["leak-501"]["detail"]
    )
    assert str(found["leak-500"]["matched"]).startswith("task-") and str(found["leak-500"]["matched"]).endswith(":1")
    assert found["leak-502"]["matched"] is None and found["leak-502"]["detail"] is None
    exam.unlink()  # what was an exam stays one
    ingest([*texts(100, 60), leaking(503, QUESTION)], "later.jsonl")
    assert "characters cut out" in str(fates(ledger)["leak-503"]["detail"])
    for row in ledger.rows(sa.select(token_shards)):
        shutil.rmtree(row["path"])
        assert rebuild_token_shard(workspace, ledger, row["id"], SILENT) == ""


def test_a_shard_of_before_the_exam_is_rebuilt_without_it(
    workspace: Workspace, ledger: Ledger, ingest: Ingest, exam: Path
) -> None:
    away = exam.rename(exam.with_suffix(".away"))
    ingest([*texts(0, 60), leaking(500, QUESTION)])
    away.rename(exam)
    ingest(texts(100, 60), "later.jsonl")
    assert fates(ledger)["leak-500"]["matched"] is None
    for row in ledger.rows(sa.select(token_shards)):
        shutil.rmtree(row["path"])
        assert rebuild_token_shard(workspace, ledger, row["id"], SILENT) == ""


def test_items_are_recorded_once_and_again_where_they_were_lost(
    workspace: Workspace, ledger: Ledger, exam: Path
) -> None:
    count = lambda: len(ledger.rows(sa.select(ngrams).where(ngrams.c.held_out)))
    assert hold_task_items(workspace, ledger, 13) == 1
    first = count()
    assert first > 20 and hold_task_items(workspace, ledger, 13) == 0 and count() == first
    with ledger.begin() as tx:  # as a restored ledger has it: the journal carries no n-grams
        tx.execute(ngrams.delete())
    assert hold_task_items(workspace, ledger, 13) == 1 and count() == first
    exam.write_text(exam.read_text() * 2)  # another file, the same items
    assert hold_task_items(workspace, ledger, 13) == 1


def test_nothing_is_ingested_beside_an_exam_that_cannot_be_read(
    workspace: Workspace, ledger: Ledger, ingest: Ingest, exam: Path
) -> None:
    exam.write_text('{"question": ')
    with pytest.raises(InputError, match=r"planets.jsonl: line 1"):
        ingest(texts(0, 10))
    assert ledger.rows(sa.select(documents.c.key)) == []
