"""The watchdog decides when a trainer counts as hung. The test controls the clock; processes, files and segments are real."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from factory.ledger.ledger import Ledger
from factory.ledger.rows import SegmentRow
from factory.retrying.policy import RetryPolicy
from factory.retrying.watchdog import UsualDurations, Watchdog, find_usual_durations, record_duration_of_first_step
from tests.support.failing.deaths import plan_row
from tests.support.messages import codes

NOBODY = 1 << 30
POLICY = RetryPolicy(hung_times=10.0, hung_seconds=30.0, start_seconds=1000.0)


@contextmanager
def process(program: str) -> Iterator[int]:
    started = subprocess.Popen([sys.executable, "-c", f"print('ready', flush=True)\n{program}"], stdout=subprocess.PIPE)
    assert started.stdout is not None and started.stdout.readline() == b"ready\n"
    try:
        yield started.pid
    finally:
        started.kill()
        started.communicate()


class Watched:
    """A watchdog with the test's clock, by default of a process that does not exist and so waits for no core."""

    def __init__(self, folder: Path, usual: UsualDurations = UsualDurations(), pid: int = NOBODY, **how: bool) -> None:  # noqa: B008 - frozen
        self.now = 0.0
        self.dog = Watchdog(POLICY, usual, pid, folder, clock=lambda: self.now, **how)

    def after(self, seconds: float, steps: int) -> str:
        self.now += seconds
        return self.dog.find_hang(steps)


def test_a_trainer_hangs_after_ten_times_the_usual_time_without_a_step(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    assert watched.after(900, 0) == "" and watched.after(90, 1) == "", "the start takes longer"
    assert watched.dog.limit_seconds == 30, "no step was timed yet"
    for step in range(2, 12):
        assert watched.after(7.0, step) == ""
    assert (watched.dog.usual_step_seconds, watched.dog.limit_seconds) == (7.0, 70.0)
    assert watched.after(65, 11) == ""
    assert watched.after(4.9, 11) == ""
    said = watched.after(0.2, 11)
    assert codes([said]) == ["retrying.hung"] and "no step for 70 s" in said
    assert said.data["usual"] == "7 s is usual" and said.data["limit"] == "70 s"  # type: ignore[attr-defined]


def test_the_limit_follows_from_the_mean_step_and_the_longest_gap_between_two_checks(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.after(1, 3)
    watched.after(2, 23)
    assert watched.dog.usual_step_seconds == pytest.approx(0.1) and watched.dog.limit_seconds == 30.0
    watched.after(29, 24)  # a checkpoint, say: the next one may take as long
    assert watched.dog.limit_seconds == 58.0


def test_the_limit_before_the_first_step_follows_from_earlier_starts(tmp_path: Path) -> None:
    assert Watched(tmp_path).dog.limit_seconds == 1000
    watched = Watched(tmp_path, UsualDurations(start=200.0, step=40.0))
    assert watched.after(1999, 0) == ""
    said = watched.after(2, 0)
    assert codes([said]) == ["retrying.hung"] and "no first step for 33 min" in said
    assert said.data["usual"] == "40 s is usual" and said.data["limit"] == "33 min"  # type: ignore[attr-defined]
    assert Watched(tmp_path, starts_often=True).after(999, 5) == ""
    began = Watched(tmp_path, UsualDurations(start=1.0, step=40.0))
    began.after(3, 1)
    assert began.dog.limit_seconds == 400, "the usual step of earlier segments, until its own are timed"
    often = Watched(tmp_path, starts_often=True)
    often.after(3, 1)
    assert often.dog.limit_seconds == 1000, "each of several runs may compile"


def test_a_trainer_whose_checkpoint_grows_does_not_count_as_hung(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.after(1, 1)
    for size in range(1, 20):
        (tmp_path / "checkpoint").write_bytes(b"x" * size)
        assert watched.after(16, 1) == ""
    assert watched.after(16, 1) == "" and watched.after(16, 1) != ""


def test_time_spent_waiting_for_a_core_does_not_count_as_idle(tmp_path: Path) -> None:
    """Two computing programs share one core, so each waits about as long as it runs. A sleeping program does not wait."""
    core = {min(os.sched_getaffinity(0))}
    spin = f"import os\nos.sched_setaffinity(0, {core})\nwhile True: pass"
    with process(spin), process(spin) as busy, process("import time\ntime.sleep(600)") as asleep:
        found = [Watched(tmp_path, pid=pid) for pid in (busy, asleep)]
        assert [one.dog._waited_for_a_core() for one in found] == [0.0, 0.0], "what was before is none of the trainer's"
        ran = waited = slept = 0.0
        before = cpu_seconds(busy)
        while ran < 0.4:
            time.sleep(0.02)
            ran = cpu_seconds(busy) - before
            waited += found[0].dog._waited_for_a_core()
            slept += found[1].dog._waited_for_a_core()
    assert waited > 0.08 and slept < 0.1 * waited


def cpu_seconds(process: int) -> float:
    return int(Path(f"/proc/{process}/schedstat").read_text().split()[0]) / 1e9


def test_a_stopped_or_dead_trainer_counts_as_hung(tmp_path: Path) -> None:
    with process("import time\ntime.sleep(600)") as pid:
        os.kill(pid, signal.SIGSTOP)
        watched = Watched(tmp_path, pid=pid)
        watched.after(1, 1)
        assert watched.after(29, 1) == "" and watched.after(2, 1) != ""
    gone = Watched(tmp_path, pid=pid)
    gone.after(1, 1)
    assert gone.after(31, 1) != ""


def test_usual_times_are_measured_on_this_kind_of_machine_with_the_same_recipe(ledger: Ledger) -> None:
    def row(machine: str, recipe: str = "r", seconds: float | None = None, steps: int = 10) -> SegmentRow:
        result = None if seconds is None else {"seconds": seconds}
        return plan_row(
            ledger, state="done" if result else "planned", recipe=recipe, last_step=steps, result=result,
            computing={"machine": {"name": machine}},
        )  # fmt: skip

    assert find_usual_durations(ledger, row("cpu")) == UsualDurations(None, None)
    for machine, recipe, seconds in (
        ("cpu", "r", 20.0),
        ("cpu", "r", 40.0),
        ("gpu", "r", 900.0),
        ("cpu", "other", 900.0),
    ):
        row(machine, recipe, seconds)
    for machine, seconds in (("cpu", 12.0), ("cpu", 70.0), ("gpu", 700.0)):
        record_duration_of_first_step(ledger, row(machine), 1, seconds)
    assert find_usual_durations(ledger, row("cpu")) == UsualDurations(70.0, 4.0)
    assert find_usual_durations(ledger, row("gpu")) == UsualDurations(700.0, 90.0)
