"""How a command of the factory ends at SIGTERM, Ctrl-C or a terminal that is closed (SIGHUP).

Within ten seconds, at a second signal at once, and nothing outlives it.

The main thread unwinds: ``finally`` blocks stop what they started, and a trainer gets the time to write a checkpoint. What
takes longer, and what other threads started, is killed. That loses nothing: a factory killed at any instruction goes on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from trainer.contract import stopping
from trainer.contract.stopping import GRACE_SECONDS

TRAINER_SECONDS = GRACE_SECONDS + 2.0  # within which a trainer that got a SIGTERM has ended
UNWIND_SECONDS = TRAINER_SECONDS + 1.0  # within which all has; then what is left is killed
SHOW_CURSOR = b"\x1b[?25h"  # progress bars hide it


class StopRequested(BaseException):
    """SIGINT, SIGTERM or SIGHUP came. No ``KeyboardInterrupt``: typer exits on that without a message."""


def handle_signals() -> Callable[[], None]:
    """From now on SIGINT, SIGTERM and SIGHUP raise ``StopRequested`` in the main thread, which calls this. A signal that is ignored already
    (nohup, a shell's background) stays ignored.

    Returns what the main thread calls once it has unwound: it ends the process if a signal came.
    """
    received: list[int] = []
    lost: list[bool] = []
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    send_again = stopping.watch(numbers, UNWIND_SECONDS, end)
    unraisable = sys.unraisablehook

    def stop(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) == 1 or lost:  # the second must not interrupt the unwinding: ``end`` is called for it
            lost.clear()
            raise StopRequested

    def swallowed(found: sys.UnraisableHookArgs) -> None:
        """The interpreter drops what is raised in a ``__del__`` or a weak reference's callback, and would print it. Once a signal came,
        nothing is printed: what else fails there does so because it was cut short."""
        if not received:
            unraisable(found)
        elif isinstance(found.exc_value, StopRequested):
            lost.append(True)
            send_again()  # raised here it would be lost again

    sys.unraisablehook = swallowed

    def end_if_stopped() -> None:
        if received:
            end(received[0])

    for number in numbers:
        signal.signal(number, stop)
    return end_if_stopped


def end(number: int) -> NoReturn:
    """Kill all that this process started, say how to go on, and end with the code that a shell expects."""
    try:
        stopping.kill(stopping.children(os.getpid()))
        with contextlib.suppress(OSError):  # a terminal that is gone
            if os.isatty(1):
                os.write(1, SHOW_CURSOR)
            os.write(2, b"factory: stopped; run the same command again to go on\n")
    finally:
        os._exit(128 + number)
