"""Notices processes that hang.

A trainer hangs when it makes no more steps, because it waits forever for a lost rank, a driver or a lock. Workers of ingest hang when they
finish no more chunks. A tool of live code (an export, an average, a profile) hangs when it uses no processor and writes nothing. The factory kills
such a tool.

The usual time of a step is measured by this process. Before the first step, it is the usual time of earlier segments on this machine.
Time in which the trainer waited for a core does not count, so a busy machine does not look like a hung trainer. A growing checkpoint counts
as progress.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from factory.core.time_formats import format_duration
from factory.ledger.ledger import Ledger, record_event
from factory.ledger.rows import SegmentRow, Subject
from factory.retrying.policy import RetryPolicy
from kernels.contract.message import Message
from trainer.contract import stopping

TRAINER_BEGUN = "trainer_begun"  # event: a trainer made its first step, with the seconds since its start
REMEMBERED = 1000  # number of newest steps whose times are used
STARTS = 20  # number of newest starts of earlier trainers that are used
POLL_SECONDS = 5.0  # between two measurements of a tool's activity


@dataclass(frozen=True)
class UsualDurations:
    """Earlier measurements on this machine, in seconds; None: no measurement."""

    start: float | None = None  # the longest time from a trainer's start to its first step
    step: float | None = None  # the longest mean time of a step of a segment


def find_usual_durations(ledger: Ledger, row: SegmentRow) -> UsualDurations:
    """Return the times of earlier trainers with this recipe on the same kind of machine."""
    machine = _machine(row)
    begun = ledger.read(f"SELECT detail FROM events WHERE kind = '{TRAINER_BEGUN}' ORDER BY id DESC LIMIT {STARTS}")
    starts = [one["detail"]["seconds"] for one in begun if one["detail"]["machine"] == machine]
    steps = [
        one.result["seconds"] / (one.last_step - one.first_step)
        for one in SegmentRow.select(
            ledger, "WHERE state = 'done' AND recipe = :recipe AND kind <> 'average' ORDER BY id", recipe=row.recipe
        )
        if one.result and isinstance(one.result.get("seconds"), int | float) and _machine(one) == machine
    ]
    return UsualDurations(max(starts, default=None), max(steps, default=None))


def record_duration_of_first_step(ledger: Ledger, row: SegmentRow, process: int, seconds: float) -> None:
    """Record that a trainer made its first step."""
    detail = {"process": process, "seconds": seconds, "machine": _machine(row)}
    with ledger.begin() as tx:
        record_event(tx, TRAINER_BEGUN, Subject("segment", row.id), detail)


def _machine(row: SegmentRow) -> str:
    return str(((row.computing or {}).get("machine") or {}).get("name", ""))


class Watchdog:
    """Watches one trainer, or a pool of workers, from its start. Call ``check`` about once a second."""

    def __init__(
        self, policy: RetryPolicy, usual: UsualDurations, process: int, folder: Path, *, starts_often: bool = False, first_counts: bool = False,
        unit: str = "step", clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """``process``: the root of the watched process tree. ``folder``: a folder that grows while a checkpoint is written.

        ``starts_often``: every step may compile, not only the first. ``first_counts``: the first step takes as long as the others. ``unit``: what
        messages call a step.
        """
        self.policy, self.usual, self.process, self.folder = policy, usual, process, folder
        self.starts_often, self.first_counts, self.unit, self.clock = starts_often, first_counts, unit, clock
        self.steps: int | None = None  # number of steps since the start; None: no step yet
        self.idle_seconds = 0.0  # seconds without a step, less the time spent waiting for a core
        self.started = self._looked = self._moved = clock()
        self._took: deque[float] = deque(maxlen=REMEMBERED)
        self._longest = 0.0
        self._waited: dict[int, int] = {}
        self._wrote: tuple[int, int] | None = None

    @property
    def limit_seconds(self) -> float:
        """Seconds without a step after which the process counts as hung."""
        start = max(self.policy.start_seconds, self.policy.hung_times * (self.usual.start or 0.0))
        if self.steps is None:
            return start
        step = self.policy.hung_times * (self.usual_step_seconds or 0.0)
        return max(self.policy.hung_seconds, step, 2 * self._longest, start if self.starts_often else 0.0)

    @property
    def usual_step_seconds(self) -> float | None:
        """The usual time of a step, in seconds."""
        return statistics.median(self._took) if self._took else self.usual.step

    def restart_clock(self) -> None:
        """Start the clock again, because the process had nothing to do since the last check."""
        self._looked = self._moved = self.clock()

    def find_hang(self, steps_made: int) -> str:
        """Compare ``steps_made``, the number since the start, with the last check. Returns '', or a message if the process hangs."""
        now = self.clock()
        passed, self._looked = now - self._looked, now
        if steps_made > (self.steps or 0):
            if self.steps is not None or self.first_counts:
                took = now - self._moved
                made = steps_made - (self.steps or 0)
                self._took.extend([took / made] * min(made, REMEMBERED))
                self._longest = max(self._longest, took)
            self.steps, self.idle_seconds, self._moved, self._wrote = steps_made, 0.0, now, None
            return ""
        self.idle_seconds += max(0.0, passed - self._waited_for_a_core())
        if self.idle_seconds < self.limit_seconds / 2:
            return ""
        wrote = count_files_and_bytes(self.folder)
        if self._wrote is None:
            self._wrote = wrote
        elif wrote != self._wrote:
            self._wrote, self.idle_seconds = wrote, 0.0
        return self._hung() if self.idle_seconds >= self.limit_seconds else ""

    def _hung(self) -> Message:
        return Message(
            "retrying.hung", "there was no {unit} for {idle} ({usual}, the limit is {limit})",
            unit=f"first {self.unit}" if self.steps is None else self.unit, idle=format_duration(self.idle_seconds), seconds=self.idle_seconds,
            usual=f"{self.usual_step_seconds:.3g} s is usual" if self.usual_step_seconds else f"no {self.unit} was timed yet",
            limit=format_duration(self.limit_seconds),
        )  # fmt: skip

    def _waited_for_a_core(self) -> float:
        """Return the longest time, in seconds, that any thread has waited for a core since the last call."""
        found: dict[int, int] = {}
        for process in _tree(self.process):
            with contextlib.suppress(OSError, ValueError, IndexError):
                for thread in os.listdir(f"/proc/{process}/task"):
                    with contextlib.suppress(OSError):  # it ended
                        waits = Path(f"/proc/{process}/task/{thread}/schedstat").read_text().split()[1]
                        found[int(thread)] = int(waits)
        waited = max((found[one] - self._waited.get(one, found[one]) for one in found), default=0)
        self._waited = found
        return waited / 1e9


def _tree(process: int) -> Iterator[int]:
    """Yield a process and all its descendants."""
    yield process
    for child in stopping.list_child_processes(process):
        yield from _tree(child)


def count_files_and_bytes(folder: Path) -> tuple[int, int]:
    """Return (files, bytes) below a folder. Other processes may change the folder meanwhile."""
    files = size = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                size += os.lstat(os.path.join(place, name)).st_size
                files += 1
    return files, size


@contextmanager
def kill_when_idle(process: int, seconds: float) -> Iterator[list[str]]:
    """Kill ``process`` and its descendants after ``seconds`` without activity. Yields a list that gets a message when that happens."""
    over, said = threading.Event(), list[str]()

    def watch() -> None:
        pause, idle_seconds = min(POLL_SECONDS, seconds / 4), 0.0
        before: tuple[int, ...] = ()
        while not over.wait(pause):
            now = measure_process_activity(process)
            idle_seconds, before = idle_seconds + pause if now == before else 0.0, now
            if idle_seconds >= seconds and not over.is_set():
                said.append(
                    Message(
                        "retrying.tool_hung",
                        "the factory killed the process, because for {idle} it used no CPU time and wrote nothing (the limit is hung_seconds)",
                        idle=format_duration(idle_seconds),
                        seconds=idle_seconds,
                    )  # fmt: skip
                )
                stopping.kill_with_descendants([process])
                return

    thread = threading.Thread(target=watch, name="idle timeout", daemon=True)
    thread.start()
    try:
        yield said
    finally:
        over.set()
        thread.join()


def measure_process_activity(process: int) -> tuple[int, ...]:
    """Return (number of processes, processor time in ticks, bytes written) of a process and its descendants."""
    count = ticks = written = 0
    for one in _tree(process):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it ended
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
            count += 1
            lines = Path(f"/proc/{one}/io").read_text().split("\n")
            written += sum(int(line.split()[1]) for line in lines if line.startswith("wchar"))
    return count, ticks, written
