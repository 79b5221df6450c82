"""The files of a run are read without following links and without waiting for a pipe."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from factory.runs.trace import RunTrace
from factory.runs.untrusted_files import UntrustedFileError
from trainer.contract.checkpoint import format as checkpoints
from trainer.contract.checkpoint.format import Checkpoint


def linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("where", "spoil"),
    [
        (".", linked),
        ("checkpoints", linked),
        ("checkpoints/step-00000004", linked),
        ("checkpoints/step-00000004/manifest.json", linked),
        ("checkpoints/step-00000004/manifest.json", pipe),
    ],
)
def test_reading_a_checkpoint_follows_no_link_and_waits_for_no_pipe(
    tmp_path: Path, where: str, spoil: Callable[[Path], None]
) -> None:
    folder = tmp_path / "run"
    path = checkpoints.save_checkpoint(
        folder / "checkpoints", Checkpoint({"w": torch.ones(2)}, {}, {"step": 4, "recipe": {}})
    )
    trace = RunTrace(folder, 0, 4, ends=False)
    assert (
        path == trace.final_checkpoint_path
        and trace.final_checkpoint_hash
        and trace.final_checkpoint.state["step"] == 4
    )
    spoil(folder / where)
    trace = RunTrace(folder, 0, 4, ends=False)
    for read in (lambda: trace.final_checkpoint_hash, lambda: trace.final_checkpoint):
        with pytest.raises(UntrustedFileError, match="is not a"):
            read()
