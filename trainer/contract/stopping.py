"""Ends a process on SIGTERM: after the current step and its checkpoint, or when a grace period is over.

A Python signal handler runs only between two bytecodes, and a step may spend a minute in C++. Therefore a thread gets the signal too, through
``signal.set_wakeup_fd``. (The thread could also wait for a blocked signal, but child processes would inherit the blocking.)
The process can end safely at any moment: checkpoints and results are renamed into place when complete, and a resumed run drops torn lines.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import NoReturn

from trainer.contract.errors import EXIT_STOPPED

GRACE_SECONDS = 6.0  # for the current step and the checkpoint after it
SAME_SECONDS = (
    0.25  # signals this close count as one: make, timeout and a terminal pass on a signal that the whole group got
)

_AGAIN = 0  # not the number of a signal: those begin at 1
_AGAIN_SECONDS = 0.01  # the time in which the main thread leaves the callback that swallowed the exception

_asked: list[int] = []  # signals that this process received: a signal between two segments stops the second


def is_stop_requested() -> bool:
    """True if this process received SIGTERM."""
    return bool(_asked)


def end_on_sigterm(seconds: float = GRACE_SECONDS, before_exit: Callable[[], None] = lambda: None) -> None:
    """Handle SIGTERM from now on. The first SIGTERM makes ``is_stop_requested`` true. After ``seconds``, or at a second SIGTERM, all processes that
    this process started are killed, ``before_exit`` is called, and this process ends with exit code 75. Call it from the main thread."""

    def end(number: int) -> NoReturn:
        try:
            kill_with_descendants(list_child_processes(os.getpid()))
            before_exit()
        finally:
            os._exit(EXIT_STOPPED)

    watch_signals((signal.SIGTERM,), seconds, end)
    signal.signal(signal.SIGTERM, lambda number, frame: _asked.append(number))


def end_process(code: int) -> NoReturn:
    """End this process. A rank of torchrun skips Python's own cleanup. There, a thread of gloo that still holds a tensor would abort the process,
    and the segment would fail although its work is done (pytorch/pytorch#179291)."""
    if "RANK" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def watch_signals(numbers: Collection[int], seconds: float, end: Callable[[int], NoReturn]) -> Callable[[], None]:
    """Start a thread that waits for these signals. It calls ``end`` with the first signal, ``seconds`` after it, or when a second signal comes.

    Only signals with a Python handler reach the thread. Call ``watch_signals`` from the main thread. It returns a function that sends the first
    signal to the main thread once more, a moment later: for a handler whose exception was lost. That does not count as a second signal.
    """
    received, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup)
    threading.Thread(target=_wait, args=(received, numbers, seconds, end), name="stopping", daemon=True).start()

    def again() -> None:
        os.write(wakeup, bytes([_AGAIN]))

    return again


def _wait(received: int, numbers: Collection[int], seconds: float, end: Callable[[int], NoReturn]) -> None:
    first, at, sent = 0, math.inf, 0
    main = threading.main_thread().ident or 0
    while True:
        left = max(0.0, at + seconds - time.monotonic()) if first else None
        if not select.select([received], [], [], left)[0]:
            end(first)
        number = os.read(received, 1)[0]
        if number == _AGAIN:
            time.sleep(_AGAIN_SECONDS)
            sent += 1
            signal.pthread_kill(main, first)
        if number not in numbers:
            continue
        if not first:
            first, at = number, time.monotonic()
        elif sent and number == first:
            sent -= 1
        elif time.monotonic() - at >= SAME_SECONDS:
            end(first)


def list_child_processes(process: int) -> list[int]:
    """The ids of a process's children that are not reaped yet."""
    found: list[int] = []
    gone = contextlib.suppress(FileNotFoundError, ProcessLookupError)  # the process, or a thread of it, ended meanwhile
    with gone:
        for thread in os.listdir(f"/proc/{process}/task"):  # each thread lists the processes that it started
            with gone:
                found += map(int, Path(f"/proc/{process}/task/{thread}/children").read_text().split())
    return found


def kill_with_descendants(processes: Iterable[int]) -> None:
    """Kill the processes and all of their descendants. Each one is stopped before its children are listed, so that it cannot start another."""
    found = list(processes)
    for process in found:
        _send(process, signal.SIGSTOP)
        found += list_child_processes(process)
    for process in found:
        _send(process, signal.SIGKILL)


def _send(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)
