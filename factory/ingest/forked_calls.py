"""Calls a function in a process of its own, one item at a time: an item that kills the process, or takes too long, costs that item alone.

A tokenizer from outside is run by a library that cannot be interrupted: a signal handler of Python waits until it returns. So the process has limits
that the kernel enforces: processor seconds for each item, and memory. The process is a fork, so the function and what it holds are not sent. It lives
on between items, so what the function has learned (a table of known words) is kept. Processor time is counted instead of time, because a busy machine
must not cost a document.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_OUT_OF_BOUNDS = (
    signal.SIGPROF,
    signal.SIGABRT,
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGILL,
    signal.SIGFPE,
    signal.SIGTRAP,
)


class ItemKilledProcessError(Exception):
    """An item ended the process. ``number``: the signal, which is SIGPROF if the item took too much processor time."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    @property
    def took_too_long(self) -> bool:
        """Whether the item used up its processor time."""
        return self.number == signal.SIGPROF


class ForkedCalls:
    """Calls ``function`` in a process that is forked from this one. This process must have one thread that works.

    >>> calls = ForkedCalls(lambda number: number + os.abort() if number == 13 else number * 2, 1 << 30)
    >>> calls.call(21, 5.0)
    42
    >>> try:
    ...     calls.call(13, 5.0)
    ... except ItemKilledProcessError as error:
    ...     print(error.number == signal.SIGABRT, error.took_too_long)
    True False
    >>> calls.call(4, 5.0)
    8
    """

    def __init__(self, function: Callable[[Any], Any], memory: int) -> None:
        """``memory``: bytes that the process may take beyond those of this one."""
        self._function, self._memory = function, memory
        self.killed = 0  # processes that items ended
        self._process: multiprocessing.process.BaseProcess | None = None
        self._end: Connection | None = None

    def call(self, item: Any, seconds: float) -> Any:
        """Return ``function(item)``. ``seconds``: of processor time. Raises: what the function raises; ItemKilledProcessError.

        If something else kills the process, such as the kernel when memory runs out, this process is killed too: it cannot know who was at fault.
        """
        if self._process is None or not self._process.is_alive():
            self._start()
        assert self._end is not None and self._process is not None
        try:
            self._end.send((item, seconds))
            done, found = self._end.recv()
        except (EOFError, OSError):
            self._process.join()
            code = self._process.exitcode or 0
            self._end.close()
            self._process = None
            if -code in _OUT_OF_BOUNDS:
                self.killed += 1
                raise ItemKilledProcessError(-code) from None
            os.kill(os.getpid(), signal.SIGKILL)
            raise
        if not done:
            raise found
        return found

    def close(self) -> None:
        """End the process."""
        if self._process is not None and self._end is not None:
            self._end.close()
            self._process.join()
            self._process = None

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        self._end, other = context.Pipe()
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # the other thread of a worker only waits for its parent
            self._process = context.Process(target=self._serve, args=(self._end, other), daemon=True)
            self._process.start()
        other.close()

    def _serve(self, parents_end: Connection, end: Connection) -> None:
        parents_end.close()  # otherwise the end of the parent would not be noticed
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        wanted = taken + self._memory
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        while True:
            try:
                item, seconds = end.recv()
            except (EOFError, OSError):
                os._exit(0)
            signal.setitimer(signal.ITIMER_PROF, seconds)
            try:
                answer = (True, self._function(item))
            except Exception as error:  # told to the parent, which raises it
                answer = (False, error)
            signal.setitimer(signal.ITIMER_PROF, 0)
            try:
                end.send(answer)
            except OSError:
                os._exit(0)
