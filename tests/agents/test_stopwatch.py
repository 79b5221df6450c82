"""The readings of the stopwatch, and how the time that the stopwatch itself adds is subtracted from them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from agents.line_profiler import stopwatch
from agents.line_profiler.capture import RecordedOperation
from agents.line_profiler.session import RepeatedStepTimings
from agents.line_profiler.stopwatch import (
    TimedOperation,
    add_up_seconds,
    measure_stopwatch_overhead,
    replace_recorded_times,
    time_operations,
)

ADD, MUL = "aten.add.Tensor", "aten.mul.Tensor"


def _event(operation: str) -> RecordedOperation:
    return RecordedOperation(("trainer/run.py", 1, ""), "", False, operation, 9.0, 9.0, 0.0, 0.0, (), (), None)


def test_time_between_operations_is_not_counted_for_an_operation() -> None:
    x = torch.ones(3)

    def step() -> None:
        time.sleep(0.02)
        x + x
        time.sleep(0.04)
        x * x
        time.sleep(0.06)

    began = time.perf_counter()
    seen = time_operations(step)
    whole = time.perf_counter() - began
    assert [lap.operation for lap in seen] == [ADD, MUL]
    assert seen[0].gap >= 0.02 and seen[1].gap >= 0.04 and seen[1].after >= 0.06 and seen[0].after == 0.0
    assert add_up_seconds(seen) <= whole and all(lap.seconds > 0 for lap in seen)


def test_a_crossing_is_subtracted_from_the_gap_then_from_the_operation_then_from_the_next() -> None:
    seen = [
        TimedOperation(ADD, 5.0, 3.0),
        TimedOperation(MUL, 1.0, 3.0),
        TimedOperation(ADD, 0.5, 0.5),
        TimedOperation(MUL, 5.0, 1.0, after=7.0),
    ]
    events = replace_recorded_times([_event(lap.operation) for lap in seen], seen, 2.0)
    assert [(event.host_s, event.seconds) for event in events] == [(3.0, 3.0), (0.0, 2.0), (0.0, 0.0), (9.0, 1.0)]
    assert sum(event.host_s + event.seconds for event in events) == add_up_seconds(seen) - 4 * 2.0


def test_with_a_devices_clock_a_crossing_is_subtracted_only_from_gaps() -> None:
    """Its marks are read when the step is over."""
    log: list[str] = []

    class Device(stopwatch.HostClock):
        def record_mark(self) -> int:
            log.append("mark")
            return log.count("mark")

        def convert_marks_to_seconds(self, marks: Sequence[int]) -> list[float]:
            log.append("read")
            return [0.0, 5.0, 8.0, 8.5, 11.5, 20.0][: len(marks)]

    x = torch.ones(3)
    seen = time_operations(lambda: (x + x, x * x), Device())
    assert log == ["mark"] * 6 + ["read"]
    assert (
        seen == [TimedOperation(ADD, 5.0, 3.0), TimedOperation(MUL, 0.5, 3.0, after=8.5)]
        and add_up_seconds(seen) == 20.0
    )
    events = replace_recorded_times([_event(lap.operation) for lap in seen], seen, 2.0, on_host=False)
    assert [(event.host_s, event.seconds) for event in events] == [(3.0, 3.0), (8.5, 3.0)]


def test_times_of_another_step_are_refused() -> None:
    with pytest.raises(AssertionError, match="not the same step"):
        replace_recorded_times([_event(ADD)], [TimedOperation(MUL, 1.0, 1.0)], 0.0)
    with pytest.raises(AssertionError, match="not the same step"):
        replace_recorded_times([_event(ADD)], [], 0.0)


def test_a_crossing_is_the_time_that_the_stopwatch_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation of 5 ms that a stopwatch makes 2 ms longer, by a clock that only it moves: it comes from a tensor type
    that notices being watched."""
    now = [0.0]
    monkeypatch.setattr(stopwatch, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    class Slow(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            now[0] += 0.005 + (0.002 if torch._C._len_torch_dispatch_stack() else 0.0)
            return super().__torch_function__(func, types, args, kwargs or {})

    x: Tensor = torch.ones(3).as_subclass(Slow)

    def step() -> None:
        for _ in range(10):
            x + x

    assert measure_stopwatch_overhead(step, repeats=5) == pytest.approx(0.002)


def test_the_fastest_step_is_confirmed_if_four_other_steps_are_near() -> None:
    watched = lambda *seconds: [[TimedOperation(ADD, 0.0, each)] for each in seconds]
    near, far = (1.0, 1.02, 1.01, 5.0, 1.0, 1.02), (1.0, 1.2, 1.3, 1.01, 1.0, 1.02)
    assert RepeatedStepTimings(list(near), watched(*near), list(near)).is_fastest_step_confirmed()
    assert not RepeatedStepTimings(list(far), watched(*near), list(near)).is_fastest_step_confirmed()
    assert not RepeatedStepTimings(list(near), watched(*far), list(near)).is_fastest_step_confirmed()
    assert not RepeatedStepTimings(list(near), watched(*near), list(far)).is_fastest_step_confirmed()
    assert not RepeatedStepTimings([1.0, 1.0], watched(1.0, 1.0), [1.0, 1.0]).is_fastest_step_confirmed()
