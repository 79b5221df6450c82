"""What a trainer says with its exit is held to what the factory sees: merged code that says that the disk is full, or that somebody
stopped it, is tried again and parked like any other."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from factory.core.errors import DiskFullError, SegmentError
from factory.core.faults import fits
from factory.core.launching import EXIT_DISK_FULL, EXIT_STOPPED
from factory.core.progress import SILENT
from factory.core.workspace import Config, Workspace
from factory.ledger.ledger import Ledger
from factory.ledger.rows import SegmentRow
from factory.retrying.endings import FAILED, KILLED
from factory.retrying.tries import TrainerDiedError
from factory.sandbox.live import Running
from factory.training import certificate_runs
from factory.training.segment_folder import failed, room_for
from tests.support.failing.deaths import deaths, plan_row
from tests.support.failing.nights import fill, small_disk
from tests.support.paths import ROOT
from trainer.contract.recipe import Recipe

RECIPE = Recipe.load(ROOT / "policies" / "recipes" / "tiny.yaml").model_dump(mode="json")


def planned(workspace: Workspace, ledger: Ledger) -> SegmentRow:
    folder = workspace.segments / "00001-trunk"
    folder.mkdir(parents=True)
    return plan_row(ledger, folder=str(folder), recipe_json=RECIPE)


def test_a_disk_that_is_full_counts_no_try(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "64m") as disk:
        workspace = Workspace.create(disk / "w", Config())
        ledger = Ledger.create(workspace.ledger_url)
        row = planned(workspace, ledger)
        fill(disk)
        with pytest.raises(DiskFullError, match=f"segment {row.id}: the disk is full"):
            failed(workspace, ledger, row, EXIT_DISK_FULL, None)
        assert SegmentRow.get(ledger, row.id).attempts == 0


@pytest.mark.parametrize(
    ("code", "how", "says"),
    [
        (EXIT_DISK_FULL, FAILED, "says that the disk is full, but there is room for its checkpoints: trainer: no room"),
        (EXIT_STOPPED, KILLED, r"was stopped by somebody else \(SIGTERM\), and not by this factory"),
    ],
)
def test_one_that_lies_is_parked(workspace: Workspace, ledger: Ledger, code: int, how: str, says: str) -> None:
    row = planned(workspace, ledger)
    (workspace.logs / f"segment-{row.id:05d}.log").write_text("trainer: no room\n")
    for parked in (False, False, True):
        with pytest.raises(TrainerDiedError, match=f"segment {row.id} {says}") as raised:
            failed(workspace, ledger, SegmentRow.get(ledger, row.id), code, None)
        assert raised.value.parked == parked
    assert [death["how"] for death in deaths(ledger, row.id)] == [how] * 2


def test_what_fits_is_seen_by_taking_it(tmp_path: Path) -> None:
    need = room_for(RECIPE)
    with small_disk(tmp_path / "disk", "64m") as disk:
        assert fits(disk, 1 << 20) and fits(disk, need) and not fits(disk, 65 << 20)
        assert not list(disk.iterdir())
        fill(disk)
        assert not fits(disk, 1)


def test_no_room_for_another_file_is_no_room(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "64m,nr_inodes=4") as disk:
        for name in "abc":
            (disk / name).touch()
        assert not fits(disk, 1)


def test_a_trainer_of_a_certificate_that_lies_fills_no_disk(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is said about its code, and nothing is removed for it."""
    scratch = workspace.root / "scratch"
    scratch.mkdir()

    def start(*words: object, out: Any, **_: object) -> Running:
        return Running(subprocess.Popen(["sh", "-c", f"exit {EXIT_DISK_FULL}"], stdout=out))

    monkeypatch.setattr(certificate_runs, "start_trainer", start)
    spec = {"recipe": RECIPE, "first_step": 0, "last_step": 2, "data_plan": {"shards": []}, "initial_checkpoint": None}
    code: Any = type("Code", (), {"folder": Path("commit")})()
    monkeypatch.setattr(certificate_runs, "read_by", lambda spec: [])
    with pytest.raises(SegmentError, match="there is room for its checkpoints now") as raised:
        certificate_runs.train_all(workspace, code, scratch, {scratch / "new": spec}, "certificate", SILENT)
    assert not isinstance(raised.value, DiskFullError)
