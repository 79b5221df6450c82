"""Each fsync and rename has a mutant that a test or scenario notices. Calls that no scenario reaches have tests here."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import sys
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest

from factory.backups.backups import find_database_damage
from factory.core.workspace import Workspace
from factory.ingest.chain import ingest_shard
from factory.ingest.file_groups import MANY
from factory.ingest.filing import move_ingested_file
from factory.ingest.inbox import ingest_and_move
from factory.ingest.readers import ShardProblem, read_rows
from factory.ingest.rules.policy import ShardLimits
from factory.ledger.journal import NAME, list_backups, read_batches
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from tests.chaos import power
from tests.chaos.folder import Folder
from tests.chaos.mutants import MUTANTS, ONLY_TIME, calls_in, mutated
from tests.support.paths import ROOT

BACKUP = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
from factory.core.workspace import Workspace
from factory.backups import upgrade
upgrade._backup(Workspace.open(Path({root!r})), "2")
"""
DAILY = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
from factory.core.workspace import Workspace
from factory.backups.backups import make_backup
from factory.ledger.ledger import Ledger, record_event
from factory.ledger.plant import Plant
workspace = Workspace.open(Path({root!r}))
ledger = Ledger.open(workspace.ledger_url)
make_backup(Plant(workspace, ledger))
with ledger.begin() as tx:
    record_event(tx, "after the backup", "daemon")
ledger.engine.dispose()
"""
SPLIT = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
from factory.core.workspace import Workspace
from factory.ingest.filing import move_changed_files_to_inbox
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
workspace = Workspace.open(Path({root!r}))
ledger = Ledger.open(workspace.ledger_url)
(filed,) = (workspace.shards / "raw").iterdir()
with open(filed, "ab") as late:  # the writer never flushes it
    late.write({row!r})
move_changed_files_to_inbox(Plant(workspace, ledger))
ledger.engine.dispose()
"""
TOGETHER = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
from factory.core.workspace import Workspace
from factory.ingest.inbox import ingest_inbox_file
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
workspace = Workspace.open(Path({root!r}))
ledger = Ledger.open(workspace.ledger_url)
ingest_inbox_file(Plant(workspace, ledger), workspace.inbox / "d0.txt")
ledger.engine.dispose()
"""
PLACED = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
from kernels.contract.files import rename_into_place
root = Path({root!r})
(root / ".file").write_text("new")
rename_into_place(root / ".file", root / "file")
(root / ".folder" / "in").mkdir(parents=True)
(root / ".folder" / "in" / "it").write_text("deep")
rename_into_place(root / ".folder", root / "folder")
"""


def test_every_fsync_and_rename_has_a_mutant() -> None:
    """Add a new or changed call to tests/chaos/mutants.py, with the test or scenario that notices its removal."""
    named = {(mutant.path, mutant.line) for mutant in MUTANTS}
    calls = calls_in()
    assert calls - named == set(ONLY_TIME)
    assert named - calls == {
        ("factory/git/git_store.py", '"core.fsync": "all",  # commits that the ledger names must survive a power cut'),
        ("factory/ledger/engine.py", '"synchronous=FULL", '),
        (
            "factory/show/mlflow/store.py",
            'return subprocess.run(["sync", "--", *files], stdin=subprocess.DEVNULL, capture_output=True).returncode == 0',
        ),
    }


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.path}:{mutant.line[:30]}")
def test_a_mutant_changes_its_line_and_compiles(mutant) -> None:  # type: ignore[no-untyped-def]
    text = (ROOT / mutant.path).read_text()
    changed = mutated(text, mutant)
    assert changed != text
    compile(changed, mutant.path, "exec")
    if isinstance(mutant.notices, str):
        path, _, name = mutant.notices.partition("::")
        assert f"def {name}" in (ROOT / path).read_text()


def test_a_backup_of_the_ledger_is_whole_after_a_power_cut(tmp_path: Path) -> None:
    """When the upgrade continues, its backup exists, whatever was not flushed."""
    folder, start = Folder(tmp_path), tmp_path / "start"
    workspace = Workspace.create(folder.root / "plant")
    Ledger.create(workspace.ledger_url).engine.dispose()
    (workspace.root / "backups").mkdir()
    shutil.copytree(folder.root, start)
    code, said = folder.run(BACKUP.format(root=str(workspace.root), path=sys.path))
    assert code == 0, said
    made = [path.name for path in (workspace.root / "backups").iterdir()]
    assert len(made) == 1 and made[0].endswith(".db")
    for loss in power.LOSSES:
        power.cut(start, folder.root, folder.effects, folder.store, loss)
        with closing(sqlite3.connect(workspace.root / "backups" / made[0])) as copy:
            assert copy.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone(), loss


def test_a_daily_backup_and_its_journal_are_whole_after_a_power_cut(tmp_path: Path) -> None:
    """The journal has the commits after the backup, and the backup all earlier ones, whatever was not flushed."""
    folder, start = Folder(tmp_path), tmp_path / "start"
    workspace = Workspace.create(folder.root / "plant")
    Ledger.create(workspace.ledger_url).engine.dispose()
    (workspace.root / "backups").mkdir()
    shutil.copytree(folder.root, start)
    code, said = folder.run(DAILY.format(root=str(workspace.root), path=sys.path))
    assert code == 0, said
    made = [path.name for path in list_backups(workspace.root)]
    assert len(made) == 1
    for loss in power.LOSSES:
        power.cut(start, folder.root, folder.effects, folder.store, loss)
        (backup,) = list_backups(workspace.root)
        assert backup.name == made[0] and not find_database_damage(backup / "ledger.db"), loss
        kinds = [row[1]["kind"] for batch in read_batches(backup / NAME) for row in batch["rows"] if row[0] == "events"]
        assert kinds == ["after the backup"], loss


def test_a_file_put_in_place_survives_a_power_cut(tmp_path: Path) -> None:
    folder, start = Folder(tmp_path), tmp_path / "start"
    (folder.root / "file").write_text("old")
    shutil.copytree(folder.root, start)
    code, said = folder.run(PLACED.format(root=str(folder.root), path=sys.path))
    assert code == 0, said
    for loss in power.LOSSES:
        power.cut(start, folder.root, folder.effects, folder.store, loss)
        assert (folder.root / "file").read_text() == "new", loss
        assert (folder.root / "folder" / "in" / "it").read_text() == "deep", loss


def test_a_file_with_the_name_of_an_ingested_one_returns_to_the_inbox(workspace: Workspace, ledger: Ledger) -> None:
    path = workspace.inbox / "bad.jsonl"
    path.write_text("{" * 9)
    report = ingest_shard(Plant(workspace, ledger), path)
    path.write_text("other")  # before the ingested file is moved away
    move_ingested_file(Plant(workspace, ledger), path, report.sha256, report.state)
    (back,) = workspace.inbox.iterdir()
    assert back.name.endswith("-bad.jsonl") and back.read_text() == "other"


def test_rows_appended_to_a_filed_shard_survive_a_power_cut(tmp_path: Path) -> None:
    """The content has two names, and one of them is about to be given to its first part."""
    folder, start = Folder(tmp_path), tmp_path / "start"
    workspace = Workspace.create(folder.root / "plant")
    ledger = Ledger.create(workspace.ledger_url)
    row = b'{"text": "def one(value):\\n    return value + 1\\n", "domain": "code"}\n'
    (workspace.inbox / "late.jsonl").write_bytes(row)
    ingest_and_move(Plant(workspace, ledger), workspace.inbox / "late.jsonl")
    ledger.engine.dispose()
    (filed,) = (workspace.shards / "raw").iterdir()
    shutil.copytree(folder.root, start)
    late = row.replace(b"one", b"two")
    code, said = folder.run(SPLIT.format(root=str(workspace.root), path=sys.path, row=late))
    assert code == 0, said
    assert [path.name for path in workspace.inbox.iterdir()] == ["late.jsonl"] and b"two" not in filed.read_bytes()
    for loss in power.LOSSES:
        power.cut(start, folder.root, folder.effects, folder.store, loss)
        held = [path.read_bytes() for path in (*workspace.inbox.iterdir(), *(workspace.shards / "raw").iterdir())]
        assert any(b"two" in text for text in held) and any(text == row for text in held), loss


def test_small_files_that_became_one_shard_survive_a_power_cut(tmp_path: Path) -> None:
    """The files are removed after the shard with their content is on the disk."""
    folder, start = Folder(tmp_path), tmp_path / "start"
    workspace = Workspace.create(folder.root / "plant")
    Ledger.create(workspace.ledger_url).engine.dispose()
    (workspace.shards / "raw").mkdir(parents=True)
    for number in range(MANY):
        (workspace.inbox / f"d{number}.txt").write_text(
            f"short {number}"
        )  # the rules drop these documents: no tokenizer is needed
        os.utime(workspace.inbox / f"d{number}.txt", (time.time() - 10,) * 2)
    shutil.copytree(folder.root, start)
    code, said = folder.run(TOGETHER.format(root=str(workspace.root), path=sys.path))
    assert code == 0, said
    assert not list(workspace.inbox.iterdir()) and len(list((workspace.shards / "raw").iterdir())) == 1
    for loss in power.LOSSES:
        power.cut(start, folder.root, folder.effects, folder.store, loss)
        held = {path.read_text() for path in workspace.inbox.iterdir()}
        for path in (workspace.shards / "raw").iterdir():
            with suppress(ShardProblem):
                held |= {json.loads(row)["text"] for row in read_rows(path, ShardLimits()) if isinstance(row, bytes)}
        assert held >= {f"short {number}" for number in range(MANY)}, loss
