"""Notices what hangs: a trainer that makes no more steps (it waits for a rank that is gone, a driver, a lock, for ever), and workers of ingest that
make no more chunks; a tool of live code (an export, an average, a profile) that uses no processor and writes nothing, which is ended.

How long a step takes is measured: by this process's own clock, from the steps themselves, and before the first from this machine's
earlier segments. Time in which the trainer wanted to run and got no core does not count, so that a busy machine is not taken for
a hung trainer; a checkpoint that grows is a sign of life.
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

from factory.core.moments import span
from factory.ledger.ledger import Ledger, record
from factory.ledger.rows import SegmentRow, Subject
from factory.retrying.policy import RetryPolicy
from trainer.contract import stopping

BEGUN = "trainer_begun"  # event: a trainer made its first step, so many seconds after it was started
REMEMBERED = 1000  # steps whose time is
STARTS = 20  # of earlier trainers
POLL_SECONDS = 5.0  # between two looks at a tool


@dataclass(frozen=True)
class UsualTimes:
    """What was measured here before. Seconds; None: nothing was."""

    start: float | None = None  # the longest time from a trainer's start to its first step
    step: float | None = None


def usual_of(ledger: Ledger, row: SegmentRow) -> UsualTimes:
    """Of earlier trainers with this recipe's model on this kind of machine."""
    machine = _machine(row)
    begun = ledger.read(f"SELECT detail FROM events WHERE kind = '{BEGUN}' ORDER BY id DESC LIMIT {STARTS}")
    starts = [one["detail"]["seconds"] for one in begun if one["detail"]["machine"] == machine]
    steps = [
        one.result["seconds"] / (one.last_step - one.first_step)
        for one in SegmentRow.select(
            ledger, "WHERE state = 'done' AND recipe = :recipe AND kind <> 'average' ORDER BY id", recipe=row.recipe
        )
        if one.result and isinstance(one.result.get("seconds"), int | float) and _machine(one) == machine
    ]
    return UsualTimes(max(starts, default=None), max(steps, default=None))


def record_begun(ledger: Ledger, row: SegmentRow, process: int, seconds: float) -> None:
    """Write down that a trainer made its first step."""
    detail = {"process": process, "seconds": seconds, "machine": _machine(row)}
    with ledger.begin() as tx:
        record(tx, BEGUN, Subject("segment", row.id), detail)


def _machine(row: SegmentRow) -> str:
    return str(((row.computing or {}).get("machine") or {}).get("name", ""))


class Watchdog:
    """Of one trainer, or a pool of workers, that was just started. ``look`` is called every second or so."""

    def __init__(
        self, policy: RetryPolicy, usual: UsualTimes, process: int, folder: Path, *, starts_often: bool = False, first_counts: bool = False,
        unit: str = "step", clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """process: whose tree it is. folder: what grows while it writes a checkpoint. starts_often: any step may compile, not only
        the first. first_counts: the first step takes what others take. unit: what a step is called."""
        self.policy, self.usual, self.process, self.folder = policy, usual, process, folder
        self.starts_often, self.first_counts, self.unit, self.clock = starts_often, first_counts, unit, clock
        self.steps: int | None = None  # made since the start, as told; None: none yet
        self.idle_seconds = 0.0  # seconds without a step in which it could have run
        self.started = self._looked = self._moved = clock()
        self._took: deque[float] = deque(maxlen=REMEMBERED)
        self._longest = 0.0
        self._waited: dict[int, int] = {}
        self._wrote: tuple[int, int] | None = None

    @property
    def limit(self) -> float:
        """Seconds without a step after which it counts as hung."""
        start = max(self.policy.start_seconds, self.policy.hung_times * (self.usual.start or 0.0))
        if self.steps is None:
            return start
        step = self.policy.hung_times * (self.step or 0.0)
        return max(self.policy.hung_seconds, step, 2 * self._longest, start if self.starts_often else 0.0)

    @property
    def step(self) -> float | None:
        """The usual time of a step, in seconds."""
        return statistics.median(self._took) if self._took else self.usual.step

    def begin(self) -> None:
        """Nothing was to be done since the last look: that time does not count."""
        self._looked = self._moved = self.clock()

    def look(self, steps: int) -> str:
        """steps: how many are done since the start. Returns '' or, of one that hung, what it did, for a person."""
        now = self.clock()
        passed, self._looked = now - self._looked, now
        if steps > (self.steps or 0):
            if self.steps is not None or self.first_counts:
                took = now - self._moved
                made = steps - (self.steps or 0)
                self._took.extend([took / made] * min(made, REMEMBERED))
                self._longest = max(self._longest, took)
            self.steps, self.idle_seconds, self._moved, self._wrote = steps, 0.0, now, None
            return ""
        self.idle_seconds += max(0.0, passed - self._waited_for_a_core())
        if self.idle_seconds < self.limit / 2:
            return ""
        wrote = size_of(self.folder)
        if self._wrote is None:
            self._wrote = wrote
        elif wrote != self._wrote:
            self._wrote, self.idle_seconds = wrote, 0.0
        return self._hung() if self.idle_seconds >= self.limit else ""

    def _hung(self) -> str:
        usual = f"{self.step:.3g} s is usual" if self.step else "none was timed yet"
        what = f"no first {self.unit}" if self.steps is None else f"no {self.unit}"
        return f"{what} for {span(self.idle_seconds)} ({usual}, the limit is {span(self.limit)})"

    def _waited_for_a_core(self) -> float:
        """Seconds that the thread which waited longest waited for one, since the last call."""
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
    """A process and all that it started."""
    yield process
    for child in stopping.children(process):
        yield from _tree(child)


def size_of(folder: Path) -> tuple[int, int]:
    """(files, bytes) below a folder, whatever else happens there."""
    files = size = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                size += os.lstat(os.path.join(place, name)).st_size
                files += 1
    return files, size


@contextmanager
def idle_timeout(process: int, seconds: float) -> Iterator[list[str]]:
    """Kill ``process`` and all that it started once they did nothing for so many seconds. Yields a list: what is in it then says so."""
    over, said = threading.Event(), list[str]()

    def watch() -> None:
        pause, idle_seconds = min(POLL_SECONDS, seconds / 4), 0.0
        before: tuple[int, ...] = ()
        while not over.wait(pause):
            now = activity(process)
            idle_seconds, before = idle_seconds + pause if now == before else 0.0, now
            if idle_seconds >= seconds and not over.is_set():
                said.append(f"killed: it used no processor and wrote nothing for {span(idle_seconds)} (hung_seconds)")
                stopping.kill([process])
                return

    thread = threading.Thread(target=watch, name="idle timeout", daemon=True)
    thread.start()
    try:
        yield said
    finally:
        over.set()
        thread.join()


def activity(process: int) -> tuple[int, ...]:
    """(number of processes, processor time in ticks, bytes written) of a process and all that it started."""
    count = ticks = written = 0
    for one in _tree(process):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it ended
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
            count += 1
            lines = Path(f"/proc/{one}/io").read_text().split("\n")
            written += sum(int(line.split()[1]) for line in lines if line.startswith("wchar"))
    return count, ticks, written
