"""Ends a command of the factory at SIGTERM, Ctrl-C or a closed terminal (SIGHUP): within ten seconds, or at once after a second signal.

The main thread unwinds. ``finally`` blocks stop the processes that they started, and a trainer gets time to write a checkpoint. Processes that take
longer, and those of other threads, are killed. No work is lost: the factory continues from its ledger.
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

TRAINER_STOP_SECONDS = GRACE_SECONDS + 2.0  # within which a trainer ends after a SIGTERM
UNWIND_SECONDS = TRAINER_STOP_SECONDS + 1.0  # within which the command ends; processes that still run are then killed
SHOW_CURSOR = b"\x1b[?25h"  # progress bars hide it


class StopInterrupt(BaseException):
    """SIGINT, SIGTERM or SIGHUP arrived. The class does not derive from ``KeyboardInterrupt``, because typer would then exit without a message."""


def install_stop_signal_handlers() -> Callable[[], None]:
    """Make SIGINT, SIGTERM and SIGHUP raise ``StopInterrupt`` in the main thread, which calls this function.

    A signal that is already ignored (nohup, a shell's background) stays ignored. Returns a function that the main thread calls after it
    has unwound. That function ends the process if a signal arrived.
    """
    received: list[int] = []
    lost: list[bool] = []
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    send_again = stopping.watch_signals(numbers, UNWIND_SECONDS, kill_all_and_exit)
    unraisable = sys.unraisablehook

    def stop(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if (
            len(received) == 1 or lost
        ):  # a second signal must not interrupt the unwinding: ``watch_signals`` calls ``kill_all_and_exit`` for it
            lost.clear()
            raise StopInterrupt

    def swallowed(found: sys.UnraisableHookArgs) -> None:
        """Handle an exception that the interpreter drops, because it was raised in ``__del__`` or in a weak reference's callback.

        Before a signal, the interpreter prints the exception as usual. After a signal nothing is printed: such errors come from the interruption.
        """
        if not received:
            unraisable(found)
        elif isinstance(found.exc_value, StopInterrupt):
            lost.append(True)
            send_again()  # an exception raised here would be lost as well

    sys.unraisablehook = swallowed

    def end_if_stopped() -> None:
        if received:
            kill_all_and_exit(received[0])

    for number in numbers:
        signal.signal(number, stop)
    return end_if_stopped


def kill_all_and_exit(number: int) -> NoReturn:
    """Kill all processes that this process started, print how to continue, and exit with the code that a shell expects."""
    try:
        stopping.kill_with_descendants(stopping.list_child_processes(os.getpid()))
        with contextlib.suppress(OSError):  # the terminal is closed
            if os.isatty(1):
                os.write(1, SHOW_CURSOR)
            os.write(2, b"factory: stopped; run the same command again to continue\n")
    finally:
        os._exit(128 + number)
