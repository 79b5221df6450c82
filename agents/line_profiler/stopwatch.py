"""Times each operation of a step, by a dispatch mode that only reads the clock.

A dispatch mode makes each operation cross into Python and back, which takes some microseconds. The cost of a crossing is
measured on a separate run, the recipe's step over tensors so small that crossings are a large part of it, and subtracted
from each operation. The profiled step is not used for that, so that comparing its time with the sum of its lines stays a test.

A mode that does more than read the clock cannot be corrected this way: it changes the caches, which slows the next operation.

On a GPU the clock is the device's: an event before and after each operation, read once the step is over. The time between two operations is
the time in which the device waited for its host. A crossing adds to that time only.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from agents.line_profiler.capture import RecordedOperation
from agents.line_profiler.compiled import CompiledGraphs

CONFIRMED, ALIKE = 5, 1.03  # the fastest step counts when five steps lie within 3 % of it
SETTLING_S = 2.0  # the longest wait for a quiet machine
BURST = 10  # operations


@dataclass(frozen=True)
class TimedOperation:
    """The times of one operation, in seconds, as the stopwatch measured them."""

    operation: str
    gap: float  # since the operation before it ended
    seconds: float
    after: float = 0.0  # for the last operation, until the step ended


class HostClock:
    """The host's clock: an operation is over when it returns."""

    def record_mark(self) -> Any:
        return time.perf_counter()

    def convert_marks_to_seconds(self, marks: Sequence[Any]) -> list[float]:
        """The seconds of each mark since one common moment."""
        return list(marks)


class DeviceClock(HostClock):
    """A GPU's clock: a mark is an event in its stream."""

    def record_mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def convert_marks_to_seconds(self, marks: Sequence[Any]) -> list[float]:
        torch.cuda.synchronize()
        return [marks[0].elapsed_time(mark) / 1e3 for mark in marks]


def make_clock(device: torch.device) -> HostClock:
    return DeviceClock() if device.type == "cuda" else HostClock()


class Stopwatch(TorchDispatchMode):
    """Times every operation between ``__enter__`` and ``__exit__``, on the thread that entered."""

    def __init__(self, clock: HostClock | None = None) -> None:
        super().__init__()
        self.clock = clock or HostClock()
        self._marks: list[Any] = []  # the beginning, two of each operation, the end
        self._seen: list[Any] = []

    def __enter__(self) -> Stopwatch:
        self._marks.append(self.clock.record_mark())
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: Any) -> None:
        self._marks.append(self.clock.record_mark())
        super().__exit__(*error)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: compiled code stays compiled while this mode is active."""
        return True

    def time_kernel(self, name: str, kernel: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a generated kernel, which no dispatch mode sees, and time it."""
        began = self.clock.record_mark()
        out = kernel(*args, **kwargs)
        self._marks += (began, self.clock.record_mark())
        self._seen.append(name)
        return out

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        began = self.clock.record_mark()
        out = func(*args, **(kwargs or {}))
        self._marks += (began, self.clock.record_mark())
        self._seen.append(func)
        return out

    def list_timed_operations(self) -> list[TimedOperation]:
        first, *times, last = self.clock.convert_marks_to_seconds(self._marks)
        begins, ends = times[::2], [first, *times[1::2]]
        made = [
            TimedOperation(str(func), began - before, ended - began)
            for func, began, ended, before in zip(self._seen, begins, ends[1:], ends)
        ]
        made[-1:] = [replace(lap, after=last - ends[-1]) for lap in made[-1:]]
        return made


def time_operations(
    step: Callable[[], object], clock: HostClock | None = None, graphs: CompiledGraphs | None = None
) -> list[TimedOperation]:
    """Run a step under the stopwatch. Returns its operations. ``graphs``: its compiled code, if it has some."""
    with Stopwatch(clock) as watch, graphs.watched_by(watch.time_kernel) if graphs else nullcontext():
        step()
    return watch.list_timed_operations()


def keep_fastest_times(steps: Sequence[Sequence[TimedOperation]]) -> list[TimedOperation]:
    """The operations of a step that was timed several times, each with its fastest times: other programs only add time, and they rarely leave a
    whole step alone. Steps that ran other operations than most are left out.

    >>> [lap.seconds for lap in keep_fastest_times([[TimedOperation("a", 0, 2), TimedOperation("b", 0, 1)],
    ...                                             [TimedOperation("a", 0, 1), TimedOperation("b", 0, 3)]])]
    [1, 1]
    """
    names = [tuple(lap.operation for lap in step) for step in steps]
    usual = max(names, key=names.count)
    alike = [step for step, found in zip(steps, names) if found == usual]
    return [
        TimedOperation(
            laps[0].operation,
            min(lap.gap for lap in laps),
            min(lap.seconds for lap in laps),
            min(lap.after for lap in laps),
        )
        for laps in zip(*alike)
    ]


def make_progress_reporter(report: Callable[[str], None], what: str) -> Callable[[int, int], None]:
    """A function of (number done, number of all) that reports ``what`` and the numbers, at most every two seconds and at the end."""
    last = time.perf_counter()

    def heard(done: int, of: int) -> None:
        nonlocal last
        if done == of or time.perf_counter() - last > 2.0:
            last = time.perf_counter()
            report(f"{what}{done}/{of}")

    return heard


def add_up_seconds(laps: Sequence[TimedOperation]) -> float:
    """Seconds of the whole step."""
    return sum(lap.gap + lap.seconds + lap.after for lap in laps)


def is_fastest_time_confirmed(times: Sequence[float], largest_ratio: float = ALIKE) -> bool:
    """True if enough other times lie near the fastest."""
    return len(times) >= CONFIRMED and sorted(times)[CONFIRMED - 1] <= largest_ratio * min(times)


def measure_stopwatch_overhead(step: Callable[[], object], repeats: int = 80) -> float:
    """Seconds that the stopwatch adds to an operation: the fastest step with it minus the fastest step without it, for each operation.

    ``repeats`` steps of each kind run. On a busy machine more run, until both fastest times are confirmed or ``SETTLING_S`` is over.
    """
    plain: list[float] = []
    watched: list[float] = []
    operations = 1
    with pause_garbage_collection():
        ends = time.perf_counter() + SETTLING_S
        while len(plain) < repeats or (
            time.perf_counter() < ends and not (is_fastest_time_confirmed(plain) and is_fastest_time_confirmed(watched))
        ):
            began = time.perf_counter()
            step()
            plain.append(time.perf_counter() - began)
            seen = time_operations(step)
            watched.append(add_up_seconds(seen))
            operations = len(seen)
    return max(0.0, (min(watched) - min(plain)) / operations)


def measure_least_overhead(bursts: int = 300) -> float:
    """Seconds that the stopwatch adds to the simplest operation, measured in bursts of some twenty microseconds. They end before another program gets
    the core, so the fastest burst holds on a busy machine too, where the fastest whole step does not."""
    x = torch.ones(3)

    def burst() -> None:
        for _ in range(BURST):
            x + x

    plain, watched = [], []
    with pause_garbage_collection():
        for _ in range(bursts):
            began = time.perf_counter()
            burst()
            plain.append(time.perf_counter() - began)
            watched.append(add_up_seconds(time_operations(burst)))
    return max(0.0, (min(watched) - min(plain)) / BURST)


def replace_recorded_times(
    events: Sequence[RecordedOperation], laps: Sequence[TimedOperation], overhead_s: float, on_host: bool = True
) -> list[RecordedOperation]:
    """The events with the times of ``laps``, which are the same step's. Each lap is reduced by one crossing (``overhead_s``): first the gap
    before the operation, then the operation's own time; the rest is taken from the next lap. The time after the last operation counts for that
    operation's line. If not ``on_host``, the times are a device's, where a crossing lengthens only the gaps."""
    assert [event.operation for event in events] == [lap.operation for lap in laps], "not the same step"
    found, owed = [], 0.0
    for event, lap in zip(events, laps):
        owed += overhead_s
        host, owed = max(0.0, lap.gap - owed), max(0.0, owed - lap.gap)
        if on_host:
            seconds, owed = max(0.0, lap.seconds - owed), max(0.0, owed - lap.seconds)
        else:
            seconds, owed = lap.seconds, 0.0
        found.append(replace(event, host_s=host + lap.after, seconds=seconds))
    return found


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Switch off Python's garbage collector, whose time would count for the line that it interrupts."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
