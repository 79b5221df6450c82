"""Copies of checkpoints are exact although a trainer, which may be hostile, writes at the same time, and the trainer cannot see the reading.

Each checkpoint of the ladder is whole or absent, also after a kill during a removal.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from factory.audit import kept_checkpoints
from factory.audit.audit_windows import AuditWindow, record_audit_window
from factory.audit.kept_checkpoints import (
    choose_steps_to_keep,
    copy_checkpoint,
    get_window_checkpoint_folder,
    keep_window_checkpoints,
    update_kept_checkpoints,
)
from factory.core.path_removal import remove_path
from factory.ledger.ledger import checkpoints, data_plans, segments
from factory.ledger.rows import SegmentRow
from tests.support.factory.approvals import PatchPlant
from tests.support.failing.limits import few_handles
from trainer.contract.checkpoint.format import Checkpoint, find_checkpoint_fault, list_checkpoints, save_checkpoint

ROW = SegmentRow(
    2, "trunk", 1, 1, "tiny", {"checkpoint_every": 5}, "", "plan", "", 20, 33, "done", 0, "", None, None, 0.0, None
)  # fmt: skip


def made(folder: Path, step: int = 5) -> Path:
    weights = {"w": torch.arange(1000.0)}
    return save_checkpoint(folder, Checkpoint(weights, {"step.w": torch.ones(1)}, {"step": step}))


def facts(folder: Path) -> list[tuple[str, int, int, int]]:
    """What a trainer can see of its files: names, links, and when they were read and changed."""
    found = []
    for file in sorted(folder.iterdir()):
        status = file.stat()
        found.append((file.name, status.st_nlink, status.st_atime_ns, status.st_ctime_ns))
    return found


def test_a_copied_checkpoint_is_whole_and_copying_leaves_no_trace(tmp_path: Path) -> None:
    source, target = made(tmp_path / "live"), tmp_path / "kept" / "step-00000005"
    for (
        file
    ) in source.iterdir():  # read long ago, so that even a file system of relative times would write down a reading
        os.utime(file, ns=(1, time.time_ns()))
    before = facts(source)
    copy_checkpoint(source, target)
    assert facts(source) == before
    assert not find_checkpoint_fault(target)
    assert {f.name: f.read_bytes() for f in target.iterdir()} == {f.name: f.read_bytes() for f in source.iterdir()}


def changed_bytes(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"x" * (folder / "model.safetensors").stat().st_size)


def linked(folder: Path) -> None:
    (folder / "state.json").unlink()
    (folder / "state.json").symlink_to("/etc/passwd")


def piped(folder: Path) -> None:
    (folder / "state.json").unlink()
    os.mkfifo(folder / "state.json")


def named_outside(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["../../../escaped"] = manifest["files"]["state.json"]
    (folder / "manifest.json").write_text(json.dumps(manifest))


def longer(folder: Path) -> None:
    with open(folder / "model.safetensors", "ab") as file:
        file.write(b"\0" * (1 << 20))


def nested(folder: Path) -> None:
    (folder / "manifest.json").write_text("[" * 100_000)


@pytest.mark.parametrize("harm", [changed_bytes, linked, piped, named_outside, longer, nested])
def test_a_checkpoint_that_differs_from_its_manifest_is_not_kept(harm, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    source, target = made(tmp_path / "live"), tmp_path / "kept" / "step-00000005"
    harm(source)
    with pytest.raises((ValueError, OSError)):
        copy_checkpoint(source, target)
    assert not target.exists() and not (tmp_path / "escaped").exists()


def test_a_folder_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    source = made(tmp_path / "elsewhere")
    (tmp_path / "live").mkdir()
    (tmp_path / "live" / source.name).symlink_to(source)
    with pytest.raises(OSError):
        copy_checkpoint(tmp_path / "live" / source.name, tmp_path / "kept" / source.name)
    with pytest.raises(FileNotFoundError):
        copy_checkpoint(tmp_path / "live" / "step-00000010", tmp_path / "kept" / "step-00000010")


def test_the_whole_segment_is_audited_if_checkpoints_of_the_window_are_missing(tmp_path: Path) -> None:
    """If a trainer writes no checkpoint, or a broken one, at the drawn window, the whole segment is audited."""
    plant, kept_at = PatchPlant(tmp_path), tmp_path / "segment" / "checkpoints"
    parent = made(tmp_path / "parent", 20)
    with plant.ledger.begin() as tx:
        tx.execute(data_plans.insert().values(id="plan", plan={}))
        for number, first in ((1, 0), (2, 20)):
            tx.execute(
                segments.insert().values(
                    vars(replace(ROW, id=number, first_step=first, folder=str(tmp_path / "segment")))
                )
            )
        tx.execute(checkpoints.insert().values(id="c", segment=1, step=20, path=str(parent), created_at=0.0))
    row, drawn = SegmentRow.get(plant.ledger, 2), record_audit_window(plant.ledger, 2, AuditWindow(25, 30, (1,)))
    keep_now = lambda: keep_window_checkpoints(plant, row, drawn)
    made(kept_at, 25)
    with few_handles(), pytest.raises(OSError):
        keep_now()
    assert AuditWindow.find_for_segment(plant.ledger, 2) == drawn, (
        "a window is not given up because no file handle was left"
    )
    shutil.rmtree(kept_at)
    made(kept_at, 33)
    changed_bytes(made(kept_at, 25))
    made(kept_at, 30)
    whole = AuditWindow(20, 33, (1,))
    assert keep_now() == whole == AuditWindow.find_for_segment(plant.ledger, 2)
    shutil.rmtree(plant.workspace.root / "audits")
    shutil.rmtree(kept_at)
    assert keep_now().step_count == 0  # a person is told, and the audit is not tried for ever
    for step in (25, 30, 33):
        made(kept_at, step)
    assert keep_now() == drawn and not find_checkpoint_fault(get_window_checkpoint_folder(plant, row, 25))


class Killed(BaseException):
    pass


def test_a_checkpoint_removed_from_the_ladder_is_whole_or_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = tmp_path / "checkpoints", tmp_path / "ladder"
    steps = range(5, 45, 5)
    for step in steps:
        save_checkpoint(source, Checkpoint({"w": torch.ones(4)}, {}, {"step": step}))
    update_kept_checkpoints(source, target, every=5)
    held = list_checkpoints(target)
    for _, checkpoint in list_checkpoints(source):
        remove_path(checkpoint)
    for step in (45, 50):
        save_checkpoint(source, Checkpoint({"w": torch.ones(4)}, {}, {"step": step}))
    wanted = choose_steps_to_keep([step for step, _ in held] + [45, 50], every=5)
    assert len(wanted) < len(held) + 2

    def killed(path: Path) -> None:
        (path / "manifest.json").unlink()
        raise Killed

    monkeypatch.setattr(kept_checkpoints, "remove_path", killed)
    with pytest.raises(Killed):
        update_kept_checkpoints(source, target, every=5)
    monkeypatch.undo()
    assert not [fault for _, path in list_checkpoints(target) if (fault := find_checkpoint_fault(path))]
    update_kept_checkpoints(source, target, every=5)
    assert [step for step, _ in list_checkpoints(target)] == wanted
    assert not list(target.glob(".*"))
