"""Random histories with real folders and a real ledger: needed files always stay, and a cleaning that was killed is finished later.

The tests compute the needed files from the paths that each possible next action opens, not from ``needs``.
"""

from __future__ import annotations

import errno
import json
import os
import random
import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
import yaml

from factory.audit.audit_windows import find_due_audits
from factory.audit.kept_checkpoints import get_kept_checkpoints_folder, get_window_checkpoint_folder
from factory.audit.policy import AuditPolicy
from factory.core.faults import is_disk_full
from factory.core.workspace import Workspace, WorkspaceConfig
from factory.gates.release.anomaly_policy import AnomalyPolicy
from factory.gates.training_start import find_training_start
from factory.git.repository import checkout_commit, get_live_commit
from factory.ledger.anomalies import list_open_anomalies
from factory.ledger.file_events import RETIRED, list_paths_removed_by_retention
from factory.ledger.ledger import Ledger, candidates, events, verdicts
from factory.ledger.plant import Plant
from factory.ledger.rows import CandidateRow, ReleaseRow, SegmentRow, Subject
from factory.retention import cleaning, low_disk
from factory.retention.cleaning import REMOVED, list_retention_decisions, remove_unneeded_folders
from factory.retention.low_disk import is_workspace_disk_full
from factory.training.planning import read_last_checkpoint
from factory.training.segment_folder import make_segment_spec
from tests.support.factory.command import factory
from tests.support.failing.nights import fill, small_disk
from tests.support.git import git
from tests.support.messages import codes
from tests.support.plants.history import History, step_name


def opened_next(workspace: Workspace, ledger: Ledger) -> dict[str, list[Path]]:
    """The paths that each possible next action opens."""
    needed: dict[str, list[Path]] = {}
    rows = SegmentRow.select(ledger)
    for row in rows:
        if row.state == "planned" and row.kind != "average":
            start = make_segment_spec(ledger, row)["initial_checkpoint"]
            own = sorted(Path(row.folder).rglob("*"))
            needed[f"resume of {row.id}"] = [*([Path(start)] if start else []), *own]
        if row.state == "planned" and row.kind == "average":
            sql = "SELECT detail FROM events WHERE kind = 'segment_planned' AND subject = :subject"
            plan = ledger.read(sql, subject=str(Subject("segment", row.id)))[0]["detail"]["average"]
            needed[f"average {row.id}"] = [Path(source["path"]) for source in plan["sources"]]
    newest = SegmentRow.find_first(ledger, "WHERE kind <> 'average' ORDER BY id DESC")
    if newest and newest.state in ("failed", "uncertified"):
        needed["retry"] = [Path(read_last_checkpoint(ledger, newest.parent)["path"])] if newest.parent else []
        needed["retry"] += sorted(Path(newest.folder).rglob("*"))
    done = [row for row in rows if row.kind == "trunk" and row.state == "done"]
    needed["plan a trunk or an anneal"] = [Path(read_last_checkpoint(ledger, done[-1].id)["path"])]
    anneals = [row for row in rows if row.kind == "anneal" and row.state == "done"]
    if anneals and anneals[-1].parent == done[-1].id:
        needed["continue from the anneal"] = [Path(read_last_checkpoint(ledger, anneals[-1].id)["path"])]
    start_of_gates = find_training_start(ledger)
    assert start_of_gates is not None
    needed["propose"] = [start_of_gates.checkpoint]
    exported = {row.segment for row in CandidateRow.select(ledger)}
    for row in rows:
        if row.kind != "trunk" and row.state == "done" and row.id not in exported:
            needed[f"export of {row.id}"] = [Path(read_last_checkpoint(ledger, row.id)["path"])]
    for release in ReleaseRow.select(ledger):
        needed[f"rollback to {release.number}"] = [
            Path(release.export_path),
            Path(read_last_checkpoint(ledger, release.segment)["path"]),
        ]
    judged = {
        v["subject"]: v["outcome"]
        for v in ledger.read("SELECT subject, outcome FROM verdicts WHERE gate = 'release' ORDER BY id")
    }
    released = [row.candidate for row in ReleaseRow.select(ledger)]
    for candidate in CandidateRow.select(ledger):
        outcome = judged.get(str(Subject("candidate", candidate.id)))
        newer = any(number > candidate.id for number in released)
        spoiled = any(row.state == "rewound" for row in SegmentRow.read_lineage(ledger, candidate.segment))
        if outcome is None or (outcome != "reject" and not newer and not spoiled):
            needed[f"judge or release candidate {candidate.id}"] = [Path(candidate.export_path)]
    for number in find_due_audits(ledger, AuditPolicy(again_after_seconds=1.0)):
        row = SegmentRow.get(ledger, number)
        window = ledger.read(
            "SELECT detail FROM events WHERE kind = 'audit_drawn' AND subject = :s", s=str(Subject("segment", number))
        )[-1]["detail"]
        needed[f"audit of {number}"] = [
            get_window_checkpoint_folder(Plant(workspace, ledger), row, window[end]) for end in ("first", "last")
        ]
        needed[f"audit of the whole of {number}"] = [Path(read_last_checkpoint(ledger, number)["path"])]
        if row.parent:
            needed[f"audit of the whole of {number}"].append(Path(read_last_checkpoint(ledger, row.parent)["path"]))
    for anomaly in list_open_anomalies(ledger, AnomalyPolicy().kinds):
        if SegmentRow.get(ledger, anomaly.segment).state != "rewound":
            rungs: list[Path] = []
            for row in SegmentRow.read_lineage(ledger, anomaly.segment):
                for folder in (get_kept_checkpoints_folder(workspace, row.id), Path(row.folder) / "checkpoints"):
                    rungs += folder.glob("step-*")
            needed[f"diagnosis of {anomaly.id}"] = [*rungs, workspace.root / "diagnoses" / f"{anomaly.id:05d}"]
    return {action: [path for path in paths if os.path.lexists(path)] for action, paths in needed.items()}


@pytest.fixture
def code(code_repository: Path) -> Path:
    return code_repository


def make(root: Path, code: Path, seed: int, trunks: int = 6) -> tuple[Workspace, Ledger]:
    workspace = Workspace.create(root, WorkspaceConfig(repository=str(code)))
    ledger = Ledger.create(workspace.ledger_url)
    History(workspace, ledger, seed).lived(trunks)
    return workspace, ledger


def drawn_policy(workspace: Workspace, seed: int) -> None:
    rng = random.Random(seed)
    chosen = {
        "trunk_segments": rng.randint(1, 4), "ladders": rng.randint(0, 4), "candidate_days": rng.choice([0, 5, 20]),
        "rewound_days": rng.choice([0, 5, 20]), "worktrees": rng.randint(0, 3), "log_days": rng.choice([0, 20]),
    }  # fmt: skip
    (workspace.root / "policies" / "retention.yaml").write_text(yaml.safe_dump(chosen))


@pytest.mark.parametrize("seed", range(12))
def test_cleaning_removes_no_path_that_a_later_action_opens(tmp_path: Path, code: Path, seed: int) -> None:
    workspace, ledger = make(tmp_path / "w", code, seed)
    drawn_policy(workspace, seed)
    needed = opened_next(workspace, ledger)
    assert needed["plan a trunk or an anneal"], "the history has paths that could be lost"
    rows = [
        ledger.read(f"SELECT * FROM {table}")
        for table in ("segments", "checkpoints", "candidates", "verdicts", "releases")
    ]
    gone = remove_unneeded_folders(Plant(workspace, ledger)).list_removal_decisions()
    hard = remove_unneeded_folders(Plant(workspace, ledger), hard=True).list_removal_decisions()
    assert gone or hard
    lost = {action: [str(p) for p in paths if not os.path.lexists(p)] for action, paths in needed.items()}
    assert {action: paths for action, paths in lost.items() if paths} == {}
    assert opened_next(workspace, ledger) == needed
    for row in SegmentRow.select(ledger):  # the page of a past segment reads these files
        assert (Path(row.folder) / "metrics.jsonl").exists() and (Path(row.folder) / "segment.json").exists()
    assert rows == [
        ledger.read(f"SELECT * FROM {table}")
        for table in ("segments", "checkpoints", "candidates", "verdicts", "releases")
    ]
    for choice in (*gone, *hard):
        assert not os.path.lexists(choice.folder.path)
    assert {
        c.folder.path.relative_to(workspace.root).as_posix() for c in (*gone, *hard)
    } == list_paths_removed_by_retention(ledger)
    assert remove_unneeded_folders(Plant(workspace, ledger), hard=True).list_removal_decisions() == [], (
        "the first cleaning removed everything that can be removed"
    )


def test_cleaning_keeps_what_the_policy_names(tmp_path: Path, code: Path) -> None:
    workspace = Workspace.create(tmp_path / "w", WorkspaceConfig(repository=str(code)))
    ledger = Ledger.create(workspace.ledger_url)
    history = History(workspace, ledger, 1)
    trunk = None
    for _ in range(5):
        trunk = history.segment("trunk", trunk, "done", trunk.last_step if trunk else 0)
    remove_unneeded_folders(Plant(workspace, ledger))
    left = {row.id: len(list((Path(row.folder) / "checkpoints").glob("step-*"))) for row in SegmentRow.select(ledger)}
    assert left == {1: 0, 2: 0, 3: 4, 4: 4, 5: 4}  # trunk_segments: 3
    ladders = sorted(int(path.name) for path in (workspace.root / "ladder").iterdir())
    assert ladders == [2, 3, 4, 5]
    remove_unneeded_folders(Plant(workspace, ledger), hard=True)
    left = {row.id: len(list((Path(row.folder) / "checkpoints").glob("step-*"))) for row in SegmentRow.select(ledger)}
    assert left == {1: 0, 2: 0, 3: 0, 4: 0, 5: 4} and not list((workspace.root / "ladder").iterdir())


def test_a_worktree_that_a_diagnosis_could_not_remove_is_removed_later(tmp_path: Path, code: Path) -> None:
    workspace, ledger = make(tmp_path / "w", code, 3, trunks=2)
    left = checkout_commit(
        workspace.repository, get_live_commit(workspace.repository), workspace.worktrees / "diagnosis-1"
    )
    assert left.is_dir() and left.name in git(workspace.repository, "worktree", "list")
    remove_unneeded_folders(Plant(workspace, ledger))
    assert not left.exists() and left.name not in git(workspace.repository, "worktree", "list")


def test_cleaning_keeps_a_folder_without_a_row_for_a_person_to_decide(tmp_path: Path, code: Path) -> None:
    workspace, ledger = make(tmp_path / "w", code, 3, trunks=2)
    foreign = workspace.segments / "00099-trunk" / "checkpoints" / step_name(5)
    foreign.mkdir(parents=True)
    remove_unneeded_folders(Plant(workspace, ledger), hard=True)
    assert foreign.exists()
    (choice,) = [one for one in list_retention_decisions(Plant(workspace, ledger)) if one.folder.path == foreign]
    assert codes([choice.reason]) == ["removal_decisions.no_segment"]


@pytest.mark.parametrize("point", ["recorded", "renamed", "half removed"])
def test_after_a_kill_the_next_cleaning_finishes_the_removal(
    tmp_path: Path, code: Path, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace, ledger = make(tmp_path / "w", code, 5)
    whole = cleaning.remove_path
    first = next(
        one.folder.path
        for one in list_retention_decisions(Plant(workspace, ledger))
        if one.is_removed and one.folder.kind == "checkpoint"
    )

    class Killed(BaseException):
        pass

    def kill(path: Path) -> None:
        if path.name == f"{REMOVED}{first.name}" and path.parent == first.parent:
            there = path.exists()
            if (point == "recorded" and not there) or (point != "recorded" and there):
                if point == "half removed":
                    (path / "manifest.json").unlink()
                raise Killed
        whole(path)

    monkeypatch.setattr(cleaning, "remove_path", kill)
    with pytest.raises(Killed):
        remove_unneeded_folders(Plant(workspace, ledger))
    monkeypatch.undo()
    assert first.relative_to(workspace.root).as_posix() in list_paths_removed_by_retention(ledger), (
        "the ledger comes first"
    )
    remove_unneeded_folders(Plant(workspace, ledger))
    assert not first.exists() and not list(workspace.root.rglob(f"{REMOVED}*"))


def test_a_disk_without_space_for_the_ledgers_records_is_cleaned(tmp_path: Path, code: Path) -> None:
    """No byte is free. The removed folders make room for their own records."""
    with small_disk(tmp_path / "disk", "64m") as disk:
        workspace, ledger = make(disk / "w", code, 5)
        going = [
            one.folder.path
            for one in list_retention_decisions(Plant(workspace, ledger), hard=True)
            if one.is_removed and one.folder.kind != "run"
        ]
        (next(path for path in going if path.is_dir()) / "padding").write_bytes(b"x" * 1_000_000)
        fill(disk)
        with pytest.raises(sa.exc.DBAPIError) as raised, ledger.begin() as tx:
            tx.execute(events.insert(), [{"at": 0.0, "kind": "x" * 10000, "subject": "x"}] * 100)
        assert is_disk_full(raised.value)
        remove_unneeded_folders(Plant(workspace, ledger), hard=True)
        assert not [path for path in going if os.path.lexists(path)]
        assert {path.relative_to(workspace.root).as_posix() for path in going} <= list_paths_removed_by_retention(
            ledger
        )


def test_removals_before_a_failed_one_are_recorded(tmp_path: Path, code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At first the disk has no room for the records in the ledger."""
    workspace, ledger = make(tmp_path / "w", code, 5)
    going = [
        one.folder.path
        for one in list_retention_decisions(Plant(workspace, ledger), hard=True)
        if one.is_removed and one.folder.kind != "run"
    ]
    full, tell, rename = [True], cleaning._tell, os.rename

    def told(*given: Any) -> None:
        if full[0]:
            raise sa.exc.OperationalError("INSERT", {}, sqlite3.OperationalError("database or disk is full"))
        tell(*given)

    def renamed(source: Path, target: Path) -> None:
        if sum(not os.path.lexists(path) for path in going) == 2:
            full[0] = False
            raise OSError(errno.EIO, "Input/output error", str(source))
        rename(source, target)

    monkeypatch.setattr(cleaning, "_tell", told)
    monkeypatch.setattr(cleaning.os, "rename", renamed)
    with pytest.raises(OSError, match="Input/output error"):
        remove_unneeded_folders(Plant(workspace, ledger), hard=True)
    gone = {path.relative_to(workspace.root).as_posix() for path in going if not os.path.lexists(path)}
    assert len(gone) >= 2 and gone <= list_paths_removed_by_retention(ledger)


def test_only_an_error_of_the_workspaces_own_disk_counts_as_a_full_disk(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing mount of the workspace is not an error."""
    full = OSError(errno.ENOSPC, "No space left on device")
    for free, here in ((1, True), (60, False)):
        monkeypatch.setattr(low_disk, "disk_usage", lambda _, free=free: SimpleNamespace(free=free, total=100))
        assert is_workspace_disk_full(workspace, full) == here and not is_workspace_disk_full(
            workspace, FileNotFoundError("it is away")
        )
    monkeypatch.undo()
    workspace.root.rename(tmp_path / "away")
    assert not is_workspace_disk_full(workspace, full) and not is_workspace_disk_full(
        workspace, FileNotFoundError("it is away")
    )


def test_a_dry_run_changes_nothing_and_lists_the_reasons(tmp_path: Path, code: Path) -> None:
    workspace, ledger = make(tmp_path / "w", code, 7)
    home = ["--workspace", str(workspace.root)]
    before = sorted(workspace.root.rglob("*"))
    said = factory("clean", "--dry-run", *home)
    assert sorted(p for p in workspace.root.rglob("*") if p.suffix != ".lock") == [
        p for p in before if p.suffix != ".lock"
    ]
    assert "to remove  " in said.stdout and "This would free " in said.stdout and "segment 16 is failed" in said.stdout
    listed = json.loads(factory("clean", "--dry-run", "--json", *home).stdout)
    goes = {row["path"] for row in listed if row["goes"]}
    assert (
        goes
        and {str(one.folder.path) for one in list_retention_decisions(Plant(workspace, ledger)) if one.is_removed}
        == goes
    )
    done = factory("clean", *home)
    assert done.returncode == 0 and " and freed " in done.stdout
    assert not any(os.path.lexists(path) for path in goes)
    kinds = ledger.select_rows(events.select().where(events.c.kind == RETIRED))
    assert len(kinds) == len(goes) and all(row["detail"]["why"] and row["detail"]["bytes"] > 0 for row in kinds)


def test_cleaning_keeps_the_worktrees_of_a_running_code_loop(tmp_path: Path, code: Path) -> None:
    workspace, ledger = make(tmp_path / "w", code, 9)
    (workspace.root / "policies" / "retention.yaml").write_text("worktrees: 0\n")
    with workspace.hold_lock("code-loop"):
        cleaned = remove_unneeded_folders(Plant(workspace, ledger))
        assert not any(one.is_removed for one in cleaned.choices if one.folder.kind in ("worktree", "compiled"))
    assert any(
        one.folder.kind == "worktree"
        for one in remove_unneeded_folders(Plant(workspace, ledger)).list_removal_decisions()
    )


def test_cleaning_keeps_checkpoints_from_which_training_continues(tmp_path: Path, code: Path) -> None:
    workspace = Workspace.create(tmp_path / "w", WorkspaceConfig(repository=str(code)))
    ledger = Ledger.create(workspace.ledger_url)
    history = History(workspace, ledger, 2)
    first = history.segment("trunk", None, "done", 0)
    history.segment("anneal", first, "planned", first.last_step)
    far = history.segment("trunk", first, "done", 100)
    annealed = history.segment("anneal", far, "done", far.last_step)
    with ledger.begin() as tx:
        tx.execute(
            candidates.insert().values(
                id=1, segment=annealed.id, checkpoint="c", export_path="e", export_sha256="e", created_at=0.0
            )
        )
        tx.execute(
            verdicts.insert().values(
                gate="release", subject="candidate:1", policy_sha256="p", subject_sha256="e", outcome="reject", reasons=[], evidence={},
                created_at=0.0,
            )
        )  # fmt: skip
    history.segment("trunk", None, "done", 0)  # a person started training again
    remove_unneeded_folders(Plant(workspace, ledger), hard=True)
    left = {
        row.id: [p.name for p in (Path(row.folder) / "checkpoints").glob("step-*")] for row in SegmentRow.select(ledger)
    }
    assert left[1] == [step_name(20)] and left[3] == [step_name(120)] and left[4] == [step_name(140)] and left[5]
