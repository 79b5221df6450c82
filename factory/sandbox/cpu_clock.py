"""Reads, from outside, the CPU seconds that a running sandbox has used.

Wall time depends on other programs on the machine; CPU time does not. A reading is taken before and after the timed work. It is cheap, because it
reads only the ``/proc`` entries of the sandbox's processes.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field

from factory.sandbox.usage import read_process_tree

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
PROCESS_CLOCK = 2  # CPUCLOCK_SCHED of a whole process: include/linux/posix-timers.h
ENOUGH = 512  # most processes that a reading covers


@dataclass(frozen=True)
class CpuReading:
    """CPU seconds at one moment: of the whole process tree, and of each living thread by its number."""

    tree: float = 0.0
    threads: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class UsedCpuSeconds:
    """CPU seconds between two readings: of the tree, and of the busiest thread. Using fewer threads cannot lower the second number."""

    tree: float
    thread: float


def read_cpu_seconds(init_pid: int) -> CpuReading:
    """Read the CPU seconds of ``init_pid`` and all its descendants, and of ended children for which their parent called wait.

    An ended child without a wait is not counted. Code can hide work in this way, so no decision about new code depends on this clock.
    """
    total, threads = 0.0, {}
    for process in read_process_tree(init_pid, ENOUGH).processes:
        try:
            total += time.clock_gettime((~process << 3) | PROCESS_CLOCK) + _waited_for(process)
            for thread in os.listdir(f"/proc/{process}/task"):
                with open(f"/proc/{process}/task/{thread}/schedstat", "rb") as said:
                    threads[int(thread)] = int(said.read().split()[0]) / 1e9
        except (OSError, IndexError):
            continue  # the process ended, or the kernel does not give the number
    return CpuReading(total, threads)


def compute_cpu_seconds_between(first: CpuReading, last: CpuReading) -> UsedCpuSeconds | None:
    """Return the CPU seconds between two readings; None if a reading failed or the busiest thread has ended."""
    if not first.threads or not last.threads or max(first.threads, key=first.threads.__getitem__) not in last.threads:
        return None
    thread = max(seconds - first.threads.get(number, 0.0) for number, seconds in last.threads.items())
    return UsedCpuSeconds(last.tree - first.tree, thread) if last.tree > first.tree and thread > 0 else None


def _waited_for(process: int) -> float:
    """Return the CPU seconds of a process's waited-for children: cutime + cstime of proc(5)."""
    with open(f"/proc/{process}/stat", "rb") as said:
        words = said.read().rpartition(b")")[2].split()
    return (int(words[13]) + int(words[14])) / TICKS_PER_SECOND
