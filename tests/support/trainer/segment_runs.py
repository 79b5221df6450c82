"""What tests of whole segments share: what a run left, and whether two runs are one and the same."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import torch

from tests.support.trainer.segments import start_trainer
from trainer.contract.checkpoint import format as checkpoints
from trainer.contract.json_lines import read_json_lines

TIMED = {"tokens_per_s", "flops_per_s", "mfu", "first_step_s", "data_wait_s", "time", "memory"}
DYING = Path(__file__).with_name("dying_trainer.py")


def records(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.items() if k not in TIMED} for r in read_json_lines(folder / "metrics.jsonl")]


def result(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "result.json").read_text()))


def assert_same_run(ours: Path, theirs: Path) -> None:
    """To the bit: weights, optimiser, sampler, detector, metrics."""
    a, b = (checkpoints.load_checkpoint(Path(result(folder)["checkpoint"])) for folder in (ours, theirs))
    for mine, other in ((a.model, b.model), (a.optimizer, b.optimizer)):
        assert mine.keys() == other.keys()
        for name in mine:
            assert torch.equal(mine[name], other[name]), name
    for key in ("step", "sampler", "detector", "monitor", "signals", "recipe", "data_plan"):
        assert a.state[key] == b.state[key], key
    assert records(ours) == records(theirs)
    for key in ("tokens", "supervised_tokens", "loss", "loss_by_domain", "documents_seen"):
        assert result(ours)[key] == result(theirs)[key], key


def start_dying(
    folder: Path, step: int, calls: int, *launcher: str, sent: signal.Signals = signal.SIGKILL, rank: int = 0
) -> subprocess.Popen[str]:
    """A trainer that gets the signal so many Python calls after the beginning of a step: ``dying_trainer``."""
    words = (str(DYING), sent.name, str(step), str(calls), str(rank))
    return start_trainer(folder, *launcher, program=words)


def die(folder: Path, step: int, calls: int, sent: signal.Signals = signal.SIGKILL) -> int:
    """The exit code of such a trainer."""
    process = start_dying(folder, step, calls, sent=sent)
    process.communicate()
    return process.returncode
