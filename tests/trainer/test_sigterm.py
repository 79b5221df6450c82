"""SIGTERM to a real trainer: a quick step is finished and saved, otherwise the process ends within the step. No child process is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from textwrap import indent

import pytest

from tests.support.stopping import SLOW_STEP, WITHIN, left_of, started_by, wait_for
from tests.support.trainer.segment_runs import assert_same_run, records
from tests.support.trainer.segments import (
    MakeShard,
    plan_of,
    recipe_with,
    run_trainer,
    start_trainer,
    train_here,
    write_spec,
)
from trainer.contract import stopping
from trainer.contract.checkpoint import format as checkpoints

TORCHRUN = ("-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--nproc-per-node=2")
SLOW_TRAINER = f"""
import runpy
import torch
from trainer.run import SegmentRun
usual = SegmentRun.launch_step
def slow(self, batch):
{indent(SLOW_STEP, "    ")}
    return usual(self, batch)
SegmentRun.launch_step = slow
runpy.run_module("trainer", run_name="__main__", alter_sys=True)
"""


def start_slow(folder: Path, mark: Path, *launcher: str) -> subprocess.Popen[bytes]:
    """A trainer that is in the midst of its fifth step, and stays there."""
    mark.touch()
    script = mark.with_name("slow_trainer.py")
    script.write_text(SLOW_TRAINER)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "SLOW_STEP": str(mark)}
    process = subprocess.Popen([sys.executable, *launcher, str(script), str(folder)], env=environment)
    for rank in range(2 if launcher else 1):
        wait_for(mark.with_name(f"slow-{rank}"))
    return process


@pytest.mark.slow("a trainer, stopped in the midst of a step")
def test_sigterm_within_a_step_ends_the_run_and_the_next_resumes_to_the_bit(
    tmp_path: Path, make_shard: MakeShard
) -> None:
    plan, recipe = plan_of(make_shard()), recipe_with(checkpoint_every=3)
    straight, stopped = (write_spec(tmp_path / name, plan, recipe, last_step=12) for name in ("straight", "stopped"))
    assert train_here(straight) == (0, "")
    process = start_slow(stopped, tmp_path / "mark")
    started = started_by(process.pid)
    process.terminate()
    assert process.wait(timeout=WITHIN) == 75
    assert len(started) >= 2 and not left_of(started)
    assert [step for step, _ in checkpoints.list_checkpoints(stopped / "checkpoints")] == [3]
    assert run_trainer(stopped) == (0, "")
    assert_same_run(straight, stopped)


def test_a_second_signal_ends_the_run_at_once_and_a_repeated_one_counts_once(
    tmp_path: Path, make_shard: MakeShard
) -> None:
    folder = write_spec(tmp_path / "segment", plan_of(make_shard()))
    process = start_slow(folder, tmp_path / "mark")
    started = started_by(process.pid)
    process.terminate()
    process.terminate()
    time.sleep(2 * stopping.SAME_SECONDS)
    assert process.poll() is None
    process.terminate()
    assert process.wait(timeout=stopping.GRACE_SECONDS / 2) == 75
    assert not left_of(started, stopping.GRACE_SECONDS / 2)


@pytest.mark.long("a trainer, stopped in the midst of a step")
def test_sigterm_within_a_step_ends_two_ranks_and_a_restart_resumes_bit_for_bit(
    tmp_path: Path, make_shard: MakeShard
) -> None:
    plan, recipe = plan_of(make_shard()), recipe_with(checkpoint_every=3)
    straight, stopped = (write_spec(tmp_path / name, plan, recipe, last_step=8) for name in ("straight", "stopped"))
    assert run_trainer(straight, *TORCHRUN)[0] == 0
    process = start_slow(stopped, tmp_path / "mark", *TORCHRUN)
    started = started_by(process.pid)
    process.terminate()
    process.wait(timeout=WITHIN)
    assert len(started) >= 6 and not left_of(started)
    assert (stopped / "exit-75").exists()
    assert run_trainer(stopped, *TORCHRUN)[0] == 0
    assert_same_run(straight, stopped)


def test_sigterm_lets_a_quick_step_finish_and_saves_it(tmp_path: Path, make_shard: MakeShard) -> None:
    counts = {"code": 500, "docs": 200, "chat": 200}
    recipe = recipe_with(checkpoint_every=10)
    folder = write_spec(tmp_path / "segment", plan_of(make_shard(counts=counts)), recipe, last_step=60)
    process = start_trainer(folder)
    wait_for(folder / "checkpoints" / "step-00000010")
    process.terminate()
    _, errors = process.communicate(timeout=WITHIN)
    assert process.returncode == 75 and "error[trainer.stopped_after]" in errors
    assert checkpoints.list_checkpoints(folder / "checkpoints")[-1][0] == records(folder)[-1]["step"] + 1


@pytest.mark.parametrize("launcher", [(), pytest.param(TORCHRUN, marks=pytest.mark.slow("two ranks"))])
def test_sigterm_between_two_segments_prevents_the_second(
    tmp_path: Path, make_shard: MakeShard, launcher: tuple[str, ...]
) -> None:
    """Also while the trainer waits for the second segment's spec."""
    first, second = write_spec(tmp_path / "first", plan_of(make_shard()), last_step=2), tmp_path / "second"
    process = start_trainer([first, second], *launcher, start_new_session=True)
    wait_for(second / "ready")
    started = started_by(process.pid)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=WITHIN)
    assert "error[trainer.stopped_before]" in errors and not left_of(started)
    assert process.returncode == (75 if not launcher else 1) and (first / "result.json").exists()
    assert not (second / "checkpoints").exists()
