"""A lost or damaged ledger is restored unchanged, and a person is told each step."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from factory.backups import backups
from factory.backups.backups import KEPT, back_up_daily, make_backup, make_or_open_ledger
from factory.core.errors import InputError, WorkspaceError
from factory.core.progress import SILENT
from factory.core.workspace import Workspace
from factory.ingest.inbox import ingest_and_move
from factory.ledger.journal import (
    ABOUT,
    BACKUPS_FOLDER,
    NAME,
    describe_journal_damage,
    list_backup_folders,
    list_backups,
    make_backup_name,
    read_backup_info,
)
from factory.ledger.ledger import Ledger, metadata, record_event
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow
from factory.ledger.version import GONE
from factory.machine_check import _backups as looked_at_backups
from factory.repairs.lost_ledger import restore_ledger
from kernels.contract.files import rename_into_place
from tests.support.factory.command import factory
from tests.support.failing.nights import small_disk
from tests.support.messages import codes, refused, the
from tests.support.plants.trained_plant import train_trunk

Copy = Callable[[], tuple[Workspace, Ledger]]
TIMES = {"at", "created_at", "finished_at", "ingested_at"}


def rows_of(workspace: Workspace) -> dict[str, list[Any]]:
    """Every table of the ledger, sorted."""
    with closing(sqlite3.connect(workspace.root / "ledger.db")) as file:
        tables = {table.name: f'SELECT * FROM "{table.name}"' for table in metadata.sorted_tables}
        return {name: sorted(map(repr, file.execute(sql).fetchall())) for name, sql in tables.items()}


def test_a_copied_workspace_works_in_another_folder(saved: Path, copied: Copy) -> None:
    workspace, ledger = copied()
    with closing(sqlite3.connect(workspace.root / "ledger.db")) as file:
        dump = [line for line in file.iterdump() if str(saved) in line and '"events"' not in line]
    assert dump == []
    trunk = SegmentRow.get(ledger, 1)
    assert Path(trunk.folder) == workspace.segments / "00001-trunk"
    saved.rename(saved.with_name("gone"))  # nothing may read from the original folder
    try:
        train_trunk(workspace, ledger, 4)
        assert SegmentRow.get(ledger, 3).state == "done"
    finally:
        saved.with_name("gone").rename(saved)


@pytest.mark.parametrize("lost", ["gone", "empty", "truncated", "bytes"])
def test_a_lost_ledger_is_restored_unchanged(copied: Copy, lost: str) -> None:
    workspace, ledger = copied()
    make_backup(Plant(workspace, ledger))
    (workspace.inbox / "late.jsonl").write_text(json.dumps({"text": "A late document. " * 30, "domain": "docs"}) + "\n")
    ingest_and_move(Plant(workspace, ledger), workspace.inbox / "late.jsonl")
    with ledger.begin() as tx:
        record_event(tx, "promoted", "release:1", {"candidate": 1})
        tx.exec_driver_sql("DELETE FROM tracked_runs")
    before = rows_of(workspace)
    assert any("late.jsonl" in row for row in before["shards"])
    ledger.engine.dispose()
    file = workspace.root / "ledger.db"
    for ending in ("-wal", "-shm"):
        file.with_name(file.name + ending).unlink(missing_ok=True)
    damage = {
        "gone": None,
        "empty": b"",
        "truncated": file.read_bytes()[:20_000],
        "bytes": (whole := file.read_bytes())[:5000] + b"\xa5" * 90_000 + whole[95_000:],
    }
    file.unlink()
    if (content := damage[lost]) is not None:
        file.write_bytes(content)
    words = {"gone": [("init", "--no-tune"), ("train",)], "empty": [("init", "--no-tune"), ("status",)]}
    for command in words.get(lost, [("status",)]):
        done = factory(*command, "-w", str(workspace.root))
        assert done.returncode == 3 and "Traceback" not in done.stderr, (command, done.stderr)
        assert done.stderr.startswith("factory: ") and done.stderr.count("\n") == 1
        assert "'factory restore'" in done.stderr and "'factory init'" not in done.stderr
    with pytest.raises(WorkspaceError) as raised:
        Ledger.open(workspace.ledger_url)
    assert raised.value.data["advice"] == GONE
    if lost == "bytes":
        done = factory("restore", "-w", str(workspace.root))
        assert done.returncode == 0, done.stderr
        assert "The restored ledger includes" in done.stdout and "ingested the shard again" not in done.stdout
        assert "continues from step 20" in done.stdout.replace("\n", " ")
    else:
        assert "lost_ledger.shard" not in codes(restore_ledger(workspace.root, "", SILENT))
    after = rows_of(workspace)
    for table in before:
        assert after[table] == before[table], table
    kept = list((workspace.root / "backups").glob("replaced-*/ledger.db"))
    assert [path.read_bytes() for path in kept] == ([content] if content is not None else [])


@pytest.mark.parametrize("step", range(4))
def test_a_killed_restore_loses_no_commit(
    copied: Copy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """The last commits of a killed daemon are only in SQLite's log."""
    workspace, ledger = copied()
    make_backup(Plant(workspace, ledger))
    for number in range(3):
        with ledger.begin() as tx:
            record_event(tx, "important", f"x:{number}")
    root = tmp_path / "killed"
    shutil.copytree(workspace.root, root, symlinks=True)  # the log as it is while the daemon lives
    assert (root / "ledger.db-wal").stat().st_size > 0
    left = step

    class Killed(BaseException):
        pass

    def dies(made: Path, place: Path) -> None:
        nonlocal left
        if not left:
            raise Killed
        left -= 1
        rename_into_place(made, place)

    monkeypatch.setattr("factory.repairs.lost_ledger.rename_into_place", dies)
    with pytest.raises(Killed):
        restore_ledger(root, "", SILENT)
    monkeypatch.undo()
    url, asked = f"sqlite:///{root / 'ledger.db'}", "SELECT COUNT(*) AS n FROM events WHERE kind = 'important'"
    if (root / "ledger.db").exists():
        assert step == 0 and Ledger.open(url, root).read(asked) == [{"n": 3}]
    else:
        with refused("engine.no_ledger", WorkspaceError, advice=GONE):
            Ledger.open(url, root)
    restore_ledger(root, "", SILENT)
    assert Ledger.open(url, root).read(asked) == [{"n": 3}]


def test_without_a_backup_the_ledger_is_made_from_the_folders(copied: Copy) -> None:
    workspace, ledger = copied()
    checkpoints = ledger.read("SELECT id, segment, step FROM checkpoints ORDER BY id")
    documents = ledger.read("SELECT key, fate, token_shard FROM documents ORDER BY key")
    shutil.rmtree(workspace.root / "backups")
    (workspace.root / "ledger.db").unlink()
    (workspace.segments / "00007-trunk").mkdir()
    (workspace.segments / "00007-trunk" / "result.json").write_text("{}")
    shutil.copytree(workspace.segments / "00001-trunk", workspace.segments / "00009-trunk")
    owner = json.loads((workspace.segments / "00009-trunk" / "owner.json").read_text())
    owner["row"] |= {"id": 9, "folder": "segments/00009-trunk", "last_step": 999}
    (workspace.segments / "00009-trunk" / "owner.json").write_text(json.dumps(owner))
    said = restore_ledger(workspace.root, "", SILENT)
    assert the(said, "lost_ledger.no_backup") and "lost_ledger.segment" in codes(said)
    aside = {one.data["path"].name: one.data["why"].code for one in said if codes([one]) == ["lost_ledger.set_aside"]}  # type: ignore[attr-defined]
    assert aside == {"00007-trunk": "lost_ledger.no_plan", "00009-trunk": "lost_ledger.other_hash"}
    again = Ledger.open(workspace.ledger_url, workspace.root)
    assert again.read("SELECT key, fate, token_shard FROM documents ORDER BY key") == documents
    from factory.training.training import run_segment

    for number in (1, 2):
        assert SegmentRow.get(again, number).state == "planned"
        run_segment(Plant(workspace, again), number)
    assert again.read("SELECT id, segment, step FROM checkpoints ORDER BY id") == checkpoints


def test_a_new_ledger_does_not_use_an_old_segments_folder(copied: Copy) -> None:
    workspace, _ = copied()
    for path in workspace.root.glob("ledger.db*"):
        path.unlink()
    with refused("backups.lost_ledger", WorkspaceError, state="missing", advice=GONE) as raised:
        make_or_open_ledger(workspace)
    assert "segments" in raised.value.data["found"]
    # as if a person had made a ledger all the same
    ledger = Ledger.create(workspace.ledger_url)
    for path in sorted((workspace.shards / "raw").iterdir()):
        ingest_and_move(Plant(workspace, ledger), path)
    old = (workspace.segments / "00001-trunk" / "metrics.jsonl").read_bytes()
    train_trunk(workspace, ledger)
    assert (workspace.segments / "00001-trunk" / "metrics.jsonl").read_bytes() != old
    (away,) = (workspace.root / "set-aside").glob("*-00001-trunk")
    assert (away / "metrics.jsonl").read_bytes() == old
    assert ledger.read("SELECT subject FROM events WHERE kind = 'set_aside'") == [{"subject": "segment:1"}]


def test_restore_also_restores_a_lost_configuration(copied: Copy) -> None:
    workspace, _ = copied()
    text = (workspace.root / "factory.yaml").read_text()
    (workspace.root / "factory.yaml").unlink()
    shutil.rmtree(workspace.root / "policies")
    done = factory("status", "-w", str(workspace.root))
    assert done.returncode == 3 and "'factory restore" in done.stderr
    assert "lost_ledger.config" in codes(restore_ledger(workspace.root, "", SILENT))
    assert (workspace.root / "factory.yaml").read_text() == text
    assert (workspace.root / "policies" / "recipes" / "tiny.yaml").is_file()


def test_a_half_written_line_of_the_journal_loses_no_commit(copied: Copy) -> None:
    workspace, ledger = copied()
    journal = list_backups(workspace.root)[-1] / NAME
    with ledger.begin() as tx:
        record_event(tx, "before", "daemon")
    whole = journal.read_bytes()
    with ledger.begin() as tx:
        record_event(tx, "torn", "daemon")
    journal.write_bytes(journal.read_bytes()[: len(whole) + 30])  # killed half way through the line
    with ledger.begin() as tx:
        record_event(tx, "after", "daemon")
    ledger.engine.dispose()
    for path in workspace.root.glob("ledger.db*"):
        path.unlink()
    restore_ledger(workspace.root, "", SILENT)
    found = Ledger.open(workspace.ledger_url).read("SELECT kind FROM events WHERE subject = 'daemon' ORDER BY id")
    assert [row["kind"] for row in found] == ["before", "torn", "after"]


def test_the_newest_backups_stay_and_a_damaged_one_is_skipped(copied: Copy, tmp_path: Path) -> None:
    workspace, ledger = copied()
    first = list_backups(workspace.root)[0]
    made = [make_backup(Plant(workspace, ledger))[0] for _ in range(KEPT)]
    assert list_backups(workspace.root) == made and not first.exists()
    other, _ = make_backup(Plant(workspace, ledger), tmp_path / "disk")
    with refused("backups.not_empty", InputError, folder=tmp_path / "disk"):
        make_backup(Plant(workspace, ledger), tmp_path / "disk")
    with refused("backups.unknown_backup", InputError, backup="nowhere", known=[one.name for one in made]):
        restore_ledger(workspace.root, "nowhere", SILENT)
    before = rows_of(workspace)
    (made[-1] / "ledger.db").write_bytes(b"x" * 9000)
    said = restore_ledger(workspace.root, "", SILENT)
    assert the(said, "lost_ledger.skipped_backup").data["backup"] == made[-1].name
    assert the(said, "lost_ledger.from_backup").data["backup"] == made[-2].name
    assert rows_of(workspace) == before
    assert restore_ledger(workspace.root, str(other), SILENT) and rows_of(workspace) == before


def test_a_backup_with_a_damaged_description_is_skipped_but_its_journal_is_read(copied: Copy) -> None:
    workspace, ledger = copied()
    make_backup(Plant(workspace, ledger))
    with ledger.begin() as tx:
        record_event(tx, "noted", "daemon", {"in": "its journal"})
    broken = list_backups(workspace.root)[-1]
    (broken / ABOUT).write_bytes(b"")
    with ledger.begin() as tx:  # a commit raises no error because of the backup
        record_event(tx, "noted", "daemon", {"after": "it"})
    assert broken not in list_backups(workspace.root)
    ok, said = looked_at_backups(workspace)
    assert not ok and f"{broken} is not a usable backup" in said
    before = rows_of(workspace)
    ledger.engine.dispose()
    (workspace.root / "ledger.db").unlink()
    assert restore_ledger(workspace.root, "", SILENT) and rows_of(workspace) == before
    assert back_up_daily(Plant(workspace, Ledger.open(workspace.ledger_url))) == "", "the restore made a backup"


def test_a_damaged_line_of_a_journal_is_reported(copied: Copy) -> None:
    workspace, ledger = copied()
    made, _ = make_backup(Plant(workspace, ledger))
    for number in range(3):
        with ledger.begin() as tx:
            record_event(tx, "noted", "daemon", {"number": number})
    file = made / NAME
    lines = file.read_bytes().splitlines(keepends=True)
    assert len(lines) == 3 and describe_journal_damage(file) == ""
    for at, text in ((0, lines[0].replace(b'"number', b'"numbed')), (1, b"\xff" * 20 + b"\n"), (2, b"torn\n")):
        file.write_bytes(b"".join([*lines[:at], text, *lines[at + 1 :]]))
        assert describe_journal_damage(file), at
        ok, said = looked_at_backups(workspace)
        assert not ok and str(describe_journal_damage(file)) in said
    file.write_bytes(lines[0] + lines[1][:50])  # as after a kill; the next process writes the whole line
    assert describe_journal_damage(file) == ""
    with open(file, "ab") as out:
        out.write(b"\n" + lines[1] + lines[2])
    assert describe_journal_damage(file) == ""
    file.write_bytes(lines[0] + lines[2])
    done = restore_ledger(workspace.root, made.name, SILENT)
    assert the(done, "lost_ledger.damaged_journal").data["damage"].data["journal"] == file


def test_restore_does_not_replace_an_undamaged_ledger_without_a_backup(copied: Copy) -> None:
    workspace, ledger = copied()
    before = rows_of(workspace)
    shutil.rmtree(workspace.root / "backups")
    with refused("lost_ledger.whole", InputError, ledger=workspace.root / "ledger.db"):
        restore_ledger(workspace.root, "", SILENT)
    assert rows_of(workspace) == before and ledger.read("SELECT id FROM segments")


def test_a_backup_restores_a_workspace_on_a_new_disk(copied: Copy, tmp_path: Path) -> None:
    """The old disk's checkpoints are lost: training waits until they are restored or made again."""
    workspace, ledger = copied()
    make_backup(Plant(workspace, ledger), tmp_path / "kept")
    new = tmp_path / "new" / "plant"
    done = factory("restore", str(tmp_path / "kept"), "--workspace", str(new))
    assert done.returncode == 0, done.stderr
    assert "only after the checkpoint" in done.stdout and "step-00000020" in done.stdout
    made = Workspace.open(new)
    assert SegmentRow.get(Ledger.open(made.ledger_url), 1).state == "done"
    assert (made.tokenizer / "tokenizer.json").read_bytes() == (workspace.tokenizer / "tokenizer.json").read_bytes()
    assert "init" not in factory("restore", "--workspace", str(tmp_path / "none")).stdout


def test_a_backup_that_cannot_be_written_is_not_reported_as_a_damaged_ledger(copied: Copy, tmp_path: Path) -> None:
    workspace, _ = copied()
    done = factory("backup", "/proc/elsewhere", "--workspace", str(workspace.root))
    assert "error[backups.not_made]" in done.stderr and done.returncode == 1
    with small_disk(tmp_path / "disk", "200k") as disk:
        done = factory("backup", str(disk / "kept"), "--workspace", str(workspace.root))
        assert "is damaged" not in done.stderr and "Traceback" not in done.stderr and done.returncode, done.stderr
        assert not list(disk.iterdir())


def test_the_names_of_backups_keep_their_order_when_the_clock_goes_back(tmp_path: Path) -> None:
    now = datetime(2026, 1, 31, 12)
    names = []
    for hours in (0, 0, -30, 0, *[-1] * 8, 1):
        names.append(make_backup_name(tmp_path, now + timedelta(hours=hours)))
        (tmp_path / BACKUPS_FOLDER / names[-1]).mkdir(parents=True)
        about = {"made_at": 0.0, "identity": "", "schema": "", "seq": 0}
        (tmp_path / BACKUPS_FOLDER / names[-1] / ABOUT).write_text(json.dumps(about))
        if len(names) > KEPT:
            shutil.rmtree(list_backups(tmp_path)[0])
        assert [path.name for path in list_backups(tmp_path)] == names[-KEPT:]
    assert names[1] == "2026-01-31T12-00-00-1" and names[-1] == "2026-01-31T13-00-00"


def test_a_backup_does_not_get_the_name_of_a_damaged_one(tmp_path: Path) -> None:
    now = datetime(2026, 1, 31, 12)
    for name in ("2026-01-31T12-00-00", "2026-01-31T12-00-00-1"):
        (tmp_path / BACKUPS_FOLDER / name).mkdir(parents=True)  # they have no description
    assert make_backup_name(tmp_path, now) == "2026-01-31T12-00-00-2"


def test_a_kill_while_the_oldest_backup_is_removed_leaves_no_half_backup(
    copied: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace, ledger = copied()
    while len(list_backups(workspace.root)) < KEPT:
        make_backup(Plant(workspace, ledger))

    def half(path: Path) -> None:
        if path.exists():
            (path / "ledger.db").unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as during, pytest.raises(KeyboardInterrupt):
        during.setattr(backups, "remove_path", half)
        make_backup(Plant(workspace, ledger))
    assert len(list_backup_folders(workspace.root)) == KEPT
    assert not [
        path
        for path in list_backup_folders(workspace.root)
        if backups.find_database_damage(path / "ledger.db") or not read_backup_info(path)
    ]
    make_backup(Plant(workspace, ledger))
    assert len([path for path in (workspace.root / BACKUPS_FOLDER).iterdir() if path.is_dir()]) == KEPT


def test_a_damaged_ledger_is_not_backed_up(copied: Copy) -> None:
    workspace, ledger = copied()
    ledger.engine.dispose()
    kept = list_backups(workspace.root)
    file = workspace.root / "ledger.db"
    whole = file.read_bytes()
    file.write_bytes(whole[:5000] + b"\xa5" * 90_000 + whole[95_000:])
    with refused("backups.damaged_database", WorkspaceError, database=file):
        make_backup(Plant(workspace, ledger))
    assert list_backups(workspace.root) == kept and not list((workspace.root / "backups").glob(".backup-*"))
