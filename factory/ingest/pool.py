"""Worker processes for the per-document work: results in order, a bounded number of chunks at a time.

Processes are spawned, not forked, because the parent may have threads and database connections. A worker ends with its
parent, also when the parent is killed. Workers that finish no chunk any more are noticed as a trainer is that makes no step, and ended.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from factory.core.errors import FactoryError
from factory.ingest.worker import start_worker
from factory.retrying.policy import RetryPolicy
from factory.retrying.watchdog import UsualTimes, Watchdog

R = TypeVar("R")
POLL_SECONDS = 1.0
_AHEAD = 2  # chunks of each worker that wait or are worked on


class WorkerDiedError(FactoryError):
    """A worker process was killed, most likely because memory ran out, or hung. Nothing was stored."""


class Pool:
    """``workers`` processes; with 0 the work is done in this process, chunk by chunk."""

    def __init__(self, workers: int | None, spool: Path, policy: RetryPolicy) -> None:
        """spool: a folder that grows while they work. policy: when they count as hung."""
        self.workers = min(os.cpu_count() or 1, 16) if workers is None else workers
        self.spool, self.policy = spool, policy
        self._executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> Pool:
        if self.workers > 0:
            context = get_context("spawn")
            self._executor = ProcessPoolExecutor(self.workers, mp_context=context, initializer=start_worker)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._executor:
            self._executor.shutdown(wait=True, cancel_futures=True)

    def map(self, function: Callable[..., R], calls: Iterable[tuple[Any, ...]]) -> Iterator[R]:
        """``function(*call)`` for each call, in order; ``calls`` is consumed only as fast as the work is done.

        Raises: WorkerDiedError.
        """
        if self._executor is None:
            for call in calls:
                yield function(*call)
            return
        dog = Watchdog(self.policy, UsualTimes(), os.getpid(), self.spool, first_counts=True, unit="chunk")
        under_way: deque[Future[R]] = deque()
        done = 0
        try:
            for call in calls:
                under_way.append(self._executor.submit(function, *call))
                if len(under_way) >= self.workers * _AHEAD:
                    yield self._result(under_way.popleft(), dog, done)
                    done += 1
            while under_way:
                yield self._result(under_way.popleft(), dog, done)
                done += 1
        except BrokenProcessPool as error:
            raise WorkerDiedError(
                "a worker process of ingest was killed, most likely because memory ran out; nothing was stored"
            ) from error

    def _result(self, future: Future[R], dog: Watchdog, done: int) -> R:
        dog.begin()
        while True:
            try:
                found = future.result(timeout=POLL_SECONDS)
            except TimeoutError:
                if future.done():  # it ended a moment later, or that was the work's own error
                    dog.look(done + 1)
                    return future.result()
                if hung := dog.look(done):
                    self._kill()
                    raise WorkerDiedError(
                        f"the worker processes of ingest hung: {hung}; they were killed, and nothing was stored"
                    ) from None
                continue
            dog.look(done + 1)
            return found

    def _kill(self) -> None:
        assert self._executor
        for worker in list(self._executor._processes.values()):
            worker.kill()
