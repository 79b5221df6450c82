"""How long each operation of a step takes: a dispatch mode that only reads the clock.

A dispatch mode makes each operation cross into Python and back, which takes some microseconds. The cost of a crossing is
measured on a separate run, the recipe's step over tensors so small that crossings are a large part of it, and subtracted
from each operation. The profiled step is not used for that, so that comparing its time with the sum of its lines stays a test.

A mode that does more than read the clock cannot be corrected so: what it leaves in the caches slows the next operation.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from agents.line_profiler.capture import Event

CONFIRMED, ALIKE = 5, 1.03  # the fastest step counts when five steps lie within 3 % of it
SETTLING_S = 2.0  # the longest wait for a quiet machine


@dataclass(frozen=True)
class Lap:
    """One operation. Seconds, as the stopwatch saw them."""

    operation: str
    gap: float  # since the one before it ended
    seconds: float
    after: float = 0.0  # of the last one: until the step ended


class Stopwatch(TorchDispatchMode):
    """Laps of every operation between ``__enter__`` and ``__exit__``, on the thread that entered."""

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.synchronize = synchronize
        self._began = self._ended = 0.0
        self._seen: list[tuple[Any, float, float]] = []

    def __enter__(self) -> Stopwatch:
        self._began = time.perf_counter()
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: Any) -> None:
        self._ended = time.perf_counter()
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        began = time.perf_counter()
        out = func(*args, **(kwargs or {}))
        if self.synchronize:
            self.synchronize()
        self._seen.append((func, began, time.perf_counter()))
        return out

    def laps(self) -> list[Lap]:
        ends = [self._began, *(ended for _, _, ended in self._seen)]
        made = [Lap(str(func), began - before, ended - began) for (func, began, ended), before in zip(self._seen, ends)]
        made[-1:] = [replace(last, after=self._ended - ends[-1]) for last in made[-1:]]
        return made


def laps(step: Callable[[], object], synchronize: Callable[[], None] | None = None) -> list[Lap]:
    """The operations of a step."""
    with Stopwatch(synchronize) as watch:
        step()
    return watch.laps()


def counted(report: Callable[[str], None], what: str) -> Callable[[int, int], None]:
    """A function of (done, of all) that reports ``what`` and the numbers, at most every two seconds and at the end."""
    last = time.perf_counter()

    def heard(done: int, of: int) -> None:
        nonlocal last
        if done == of or time.perf_counter() - last > 2.0:
            last = time.perf_counter()
            report(f"{what}{done}/{of}")

    return heard


def total(laps: Sequence[Lap]) -> float:
    """Seconds of the whole step."""
    return sum(lap.gap + lap.seconds + lap.after for lap in laps)


def settled(times: Sequence[float], alike: float = ALIKE) -> bool:
    """Do enough other times lie near the fastest?"""
    return len(times) >= CONFIRMED and sorted(times)[CONFIRMED - 1] <= alike * min(times)


def crossing(step: Callable[[], object], turns: int = 80) -> float:
    """Seconds that the stopwatch adds to an operation: of ``turns`` steps, the fastest watched minus the fastest unwatched.

    On a busy machine there are more steps, until both are settled or the time for that is spent.
    """
    plain: list[float] = []
    watched: list[float] = []
    operations = 1
    with no_collector():
        ends = time.perf_counter() + SETTLING_S
        while len(plain) < turns or (time.perf_counter() < ends and not (settled(plain) and settled(watched))):
            began = time.perf_counter()
            step()
            plain.append(time.perf_counter() - began)
            seen = laps(step)
            watched.append(total(seen))
            operations = len(seen)
    return max(0.0, (min(watched) - min(plain)) / operations)


def timed(events: Sequence[Event], laps: Sequence[Lap], crossing_s: float) -> list[Event]:
    """The events with the times of the same step's laps, each reduced by one crossing: from the gap before the operation
    first, then from the operation; what exceeds both is taken from the next. What Python does after the last operation
    counts for that operation's line."""
    assert [event.operation for event in events] == [lap.operation for lap in laps], "not the same step"
    found, owed = [], 0.0
    for event, lap in zip(events, laps):
        owed += crossing_s
        host, owed = max(0.0, lap.gap - owed), max(0.0, owed - lap.gap)
        seconds, owed = max(0.0, lap.seconds - owed), max(0.0, owed - lap.seconds)
        found.append(replace(event, host_s=host + lap.after, seconds=seconds))
    return found


@contextmanager
def no_collector() -> Iterator[None]:
    """Switch off Python's garbage collector, whose time would count for the line that it interrupts."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
