from __future__ import annotations

import hashlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import yaml
from alembic.script import ScriptDirectory

from factory.backups.upgrade import MIGRATIONS, upgrade_workspace
from factory.computing.tuned_kernels import KERNELS, open_live_kernels_file
from factory.core.errors import WorkspaceError
from factory.core.workspace import Workspace, WorkspaceConfig
from factory.git.repository import get_live_commit, read_file_text
from factory.ledger.journal import list_backups
from factory.ledger.ledger import Ledger
from factory.ledger.reader import LedgerReader
from factory.ledger.rows import SegmentRow
from factory.ledger.version import SCHEMA_VERSION
from factory.training.segment_folder import is_owner_of_segment_folder, read_folder_owner
from kernels.contract.choice import read_device_section, replace_auto
from kernels.contract.message import Message
from tests.support.factory.code_loop import make_target
from tests.support.factory.command import factory
from tests.support.git import git
from tests.support.messages import refused
from tests.support.paths import ROOT

SCHEMA_1 = Path(__file__).with_name("schema_1.sql")  # with one trunk segment
DIES = """
import os, signal, sys
from pathlib import Path
import sqlalchemy as sa
from factory.core.workspace import Workspace
from factory.backups.upgrade import upgrade_workspace

@sa.event.listens_for(sa.Engine, "after_cursor_execute")
def die(connection, cursor, statement, *_):
    if statement.startswith(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)

upgrade_workspace(Workspace.open(Path(sys.argv[1])))
"""


@pytest.fixture
def old(tmp_path: Path) -> Workspace:
    workspace = Workspace.create(tmp_path / "workspace")
    with closing(sqlite3.connect(workspace.root / "ledger.db")) as ledger:
        ledger.executescript(SCHEMA_1.read_text())
    return workspace


def columns(path: Path) -> dict[str, set[tuple[str, str]]]:
    """(name, type) of every table's columns."""
    with closing(sqlite3.connect(path)) as ledger:
        tables = [row[0] for row in ledger.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {name: {row[1:3] for row in ledger.execute(f"PRAGMA table_info({name})")} for name in tables}


def backups(workspace: Workspace) -> list[Path]:
    return sorted(path for path in (workspace.root / "backups").glob("*") if path.is_file() and path.suffix != ".lock")


def test_an_older_ledger_is_refused_and_not_changed(old: Workspace) -> None:
    before = columns(old.root / "ledger.db")
    for opened in (lambda: Ledger.open(old.ledger_url), lambda: LedgerReader(old)):
        with refused("version.older", WorkspaceError, version="1", known=SCHEMA_VERSION):
            opened()
    assert columns(old.root / "ledger.db") == before


def test_an_older_ledger_is_upgraded_once_after_a_backup(old: Workspace) -> None:
    before = columns(old.root / "ledger.db")
    done = factory("upgrade", "--json", "-w", str(old.root))
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["done"]) == 1
    segment = SegmentRow.get(Ledger.open(old.ledger_url), 1)
    assert (segment.state, segment.result, segment.computing) == ("done", {"loss": 3.5}, None)
    (backup,) = backups(old)
    assert backup.name.startswith("ledger-1-") and columns(backup) == before
    with closing(sqlite3.connect(backup)) as ledger:
        assert ledger.execute("SELECT value FROM meta WHERE key = 'schema'").fetchall() == [("1",)]
        assert ledger.execute("SELECT id, folder FROM segments").fetchall() == [(1, "segments/00001-trunk")]
    assert upgrade_workspace(old) == [] and backups(old) == [backup]


def test_an_upgrade_keeps_the_groups_and_halves_of_held_out_documents(old: Workspace) -> None:
    """Documents of the release gate stay sealed; the others stay in the dev half. A document without a source is its own group."""
    with closing(sqlite3.connect(old.root / "ledger.db")) as ledger:
        ledger.execute("INSERT INTO shards VALUES ('aa', 'a', 'a', 1, 'ingested', NULL, 5, '{}', '{}', 0, 1.0)")
        named = ["book 1", "book 2", "reviews", "", None]
        for number, source in enumerate(named):
            for fate in ("train", "held_out"):
                key = f"{fate}:{number}"
                ledger.execute(
                    "INSERT INTO documents (key, id, shard, row, domain, source, fate, releasable, tokens, supervised_tokens)"
                    " VALUES (?, ?, 'aa', ?, 'docs', ?, ?, 1, 0, 0)",
                    [key, key, number, source, fate],
                )
            ledger.execute("INSERT INTO held_out VALUES (?, 'docs', ?, '{}')", [key, source or key])
        ledger.commit()
    upgrade_workspace(old)
    with closing(sqlite3.connect(old.root / "ledger.db")) as ledger:
        groups = dict(ledger.execute("SELECT key, group_key FROM documents").fetchall())
        held = ledger.execute("SELECT key, group_key, sealed FROM held_out ORDER BY key").fetchall()
        noted = ledger.execute("SELECT COUNT(*) FROM changes WHERE \"table\" = 'documents'").fetchone()
        ledger.execute("UPDATE documents SET fate = 'removed' WHERE key = 'train:0'")
        assert ledger.execute('SELECT "table" FROM changes ORDER BY seq DESC LIMIT 1').fetchone() == ("documents",)
    assert [groups[f"train:{number}"] for number in range(5)] == ["book 1", "book 2", "reviews", None, None]
    half = lambda cluster: hashlib.sha256(f"half:{cluster}".encode()).digest()[0] % 2 == 0
    clusters = ["book 1", "book 2", "reviews", "held_out:3", "held_out:4"]
    assert held == [(f"held_out:{number}", name, half(name)) for number, name in enumerate(clusters)]
    assert {half(name) for name in clusters} == {True, False} and noted == (0,)


def test_an_upgrade_makes_paths_relative_and_writes_owners_into_segment_folders(tmp_path: Path) -> None:
    """This also holds for a workspace that was moved: an older factory wrote its first path into the file ``root``."""
    workspace, made = Workspace.create(tmp_path / "workspace"), "/plant"
    text = SCHEMA_1.read_text().replace("'segments/00001-trunk'", f"'{made}/segments/00001-trunk'")
    with closing(sqlite3.connect(workspace.root / "ledger.db")) as ledger:
        ledger.executescript(text)
        plan = {"token_shards": [{"id": "t", "path": f"{made}/shards/t", "generation": 1}], "weights": {"*": 1.0}}
        ledger.execute("UPDATE data_plans SET plan = ?", [json.dumps(plan)])
        ledger.execute(
            "UPDATE segments SET result = ?", [json.dumps({"checkpoint": f"{made}/segments/x", "loss": 3.5})]
        )
        average = {"average": {"sources": [{"path": f"{made}/c"}]}}
        ledger.execute(
            "INSERT INTO events (at, kind, subject, detail) VALUES (1, 'segment_planned', 'segment:9', ?)",
            [json.dumps(average)],
        )
        ledger.commit()
    (workspace.root / "root").write_text(f"{made}\n")
    (workspace.segments / "00001-trunk").mkdir()
    upgrade_workspace(workspace)
    with closing(sqlite3.connect(workspace.root / "ledger.db")) as file:
        assert f'"{made}' not in "".join(file.iterdump()) and f"'{made}" not in "".join(file.iterdump())
    ledger = Ledger.open(workspace.ledger_url)
    row = SegmentRow.get(ledger, 1)
    assert Path(row.folder) == workspace.segments / "00001-trunk"
    assert (row.result or {})["checkpoint"] == str(workspace.segments / "x")
    assert ledger.read("SELECT plan FROM data_plans")[0]["plan"]["token_shards"][0]["path"] == str(
        workspace.shards / "t"
    )
    assert is_owner_of_segment_folder(read_folder_owner(workspace.segments / "00001-trunk"), ledger, row)
    assert not (workspace.root / "root").exists() and len(ledger.identity) == 32
    assert len(list_backups(workspace.root)) == 1, "the first, for the journal"


def test_an_upgraded_ledger_has_the_columns_of_a_new_one(old: Workspace, tmp_path: Path) -> None:
    upgrade_workspace(old)
    Ledger.create(f"sqlite:///{tmp_path / 'new.db'}")
    assert columns(old.root / "ledger.db") == columns(tmp_path / "new.db")
    assert ScriptDirectory(str(MIGRATIONS), version_locations=[str(MIGRATIONS)]).get_current_head() == SCHEMA_VERSION


@pytest.mark.parametrize("statement", ["ALTER TABLE", "UPDATE meta"])
def test_after_a_kill_during_an_upgrade_the_ledger_is_unchanged_and_can_be_upgraded(
    old: Workspace, statement: str
) -> None:
    words = [sys.executable, "-c", DIES, str(old.root), statement]
    done = subprocess.run(words, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == -signal.SIGKILL
    with closing(sqlite3.connect(old.root / "ledger.db")) as ledger:
        assert ledger.execute("SELECT value FROM meta WHERE key = 'schema'").fetchall() == [("1",)]
    assert ("computing", "JSON") not in columns(old.root / "ledger.db")["segments"]
    assert len(upgrade_workspace(old)) == 1
    assert SegmentRow.get(Ledger.open(old.ledger_url), 1).computing is None


def test_a_newer_ledger_is_refused(old: Workspace) -> None:
    with closing(sqlite3.connect(old.root / "ledger.db")) as ledger:
        ledger.execute("UPDATE meta SET value = '99' WHERE key = 'schema'")
        ledger.commit()
    for opened in (lambda: Ledger.open(old.ledger_url), lambda: LedgerReader(old), lambda: upgrade_workspace(old)):
        with refused("version.newer", WorkspaceError, version="99"):
            opened()
    assert backups(old) == []


def test_a_postgresql_ledger_is_upgraded_only_if_a_person_confirms_a_backup(
    postgres: Callable[[], str], tmp_path: Path
) -> None:
    workspace = Workspace.create(tmp_path / "workspace", WorkspaceConfig(ledger_url=postgres()))
    with Ledger.create(workspace.ledger_url).begin() as tx:
        tx.exec_driver_sql("ALTER TABLE segments DROP COLUMN computing")
        tx.exec_driver_sql("ALTER TABLE documents DROP COLUMN group_key, DROP COLUMN facts")
        tx.exec_driver_sql("ALTER TABLE token_shards DROP COLUMN moved")
        tx.exec_driver_sql("ALTER TABLE held_out DROP COLUMN sealed")
        tx.exec_driver_sql("ALTER TABLE held_out RENAME COLUMN group_key TO source")
        tx.exec_driver_sql("CREATE TABLE near_dup_bands (band INTEGER)")
        tx.exec_driver_sql("CREATE TABLE near_dup_signatures (document TEXT, signature BYTEA)")
        tx.exec_driver_sql("CREATE TABLE ngrams (hash BIGINT, document TEXT, held_out BOOLEAN)")
        tx.exec_driver_sql("DROP TABLE relabels")
        tx.exec_driver_sql("DROP TABLE runs")
        tx.exec_driver_sql("DELETE FROM meta WHERE key = 'identity'")
        tx.exec_driver_sql("UPDATE meta SET value = '1' WHERE key = 'schema'")
    with refused("upgrade.no_backup", WorkspaceError, schema="1", known=SCHEMA_VERSION):
        upgrade_workspace(workspace)
    assert len(upgrade_workspace(workspace, has_backup=True)) == 1 and upgrade_workspace(workspace) == []
    assert SegmentRow.select(Ledger.open(workspace.ledger_url)) == []


# -- kernels.yaml ----------------------------------------------------------------------------------------------------------
NEWER = ("general_attention", "softcapped_cross_entropy")


@pytest.fixture
def older_choice(tmp_path: Path) -> Workspace:
    """An upgraded workspace whose code has ops that its kernels.yaml does not name, and one choice of a person."""
    code = make_target(tmp_path / "code")
    lines = (code / KERNELS).read_text().splitlines(keepends=True)
    lines = [line.replace("swiglu: auto", "swiglu: reference") for line in lines if not line.strip().startswith(NEWER)]
    (code / KERNELS).write_text("".join(lines))
    git(code, "commit", "--quiet", "--all", "--message", "as it was before these ops")
    workspace = Workspace.create(tmp_path / "workspace", WorkspaceConfig(recipe="tiny", repository=str(code)))
    Ledger.create(workspace.ledger_url)
    return workspace


def test_an_upgrade_names_the_ops_that_an_old_kernels_file_lacks(older_choice: Workspace) -> None:
    code = older_choice.repository
    before, live = yaml.safe_load((code / KERNELS).read_text()), get_live_commit(code)
    assert not any(op in section for section in before.values() for op in NEWER)
    (line,) = upgrade_workspace(older_choice)
    assert isinstance(line, Message) and line.code == "upgrade.ops_added"
    assert line.data["ops"] == [f"{device}.{op}" for device in ("cpu", "cuda") for op in NEWER]
    after = yaml.safe_load(read_file_text(code, get_live_commit(code), KERNELS))
    assert after == {device: section | dict.fromkeys(NEWER, "auto") for device, section in before.items()}
    assert yaml.safe_load((code / KERNELS).read_text()) == after and after["cpu"]["swiglu"] == "reference"
    assert git(code, "rev-parse", "HEAD^") == live and git(code, "status", "--porcelain", "--untracked-files=no") == ""
    with open_live_kernels_file(older_choice) as (_, text):
        section = replace_auto(read_device_section(text, "cpu"))
    assert [section[op] for op in NEWER] == ["blocks", "chunked"], "no longer the references"
    assert upgrade_workspace(older_choice) == []


@pytest.mark.parametrize("hold", ["no branch is checked out", "the file was edited"])
def test_an_upgrade_says_what_to_add_where_it_cannot_commit(older_choice: Workspace, hold: str) -> None:
    code, live = older_choice.repository, get_live_commit(older_choice.repository)
    if hold == "the file was edited":
        (code / KERNELS).write_text((code / KERNELS).read_text() + "# mine\n")
    else:
        git(code, "switch", "--quiet", "--detach")
    text = (code / KERNELS).read_text()
    (line,) = upgrade_workspace(older_choice)
    assert (
        isinstance(line, Message) and line.code == "upgrade.ops_missing" and "cpu.general_attention" in line.data["ops"]
    )
    assert get_live_commit(code) == live and (code / KERNELS).read_text() == text


def test_an_upgrade_names_no_op_that_the_old_code_does_not_have(older_choice: Workspace) -> None:
    code = older_choice.repository
    git(code, "rm", "--quiet", "-r", "kernels/general_attention")
    git(code, "commit", "--quiet", "--message", "older code")
    (line,) = upgrade_workspace(older_choice)
    assert isinstance(line, Message) and line.data["ops"] == [f"{device}.{NEWER[1]}" for device in ("cpu", "cuda")]
