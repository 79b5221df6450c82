"""A disk that fills up during training: the daemon reports it, makes room or waits, and the segment continues."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from shutil import disk_usage

import pytest

from factory.backups.backups import back_up_daily
from factory.core.workspace import Workspace
from factory.duties.training import train_segment
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow
from factory.training.planning import plan_trunk, read_last_checkpoint
from tests.support.factory.code_loop import make_target
from tests.support.failing.deaths import make_mortal, strike
from tests.support.failing.nights import Listener, enough, fill, run_until, small_disk
from tests.support.plants.trained_plant import make_plant


@pytest.fixture(scope="module")
def plant(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Workspace, Ledger]]:
    """On a disk of its own."""
    root = tmp_path_factory.mktemp("full")
    with small_disk(root / "disk", "256m") as disk:
        code = make_target(root / "code")
        make_mortal(code)
        workspace, ledger = make_plant(disk, code, checkpoint_every=4)
        (workspace.root / "policies" / "retention.yaml").write_text("floor_bytes: 1000000\n")
        yield disk, workspace, ledger


@pytest.mark.slow("a segment whose disk is full for some seconds")
def test_a_segment_continues_when_the_disk_has_room_again(plant: tuple[Path, Workspace, Ledger]) -> None:
    disk, workspace, ledger = plant
    number = plan_trunk(Plant(workspace, ledger), 20)
    folder = strike(ledger, number, "always-linger-26")
    listener = Listener()

    def fill_up() -> None:
        while not (folder / "lingers").exists():
            time.sleep(0.05)
        fill(disk)
        (folder / "always-linger-26").unlink()

    def free() -> None:
        time.sleep(1.0)
        (disk / "ballast").unlink()

    threading.Thread(target=fill_up, daemon=True).start()
    listener.on["the disk is full"] = lambda: threading.Thread(target=free, daemon=True).start()
    listener.on[f"segment {number} (trunk): steps"] = enough
    run_until(workspace, ledger, listener)
    row = SegmentRow.get(ledger, number)
    assert (row.state, row.attempts) == ("done", 0), listener.lines
    assert listener.count("the disk is full") == 1, listener.lines
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(20, 40))


@pytest.mark.slow("three segments, the third of which does not fit at first")
def test_unneeded_files_are_removed_for_a_checkpoint(tmp_path: Path, code_repository: Path) -> None:
    """The free space is above the floor, but too small for a checkpoint."""
    with small_disk(tmp_path / "disk", "256m") as disk:
        workspace, ledger = make_plant(disk, code_repository)
        policy, most = workspace.root / "policies" / "retention.yaml", "trunk_segments: 100\nladders: 100\n"
        policy.write_text(f"floor_bytes: 1000\n{most}")
        train_segment(Plant(workspace, ledger), plan_trunk(Plant(workspace, ledger), 10))
        old = Path(read_last_checkpoint(ledger, 1)["path"])
        size = sum(path.stat().st_size for path in old.rglob("*"))
        (old / "padding").write_bytes(b"x" * (8 << 20))  # checkpoints of a plant are small beside what else grows
        back_up_daily(Plant(workspace, ledger))
        number = plan_trunk(Plant(workspace, ledger), 10)
        with open(disk / "ballast", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, disk_usage(workspace.root).free - size // 2)
        listener = Listener()
        listener.on[f"segment {number} (trunk): steps"] = enough
        run_until(workspace, ledger, listener)
        assert disk_usage(workspace.root).free > 1000 and not old.exists()
        assert listener.count("the disk is full") == 1 and listener.count("the disk is almost full: ") == 1, (
            listener.lines
        )
        assert (SegmentRow.get(ledger, number).state, SegmentRow.get(ledger, number).attempts) == ("done", 0)
