"""The index of hashes is the same after every way to rebuild it, and duplicates of earlier shards are still found."""

from __future__ import annotations

import errno
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from factory.backups.backups import make_backup
from factory.backups.upgrade import upgrade_workspace
from factory.core.errors import WorkspaceError
from factory.core.progress import SILENT
from factory.core.workspace import Workspace, WorkspaceConfig
from factory.data.removing import apply_removal, plan_removal
from factory.data.selecting import select_documents_by_name
from factory.erasing.erasing import finish_pending_removals
from factory.ingest.chain import ingest_shard
from factory.ingest.hash_index import INDEX, get_hashes_path, list_shards_and_tasks_with_hashes, read_hashes
from factory.ingest.inbox import ingest_and_move
from factory.ingest.task_hashes import record_task_ngrams
from factory.ledger.ledger import Ledger, events, held_out
from factory.ledger.plant import Plant
from factory.repairs.lost_ledger import restore_ledger
from factory.repairs.repairing import repair_all_damage
from factory.repairs.token_shards import _hashes_from_backup, rebuild_document_hashes
from factory.repairs.workspace_examination import CHECKS
from tests.support.factory.hash_index import indexed
from tests.support.factory.made_up_text import MIT, prose, texts
from tests.support.factory.older_ledger import as_schema_5
from tests.support.messages import codes, refused

Ingest = Callable[..., Any]


@pytest.fixture
def exam(workspace: Workspace) -> Path:
    """One item in ``policies/tasks``."""
    path = workspace.root / "policies" / "tasks" / "exam.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"id": 1, "question": prose(9000, 40), "choices": ["a", "none"], "answer": 0}) + "\n")
    return path


@pytest.fixture
def two_shards(ledger: Ledger, ingest: Ingest) -> dict[str, list[Any]]:
    """The index of two shards with training documents, held-out documents, and a document whose licence bars its copies."""
    ingest([*texts(0, 60), {"text": prose(700), "license": "proprietary"}], "one.jsonl")
    ingest(texts(100, 40), "two.jsonl")
    found = indexed(ledger)
    assert len(found["signatures"]) == 101 and found["sampled"] and found["held_out n-grams"]
    return found


def _removed(file: Path) -> None:
    file.unlink()


def _torn_page(file: Path) -> None:
    whole = file.read_bytes()
    file.write_bytes(whole[:4096] + b"\xa5" * 40960 + whole[45056:])


@pytest.mark.parametrize("harm", [_removed, _torn_page])
def test_an_index_that_is_lost_or_damaged_is_made_again(
    workspace: Workspace, ledger: Ledger, two_shards: dict[str, list[Any]], harm: Callable[[Path], None]
) -> None:
    harm(workspace.root / INDEX)
    if harm is not _removed:
        (fault,) = CHECKS["hashes"](Plant(workspace, ledger), False).faults
        assert fault.problem.startswith(f"{workspace.root / INDEX} is damaged: ")
    assert indexed(ledger) == two_shards


def test_the_index_adds_shards_that_a_killed_ingest_did_not_index(
    workspace: Workspace, ledger: Ledger, ingest: Ingest, two_shards: dict[str, list[Any]]
) -> None:
    """A kill after the ledger's commit leaves an index without the newest shard. The next ingest finds duplicates of all shards."""
    before = (workspace.root / INDEX).read_bytes()
    ingest(texts(200, 30), "three.jsonl")
    three = indexed(ledger)
    (workspace.root / INDEX).write_bytes(before)
    words = prose(210).split(" ")
    words[50] = "altogether"
    report = ingest([{"text": " ".join(words), **MIT}, *texts(300, 5)], "four.jsonl")
    assert report.counts["dropped"] == {"near_duplicate": 1} or report.counts["dropped"] == {"contaminated": 1}
    four = indexed(ledger)
    assert {name: rows[: len(three[name])] for name, rows in four.items() if name in ("sources", "signatures")} == {
        name: three[name] for name in ("sources", "signatures")
    }
    (workspace.root / INDEX).unlink()
    assert indexed(ledger) == four


def test_the_index_is_made_again_if_the_ledger_knows_less(
    workspace: Workspace, ledger: Ledger, two_shards: dict[str, list[Any]]
) -> None:
    """For example after a restore without the newest journal."""
    with ledger.begin() as tx:
        tx.execute(events.delete().where(events.c.id == list_shards_and_tasks_with_hashes(ledger)[-1][0]))
    assert indexed(ledger)["signatures"] == two_shards["signatures"][:61]


@pytest.mark.parametrize("harm", [lambda file: file.unlink(), lambda file: file.write_bytes(file.read_bytes()[:-9])])
def test_a_file_of_hashes_that_is_lost_is_made_again_from_the_raw_shard(
    workspace: Workspace, ledger: Ledger, ingest: Ingest, two_shards: dict[str, list[Any]], harm: Callable[[Path], None]
) -> None:
    subject = list_shards_and_tasks_with_hashes(ledger)[0][1]
    harm(get_hashes_path(workspace.root, subject))
    (workspace.root / INDEX).unlink()
    with refused("ingest.no_hashes", WorkspaceError):
        ingest(texts(400, 5), "later.jsonl")
    assert CHECKS["hashes"](Plant(workspace, ledger), True).faults
    said = repair_all_damage(workspace, True, SILENT)
    assert [line for line in said if line.startswith(f"hashes {subject}: repaired")], said
    again = indexed(ledger)
    by_key = lambda rows: sorted((key, blob) for _, key, blob in rows)
    assert by_key(again["signatures"]) == by_key(two_shards["signatures"])
    for table in ("bands", "sampled", "held_out n-grams"):
        assert {row[::2] for row in again[table]} >= {row[::2] for row in two_shards[table]}, table


class TestUpgrade:
    @pytest.fixture(params=["sqlite", "postgresql"])
    def workspace(self, request: pytest.FixtureRequest, tmp_path: Path) -> Workspace:
        url = "" if request.param == "sqlite" else request.getfixturevalue("postgres")()
        return Workspace.create(tmp_path / "workspace", WorkspaceConfig(ledger_url=url))

    @pytest.fixture
    def ledger(self, workspace: Workspace) -> Ledger:
        return Ledger.create(workspace.ledger_url, workspace.root)

    def test_an_upgrade_moves_the_hashes_of_an_older_ledger_into_files(
        self, workspace: Workspace, ledger: Ledger, ingest: Ingest, two_shards: dict[str, list[Any]]
    ) -> None:
        as_schema_5(workspace.root, ledger)
        upgrade_workspace(workspace, has_backup=True)
        assert indexed(Ledger.open(workspace.ledger_url, workspace.root)) == two_shards
        report = ingest([{"text": prose(700), **MIT}, *texts(500, 5)], "later.jsonl")
        assert report.counts["dropped"] == {"licence": 1}

    @pytest.mark.parametrize(
        "lost", ["document LIKE 'task-%'", "hash = (SELECT MAX(hash) FROM ngrams WHERE document LIKE 'task-%')"]
    )
    def test_task_items_whose_hashes_an_older_ledger_lost_are_recorded_again(
        self, workspace: Workspace, ledger: Ledger, ingest: Ingest, exam: Path, lost: str
    ) -> None:
        ingest(texts(0, 30))
        before = indexed(ledger)["held_out n-grams"]
        as_schema_5(workspace.root, ledger)
        with ledger.begin() as tx:
            tx.execute(sa.text(f"DELETE FROM ngrams WHERE {lost}"))
        upgrade_workspace(workspace, has_backup=True)
        upgraded = Ledger.open(workspace.ledger_url, workspace.root)
        assert record_task_ngrams(Plant(workspace, upgraded), 13) == 1
        assert {row[::2] for row in indexed(upgraded)["held_out n-grams"]} == {row[::2] for row in before}


def raise_other_file_system(*_: object) -> None:
    raise OSError(errno.EXDEV, "another file system")


class TestMadeAgain:
    """A lost file of hashes is made again as the ingest wrote it, or reported as lost."""

    def lose(self, workspace: Workspace, ledger: Ledger, place: int = 0) -> tuple[str, list[dict[str, Any]]]:
        subject = list_shards_and_tasks_with_hashes(ledger)[place][1]
        before = read_hashes(workspace.root, subject).to_pylist()
        get_hashes_path(workspace.root, subject).unlink()
        return subject, before

    def test_hashes_are_not_rebuilt_if_another_policy_would_drop_documents(
        self, workspace: Workspace, ledger: Ledger, ingest: Ingest
    ) -> None:
        ingest([*texts(0, 30), *({"text": prose(800 + at, 60), **MIT} for at in range(20))])
        subject, before = self.lose(workspace, ledger)
        policy = workspace.root / "policies" / "data.yaml"
        old = policy.read_text()
        policy.write_text(old.replace("    min_alphabetic: 0.5\n", "    min_alphabetic: 0.5\n    min_chars: 600\n", 1))
        assert policy.read_text() != old
        assert codes([rebuild_document_hashes(Plant(workspace, ledger), subject)]) == ["token_shards.read_differently"]
        assert not get_hashes_path(workspace.root, subject).exists()
        policy.write_text(old)
        assert rebuild_document_hashes(Plant(workspace, ledger), subject) == ""
        assert len(read_hashes(workspace.root, subject)) == len(before) == 50

    def test_rebuilt_hashes_do_not_mark_barred_documents_as_held_out(
        self, workspace: Workspace, ledger: Ledger, ingest: Ingest
    ) -> None:
        """Also not copies of them, which ingest drops, and not after a later policy allows their licence."""
        barred = {"text": prose(700), "license": "proprietary"}
        ingest([barred, *texts(0, 30), {"text": prose(700), **MIT}, {"text": "too short", "license": "proprietary"}])
        subject, before = self.lose(workspace, ledger)
        policy = workspace.root / "policies" / "data.yaml"
        old = policy.read_text()
        policy.write_text(re.sub(r"(?m)^(\s*)proprietary:.*$", r"\1proprietary: {train: true, release: false}", old))
        assert policy.read_text() != old
        for _ in range(2):
            assert rebuild_document_hashes(Plant(workspace, ledger), subject) == ""
            again = read_hashes(workspace.root, subject).to_pylist()
            assert [(row["key"], row["signature"], row["held_out"]) for row in again] == [
                (row["key"], row["signature"], row["held_out"]) for row in before
            ]
            assert again[-1] == before[-1] and before[-1]["key"].endswith(":0") and not before[-1]["grams"]
            policy.write_text(old)

    def test_hashes_of_a_file_whose_only_document_was_erased_can_be_rebuilt(
        self, workspace: Workspace, ledger: Ledger, ingest: Ingest
    ) -> None:
        plant = Plant(workspace, ledger)
        ingest(texts(0, 30), "one.jsonl")
        file = workspace.inbox / "doc.txt"
        file.write_text(prose(4000))
        ingest_and_move(plant, file, workers=0)
        key = ledger.read(
            "SELECT d.\"key\" FROM documents d JOIN shards s ON s.sha256 = d.shard WHERE s.name = 'doc.txt'"
        )
        look_at = plan_removal(
            ledger, select_documents_by_name(ledger, [key[0]["key"]], ("train", "held_out", "quarantined")), True
        )
        apply_removal(ledger, look_at, "me", "", True)
        finish_pending_removals(plant)
        subject, _ = self.lose(workspace, ledger, 1)
        shutil.rmtree(workspace.root / "backups")
        assert rebuild_document_hashes(plant, subject) == "" and len(read_hashes(workspace.root, subject)) == 0
        assert ingest(texts(500, 5), "later.jsonl").counts["train"]

    @pytest.mark.parametrize("is_there", [True, False])
    def test_the_hashes_of_a_task_are_rebuilt_only_if_its_file_exists(
        self, workspace: Workspace, ledger: Ledger, ingest: Ingest, exam: Path, is_there: bool
    ) -> None:
        ingest(texts(0, 30))
        subject = next(name for _, name in list_shards_and_tasks_with_hashes(ledger) if name.startswith("task:"))
        file = get_hashes_path(workspace.root, subject)
        whole = file.read_bytes()
        file.write_bytes(whole[:-9])
        (workspace.root / INDEX).unlink()
        if not is_there:
            exam.unlink()
        why = rebuild_document_hashes(Plant(workspace, ledger), subject)
        assert codes([why]) == ["" if is_there else "token_shards.no_task_items"]
        assert file.exists() == is_there and (not is_there or file.read_bytes() == whole)

    def test_rebuilt_hashes_after_a_restore_are_the_same(
        self, workspace: Workspace, ledger: Ledger, ingest: Ingest, exam: Path
    ) -> None:
        """A phrase that was common stays out of the held-out index; a task's items need no file in ``policies/tasks``."""
        head = prose(5000, 40)
        report = ingest([{**row, "text": f"{head}\n{row['text']}"} for row in texts(0, 80)])
        make_backup(Plant(workspace, ledger))
        exam.unlink()
        for _, subject in list_shards_and_tasks_with_hashes(ledger):
            file = get_hashes_path(workspace.root, subject)
            before = file.read_bytes()
            file.unlink()
            assert rebuild_document_hashes(Plant(workspace, ledger), subject) == "" and file.read_bytes() == before
        with ledger.begin() as tx:  # as after a restore and an ingest by another policy, which held out others
            tx.execute(
                held_out.delete().where(held_out.c.key == ledger.select_rows(sa.select(held_out.c.key))[0]["key"])
            )
        assert report.counts["held_out"] and not _hashes_from_backup(Plant(workspace, ledger), subject)

    @pytest.mark.parametrize("links", [True, False])
    def test_a_factory_restored_from_a_backup_alone_can_ingest(
        self,
        workspace: Workspace,
        ledger: Ledger,
        ingest: Ingest,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        links: bool,
    ) -> None:
        ingest(texts(0, 40))
        if not links:
            monkeypatch.setattr("os.link", raise_other_file_system)
        before = indexed(ledger)
        backup, _ = make_backup(Plant(workspace, ledger), tmp_path / "elsewhere")
        ledger.engine.dispose()
        kept = get_hashes_path(backup, list_shards_and_tasks_with_hashes(ledger)[0][1])
        assert kept.stat().st_nlink == (2 if links else 1)
        shutil.rmtree(workspace.root)
        restore_ledger(workspace.root, str(backup), SILENT)
        plant = Plant(Workspace.open(workspace.root), Ledger.open(workspace.ledger_url, workspace.root))
        assert indexed(plant.ledger) == before
        file = tmp_path / "new.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in [*texts(0, 40), *texts(100, 10)]))
        dropped = ingest_shard(plant, file, workers=0).counts["dropped"]
        assert dropped["exact_duplicate"] + dropped["contaminated"] == 40
