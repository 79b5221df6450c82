"""Items in policies/tasks/ are kept out of training data from the next shard on, even if the file is removed later."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from factory.core.errors import InputError
from factory.core.workspace import Workspace
from factory.ingest.chain import ShardReport, ingest_shard
from factory.ingest.hash_index import FOLDER, HashIndex
from factory.ingest.task_hashes import record_task_ngrams
from factory.ledger.ledger import Ledger, documents, token_shards
from factory.ledger.plant import Plant
from factory.repairs.token_shards import rebuild_token_shard
from factory.status.waiting import list_items_waiting_for_person
from tests.support.factory import published_files as published
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
    return {
        row["id"]: row for row in ledger.select_rows(sa.select(documents).where(documents.c.id.startswith("leak-")))
    }


def test_a_benchmark_as_published_is_kept_out_of_training_data(
    workspace: Workspace, ledger: Ledger, ingest: Ingest, write_shard: Callable[..., Path]
) -> None:
    """As soon as its file is there, also compressed or without a header. ``factory status`` names files that cannot be read."""
    folder = workspace.root / "policies" / "tasks"
    items = published.human_eval()
    items[3] |= {"prompt": f'def f():\n    """{QUESTION}"""\n', "canonical_solution": f"    return '{CHOICES[0]}'\n"}
    published.write(folder / "HumanEval.jsonl.gz", items)
    rows = published.mmlu_rows()
    rows[0] = [
        "Of the nine lanterns in the old signal room which one must be lit before the ferry may leave its berth at night?",
        *rows[0][1:],
    ]
    published.write(folder / "harbour_law_test.csv", rows)
    (folder / "MATH.tar").write_bytes(b"packed")
    leaks = [
        leaking(n, words) for n, words in ((500, QUESTION), (501, CHOICES[0]), (506, rows[0][0]), (505, "nothing"))
    ]
    ingest_shard(Plant(workspace, ledger), write_shard([*texts(0, 60), *leaks], "shard.jsonl"), workers=0)
    found = fates(ledger)
    assert ["cut out" in str(found[f"leak-{number}"]["detail"]) for number in (500, 501, 506, 505)] == [
        True,
        True,
        True,
        False,
    ]
    assert str(found["leak-500"]["matched"]).endswith(":4") and str(found["leak-506"]["matched"]).endswith(":1")
    assert any("MATH.tar in policies/tasks" in one["what"] for one in list_items_waiting_for_person(workspace, ledger))


def test_words_of_task_items_are_cut_from_documents_and_a_repair_cuts_them_again(
    workspace: Workspace, ledger: Ledger, ingest: Ingest, exam: Path
) -> None:
    leaks = [leaking(500, QUESTION), leaking(501, CHOICES[0]), leaking(502, "nothing of it")]
    ingest([*texts(0, 60), *leaks])
    found = fates(ledger)
    assert "characters were cut out" in str(found["leak-500"]["detail"]) and "characters were cut out" in str(
        found["leak-501"]["detail"]
    )
    assert str(found["leak-500"]["matched"]).startswith("task-") and str(found["leak-500"]["matched"]).endswith(":1")
    assert found["leak-502"]["matched"] is None and found["leak-502"]["detail"] is None
    exam.unlink()  # what was an exam stays one
    ingest([*texts(100, 60), leaking(503, QUESTION)], "later.jsonl")
    assert "characters were cut out" in str(fates(ledger)["leak-503"]["detail"])
    for row in ledger.select_rows(sa.select(token_shards)):
        shutil.rmtree(row["path"])
        assert rebuild_token_shard(Plant(workspace, ledger), row["id"]) == ""


def test_a_shard_older_than_a_task_is_rebuilt_without_cutting_the_tasks_words(
    workspace: Workspace, ledger: Ledger, ingest: Ingest, exam: Path
) -> None:
    away = exam.rename(exam.with_suffix(".away"))
    ingest([*texts(0, 60), leaking(500, QUESTION)])
    away.rename(exam)
    ingest(texts(100, 60), "later.jsonl")
    assert fates(ledger)["leak-500"]["matched"] is None
    for row in ledger.select_rows(sa.select(token_shards)):
        shutil.rmtree(row["path"])
        assert rebuild_token_shard(Plant(workspace, ledger), row["id"]) == ""


def test_task_items_are_recorded_once_and_recorded_again_if_the_record_is_lost(
    workspace: Workspace, ledger: Ledger, exam: Path
) -> None:
    count = lambda: sum(len(grams) for _, grams in HashIndex(ledger).read_held_out_ngrams())
    assert record_task_ngrams(Plant(workspace, ledger), 13) == 1
    first = count()
    assert first > 20 and record_task_ngrams(Plant(workspace, ledger), 13) == 0 and count() == first
    shutil.rmtree(workspace.shards / FOLDER)  # as on a new disk, with the ledger of a backup
    HashIndex(ledger).delete_index_files()
    assert record_task_ngrams(Plant(workspace, ledger), 13) == 1 and count() == first
    exam.write_text(exam.read_text() * 2)  # another file, the same items
    assert record_task_ngrams(Plant(workspace, ledger), 13) == 1


def test_nothing_is_ingested_while_a_task_file_cannot_be_read(
    workspace: Workspace, ledger: Ledger, ingest: Ingest, exam: Path
) -> None:
    exam.write_text('{"question": ')
    with pytest.raises(InputError, match=r"planets.jsonl: line 1"):
        ingest(texts(0, 10))
    assert ledger.select_rows(sa.select(documents.c.key)) == []
