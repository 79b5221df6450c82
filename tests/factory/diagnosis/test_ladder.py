"""The ladder holds whole rungs or none, also after a kill in the midst of a removal."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from factory.audit import keeping
from factory.audit.keeping import keep_rungs, rungs
from factory.core.removal import remove
from trainer.contract.checkpoint.format import Checkpoint, find_fault, save, steps_in


class Killed(BaseException):
    pass


def test_a_rung_that_is_removed_is_whole_or_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = tmp_path / "checkpoints", tmp_path / "ladder"
    steps = range(5, 45, 5)
    for step in steps:
        save(source, Checkpoint({"w": torch.ones(4)}, {}, {"step": step}))
    keep_rungs(source, target, every=5)
    held = steps_in(target)
    for _, checkpoint in steps_in(source):
        remove(checkpoint)
    for step in (45, 50):
        save(source, Checkpoint({"w": torch.ones(4)}, {}, {"step": step}))
    wanted = rungs([step for step, _ in held] + [45, 50], every=5)
    assert len(wanted) < len(held) + 2

    def killed(path: Path) -> None:
        (path / "manifest.json").unlink()
        raise Killed

    monkeypatch.setattr(keeping, "remove", killed)
    with pytest.raises(Killed):
        keep_rungs(source, target, every=5)
    monkeypatch.undo()
    assert not [fault for _, path in steps_in(target) if (fault := find_fault(path))]
    keep_rungs(source, target, every=5)
    assert [step for step, _ in steps_in(target)] == wanted
    assert not list(target.glob(".*"))
