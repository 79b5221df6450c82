"""Stops all processes of a running sandbox from outside, and continues them: what stands still cannot slow down what is timed beside it.

Where this process may make a control group of version 2, the kernel freezes the whole group: nothing inside can delay or undo this, and the code
cannot notice it except by a clock. Elsewhere every process gets SIGSTOP, from init down, until one look finds all threads stopped. Code that does
not want to stand still can escape from signals (a timer that sends SIGCONT). So in both cases the CPU clocks of all threads, in nanoseconds, show at
the end whether anything ran.
Source: kernel documentation, admin-guide/cgroup-v2.rst (cgroup.freeze); signal(7); proc(5).
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from factory.sandbox.cgroup import FREEZE, find_freezer

STOPPED, ENDED = b"Tt", b"ZXx"  # states of a thread in /proc; the first end only with a signal
WAITS = b"D"  # in the kernel: for a disk, a device, or a child of vfork that is stopped itself. Then only the thread's clock shows that it stands
POLL_SECONDS = 0.01


@dataclass(frozen=True)
class FrozenSandbox:
    """A sandbox that was frozen. ``still``: all its processes stood still; else some may run, and it should be thawed."""

    init: int
    still: bool
    group: Path | None  # the control group that froze it; None: signals did
    clocks: dict[int, int]  # CPU nanoseconds of each thread by its number, at the moment when all stood still


def freeze(init_pid: int, seconds: float = 10.0) -> FrozenSandbox:
    """Stop all processes and threads of the sandbox with the init ``init_pid``, and wait at most ``seconds`` until they stand still.

    It can still be killed. Call ``thaw`` afterwards, also when the result is not ``still``. The sandbox's wall clock limit goes on.
    """
    try:
        return _freeze(init_pid, time.monotonic() + seconds)
    except OSError:  # the sandbox ended meanwhile, and its group was removed
        return FrozenSandbox(init_pid, False, None, {})


def _freeze(init_pid: int, deadline: float) -> FrozenSandbox:
    group = find_freezer(init_pid)
    if group is not None and not _holds_tree(group, init_pid):
        group = None  # a process came into the sandbox from outside
    before: dict[int, int] | None = None
    if group is not None:
        (group / FREEZE).write_text("1")
    while True:
        if group is not None:
            stopped = _is_frozen(group)
            clocks = {thread: clock for process in _list_tree(init_pid) for thread, _, clock in _read_threads(process)}
        else:
            stopped, clocks = _stop_all(init_pid)
        still = stopped and clocks == before and bool(clocks)
        if still or not clocks or time.monotonic() > deadline:  # without clocks the sandbox has ended
            return FrozenSandbox(init_pid, still, group, clocks)
        before = clocks
        time.sleep(POLL_SECONDS)


def thaw(frozen: FrozenSandbox) -> float:
    """Continue all processes. Returns the CPU seconds that they used since they stood still: 0.0 unless something ran.

    It is infinite if a thread has ended in the meantime, whose clock cannot be read any more.
    """
    processes = list(_list_tree(frozen.init))  # all: one whose parent ends now is not found again below it
    used = _sum_used_seconds(frozen, processes)
    if frozen.group is not None:
        with contextlib.suppress(OSError):  # the sandbox has ended, and its group was removed
            (frozen.group / FREEZE).write_text("0")
    else:
        for process in processes:
            _send(process, frozen.init, signal.SIGCONT)
    return used


def read_used_seconds(frozen: FrozenSandbox) -> float:
    """Return the CPU seconds that the processes of a frozen sandbox used since they stood still, as ``thaw`` does, without a thaw."""
    return _sum_used_seconds(frozen, _list_tree(frozen.init))


def _sum_used_seconds(frozen: FrozenSandbox, processes: Iterable[int]) -> float:
    clocks = {thread: clock for process in processes for thread, _, clock in _read_threads(process)}
    if frozen.clocks.keys() - clocks.keys():
        return math.inf
    return sum(clock - frozen.clocks.get(thread, 0) for thread, clock in clocks.items()) / 1e9


def _holds_tree(group: Path, init: int) -> bool:
    """Return whether all living processes of the sandbox are in a control group. None can leave it from inside."""
    members = set(map(int, (group / "cgroup.procs").read_text().split()))
    return members >= {process for process in _list_tree(init) if any(_read_threads(process))}


def _is_frozen(group: Path) -> bool:
    return "frozen 1" in (group / "cgroup.events").read_text().splitlines()


def _stop_all(init: int) -> tuple[bool, dict[int, int]]:
    """Send SIGSTOP to each process that is not stopped. Returns whether there was none, and the clocks of all threads.

    A process is stopped before its children are listed, so it cannot have more of them later. An orphan becomes a child of init: the next look
    finds it.
    """
    stopped, clocks = True, dict[int, int]()
    for process in _list_tree(init, stop=True):
        for thread, state, clock in _read_threads(process):
            stopped = stopped and state in STOPPED + WAITS
            clocks[thread] = clock
    return stopped, clocks


def _list_tree(init: int, stop: bool = False) -> Iterator[int]:
    """Yield ``init`` and its descendants, each before its children are listed. ``stop``: each gets SIGSTOP before that unless it is stopped."""
    pending = [init]
    while pending:
        process = pending.pop()
        if stop and any(state not in STOPPED for _, state, _ in _read_threads(process)):
            _send(process, init, signal.SIGSTOP)
        yield process
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for thread in os.listdir(f"/proc/{process}/task"):
                path = f"/proc/{process}/task/{thread}/children"
                with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(path, "rb") as children:
                    pending += map(int, children.read().split())


def _read_threads(process: int) -> Iterator[tuple[int, bytes, int]]:
    """Yield the number, the state and the CPU nanoseconds of each thread of a process, except those that have ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(f"/proc/{process}/task"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                state = _read(process, thread, "stat").rpartition(b")")[2].split()[0]
                if state not in ENDED:
                    yield int(thread), state, int(_read(process, thread, "schedstat").split()[0])


def _read(process: int, thread: str, name: str) -> bytes:
    with open(f"/proc/{process}/task/{thread}/{name}", "rb") as file:
        return file.read()


def _send(process: int, init: int, number: signal.Signals) -> None:
    """Send a signal to a process if it is in the pid namespace of ``init``: its number may be another process's by now."""
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        handle = os.pidfd_open(process)
        with os.fdopen(handle, "rb"):
            if os.readlink(f"/proc/{process}/ns/pid") == os.readlink(f"/proc/{init}/ns/pid"):
                signal.pidfd_send_signal(handle, number)
