"""CPU seconds that a running sandbox has used, read from outside.

Wall time counts what other programs take of the machine; CPU time does not. Read twice, around what is being timed: cheap,
as only the tree's own ``/proc`` entries are read.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field

from factory.sandbox.usage import tree

TICKS = os.sysconf("SC_CLK_TCK")
PROCESS_CLOCK = 2  # CPUCLOCK_SCHED, of the whole process: include/linux/posix-timers.h
ENOUGH = 512  # processes that are looked at


@dataclass(frozen=True)
class Reading:
    """CPU seconds so far: of the whole tree, and of each thread that lives, by its number."""

    tree: float = 0.0
    threads: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class CpuSeconds:
    """Used between two readings. ``thread``: by the thread that used most, which no smaller number of threads makes less."""

    tree: float
    thread: float


def read(init: int) -> Reading:
    """Of ``init`` and everything below it, with the children that these waited for. A child that ended without being waited for is not
    counted: code can hide work that way, so this clock never decides about new code."""
    total, threads = 0.0, {}
    for process in tree(init, ENOUGH)[0]:
        try:
            total += time.clock_gettime((~process << 3) | PROCESS_CLOCK) + _waited_for(process)
            for thread in os.listdir(f"/proc/{process}/task"):
                with open(f"/proc/{process}/task/{thread}/schedstat", "rb") as said:
                    threads[int(thread)] = int(said.read().split()[0]) / 1e9
        except (OSError, IndexError):
            continue  # it ended meanwhile, or the kernel does not say
    return Reading(total, threads)


def between(first: Reading, last: Reading) -> CpuSeconds | None:
    """None where the thread that was busiest before is gone, or nothing could be read: the use is unknown then."""
    if not first.threads or not last.threads or max(first.threads, key=first.threads.__getitem__) not in last.threads:
        return None
    thread = max(seconds - first.threads.get(number, 0.0) for number, seconds in last.threads.items())
    return CpuSeconds(last.tree - first.tree, thread) if last.tree > first.tree and thread > 0 else None


def _waited_for(process: int) -> float:
    """CPU seconds of its children that ended: cutime and cstime of proc(5)."""
    with open(f"/proc/{process}/stat", "rb") as said:
        words = said.read().rpartition(b")")[2].split()
    return (int(words[13]) + int(words[14])) / TICKS
