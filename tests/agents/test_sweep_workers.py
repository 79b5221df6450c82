"""The sweep's workers: real processes, one of them killed; the order of the work queue on a simulated clock."""

from __future__ import annotations

import heapq
import importlib.util
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from agents.line_profiler.sweep.work_queue import (
    MOST_TRIES,
    ProcessWorkers,
    RayActors,
    SweepError,
    UnmeasuredItem,
    measure_items_on_workers,
    order_longest_first,
)
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


def test_the_item_of_a_killed_worker_is_measured_again(tmp_path: Path) -> None:
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
    results = measure_items_on_workers(ProcessWorkers(slowly, 2), [(str(tmp_path), n) for n in range(8)], [1.0] * 8)
    killer.join(PATIENCE_S)
    assert [number for number, _ in results] == list(range(8))
    begun = Counter(int(path.name.partition("-")[0]) for path in tmp_path.iterdir())
    assert begun == {n: 2 if n == 3 else 1 for n in range(8)}  # that one twice, nothing else again
    assert killed[0] != results[3][1]
    times = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob(f"*-{killed[0]}")}
    assert max(times.values()) == times[f"3-{killed[0]}"], "nothing came after it"


def test_an_item_that_kills_every_worker_is_given_up(tmp_path: Path) -> None:
    results = measure_items_on_workers(ProcessWorkers(deadly, 2), [(str(tmp_path), n) for n in range(3)], [1.0] * 3)
    assert results == [0, UnmeasuredItem(MOST_TRIES), 2]
    assert len(list(tmp_path.glob("1-*"))) == MOST_TRIES


def fail(item: int) -> int:
    if item == 1:
        raise ArithmeticError(f"item {item}")
    return item


def test_an_item_that_raises_does_not_affect_the_other_items() -> None:
    assert measure_items_on_workers(ProcessWorkers(fail, 2), range(3), [1.0] * 3) == [
        0,
        UnmeasuredItem(1, "ArithmeticError: item 1"),
        2,
    ]


def test_a_sweep_that_is_interrupted_ends_while_an_item_runs(tmp_path: Path) -> None:
    """The first item never ends; the report of the second is interrupted."""

    def interrupt(done: int, of: int) -> None:
        raise KeyboardInterrupt

    folder = tmp_path / "begun"
    folder.mkdir()
    workers = ProcessWorkers(slowly, 2)
    others = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        measure_items_on_workers(workers, [(str(folder), n) for n in (3, 4)], [2.0, 1.0], interrupt)
    for thread in set(threading.enumerate()) - others:
        thread.join(PATIENCE_S / 2)
        assert not thread.is_alive(), f"{thread.name} waits for the item"


def test_progress_is_reported_once_for_each_item() -> None:
    seen: list[tuple[int, int]] = []
    assert measure_items_on_workers(
        ProcessWorkers(abs, 2), [-1, -2, -3], [1.0] * 3, lambda done, of: seen.append((done, of))
    ) == [1, 2, 3]
    assert seen == [(1, 3), (2, 3), (3, 3)]


def busy_share(durations: Sequence[float], estimates: Sequence[float], workers: int) -> float:
    """Share of the workers' time until the last item ends that goes into items, were these their durations."""
    free = [0.0] * workers  # when each is free again
    for item in order_longest_first(estimates):
        heapq.heappush(free, heapq.heappop(free) + durations[item])
    return sum(durations) / (workers * max(free))


def test_the_longest_items_are_started_first() -> None:
    assert order_longest_first([1.0, 5.0, 3.0, 5.0]) == [1, 3, 2, 0]
    assert busy_share([1.0] * 4, [1.0] * 4, workers=4) == 1.0
    assert busy_share([1.0] * 5, [1.0] * 5, workers=4) == pytest.approx(5 / 8)
    known, unknown = [1.0] * 99 + [33.0], [1.0] * 100
    assert busy_share(known, known, workers=4) == 1.0
    assert busy_share(known, unknown, workers=4) < 0.6  # the long one, started last, is what all wait for


def test_a_queue_keeps_32_workers_busy_with_recorded_durations() -> None:
    recorded = json.loads((Path(__file__).parent / "sweep_durations.json").read_text())
    durations, estimates = recorded["took_s"], recorded["estimated_s"]
    assert len(durations) > 1000 and len(durations) == len(estimates)
    assert busy_share(durations, estimates, workers=32) >= 0.95


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed here")
def test_without_ray_the_error_gives_the_remedy() -> None:
    with pytest.raises(SweepError, match="pip install ray"):
        RayActors(slowly, 2, "auto")
