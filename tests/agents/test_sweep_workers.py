"""The sweep's workers: real processes, one of them killed; the queue on a simulated clock."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from agents.line_profiler.sweep.crew import MOST_TRIES, Lost, Processes, RayActors, SweepError, measure_on
from agents.line_profiler.sweep.stealing import StealingQueue, busy_share
from tests.support.patience import PATIENCE_S


def slowly(item: tuple[str, int]) -> tuple[int, int]:
    """Leaves a file named for the item and this process; returns (item, this process). Who has item 3 first never ends."""
    folder, number = item
    (Path(folder) / f"{number}-{os.getpid()}").touch()
    time.sleep(PATIENCE_S if number == 3 and len(list(Path(folder).glob("3-*"))) == 1 else 0.02)
    return number, os.getpid()


def deadly(item: tuple[str, int]) -> int:
    folder, number = item
    (Path(folder) / f"{number}-{os.getpid()}").touch()
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def test_a_killed_workers_item_is_done_again(tmp_path: Path) -> None:
    killed: list[int] = []

    def kill_who_has_three() -> None:
        while not killed:
            for path in tmp_path.glob("3-*"):
                killed.append(int(path.name.partition("-")[2]))
                os.kill(killed[0], signal.SIGKILL)
                return
            time.sleep(0.005)

    killer = threading.Thread(target=kill_who_has_three, daemon=True)
    killer.start()
    results = measure_on(Processes(slowly, 2), [(str(tmp_path), n) for n in range(8)], [1.0] * 8)
    killer.join(PATIENCE_S)
    assert [number for number, _ in results] == list(range(8))
    begun = Counter(int(path.name.partition("-")[0]) for path in tmp_path.iterdir())
    assert begun == {n: 2 if n == 3 else 1 for n in range(8)}  # that one twice, nothing else again
    assert killed[0] != results[3][1]
    times = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob(f"*-{killed[0]}")}
    assert max(times.values()) == times[f"3-{killed[0]}"], "nothing came after it"


def test_an_item_that_kills_every_worker_is_given_up(tmp_path: Path) -> None:
    results = measure_on(Processes(deadly, 2), [(str(tmp_path), n) for n in range(3)], [1.0] * 3)
    assert results == [0, Lost(MOST_TRIES), 2]
    assert len(list(tmp_path.glob("1-*"))) == MOST_TRIES


def test_every_item_is_taken_once_and_the_idle_steal() -> None:
    queue = StealingQueue([5.0, 1.0, 1.0, 1.0, 1.0, 1.0], workers=2)
    assert queue.take(0) == 0
    taken = [queue.take(1) for _ in range(5)]
    assert sorted(taken) == [1, 2, 3, 4, 5] and queue.take(1) is None and queue.stolen == 0
    other = StealingQueue([1.0] * 6, workers=3)
    assert sorted(other.take(2) for _ in range(6)) == list(range(6)) and other.stolen == 4  # type: ignore[type-var]
    other.give_back(4)
    assert other.take(0) == 4 and other.take(0) is None


def test_without_stealing_the_simulation_would_show_idleness() -> None:
    assert busy_share([1.0] * 4, [1.0] * 4, workers=4) == 1.0
    assert busy_share([1.0] * 5, [1.0] * 5, workers=4) == pytest.approx(5 / 8)
    wrong = [100.0] + [1.0] * 99  # one estimate is off by a hundred: the others' items are stolen
    assert busy_share([1.0] * 100, wrong, workers=4) == pytest.approx(1.0)


def test_a_queue_keeps_32_workers_busy_with_recorded_durations() -> None:
    recorded = json.loads((Path(__file__).parent / "sweep_durations.json").read_text())
    durations, estimates = recorded["took_s"], recorded["estimated_s"]
    assert len(durations) > 1000 and len(durations) == len(estimates)
    assert busy_share(durations, estimates, workers=32) >= 0.95


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed here")
def test_without_ray_the_error_says_what_to_do() -> None:
    with pytest.raises(SweepError, match="pip install ray"):
        RayActors(slowly, 2, "auto")
