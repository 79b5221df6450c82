"""The index of what documents are compared with is the same however it came about, and duplicates of earlier shards stay found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from factory.backups.upgrade import upgrade
from factory.core.errors import WorkspaceError
from factory.core.progress import SILENT
from factory.core.workspace import Config, Workspace
from factory.ingest.compared import INDEX, hashes_file, sources
from factory.ledger.ledger import Ledger, events
from factory.ledger.plant import Plant
from factory.repairs.examining import CHECKS
from factory.repairs.mending import repair_all
from tests.support.factory.hash_index import indexed
from tests.support.factory.made_up_text import MIT, prose, texts
from tests.support.factory.older_ledger import as_schema_5

Ingest = Callable[..., Any]


@pytest.fixture
def two_shards(ledger: Ledger, ingest: Ingest) -> dict[str, list[Any]]:
    """The index of two: of training documents, held-out ones, and one whose licence bars its copies."""
    ingest([*texts(0, 60), {"text": prose(700), "license": "proprietary"}], "one.jsonl")
    ingest(texts(100, 40), "two.jsonl")
    found = indexed(ledger)
    assert len(found["signatures"]) == 101 and found["sampled"] and found["held_out n-grams"]
    return found


def _removed(file: Path) -> None:
    file.unlink()


def _garbage(file: Path) -> None:
    file.write_bytes(b"no database " * 999)


def _torn_page(file: Path) -> None:
    whole = file.read_bytes()
    file.write_bytes(whole[:4096] + b"\xa5" * 40960 + whole[45056:])


@pytest.mark.parametrize("harm", [_removed, _garbage, _torn_page])
def test_an_index_that_is_lost_or_damaged_is_made_again(
    workspace: Workspace, ledger: Ledger, two_shards: dict[str, list[Any]], harm: Callable[[Path], None]
) -> None:
    harm(workspace.root / INDEX)
    if harm is not _removed:
        (fault,) = CHECKS["hashes"](Plant(workspace, ledger), False).faults
        assert fault.what.startswith(f"{workspace.root / INDEX} is damaged: ")
    assert indexed(ledger) == two_shards


def test_what_a_killed_ingest_left_out_is_caught_up_with(
    workspace: Workspace, ledger: Ledger, ingest: Ingest, two_shards: dict[str, list[Any]]
) -> None:
    """Killed behind the ledger's commit: the index knows the shards before. The next ingest finds duplicates of all."""
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


def test_a_ledger_that_knows_less_than_the_index_has_it_made_anew(
    workspace: Workspace, ledger: Ledger, two_shards: dict[str, list[Any]]
) -> None:
    """As after a restore without the newest journal."""
    with ledger.begin() as tx:
        tx.execute(events.delete().where(events.c.id == sources(ledger)[-1][0]))
    assert indexed(ledger)["signatures"] == two_shards["signatures"][:61]


@pytest.mark.parametrize("harm", [lambda file: file.unlink(), lambda file: file.write_bytes(file.read_bytes()[:-9])])
def test_a_file_of_hashes_that_is_lost_is_made_again_from_the_raw_shard(
    workspace: Workspace, ledger: Ledger, ingest: Ingest, two_shards: dict[str, list[Any]], harm: Callable[[Path], None]
) -> None:
    subject = sources(ledger)[0][1]
    harm(hashes_file(workspace.root, subject))
    (workspace.root / INDEX).unlink()
    with pytest.raises(WorkspaceError, match="compared with it: put it back, or 'factory doctor --repair'"):
        ingest(texts(400, 5), "later.jsonl")
    assert CHECKS["hashes"](Plant(workspace, ledger), True).faults
    said = repair_all(workspace, True, SILENT)
    assert [line for line in said if line.startswith(f"hashes {subject}: mended")], said
    again = indexed(ledger)
    by_key = lambda rows: sorted((key, blob) for _, key, blob in rows)
    assert by_key(again["signatures"]) == by_key(two_shards["signatures"])
    for table in ("bands", "sampled", "held_out n-grams"):
        assert {row[::2] for row in again[table]} >= {row[::2] for row in two_shards[table]}, table


class TestUpgrade:
    @pytest.fixture(params=["sqlite", "postgresql"])
    def workspace(self, request: pytest.FixtureRequest, tmp_path: Path) -> Workspace:
        url = "" if request.param == "sqlite" else request.getfixturevalue("postgres")()
        return Workspace.create(tmp_path / "workspace", Config(ledger_url=url))

    @pytest.fixture
    def ledger(self, workspace: Workspace) -> Ledger:
        return Ledger.create(workspace.ledger_url, workspace.root)

    def test_an_older_ledger_gives_its_hashes_to_files(
        self, workspace: Workspace, ledger: Ledger, ingest: Ingest, two_shards: dict[str, list[Any]]
    ) -> None:
        as_schema_5(workspace.root, ledger)
        upgrade(workspace, has_backup=True)
        assert indexed(Ledger.open(workspace.ledger_url, workspace.root)) == two_shards
        report = ingest([{"text": prose(700), **MIT}, *texts(500, 5)], "later.jsonl")
        assert report.counts["dropped"] == {"licence": 1}
