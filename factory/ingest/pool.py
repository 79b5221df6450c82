"""Worker processes for the per-document work: results in order, a bounded number of chunks at a time.

Processes are spawned, not forked, because the parent may have threads and database connections. A worker ends with its
parent, also when the parent is killed.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any, TypeVar

from factory.core.errors import FactoryError
from factory.ingest.worker import start_worker

R = TypeVar("R")
_AHEAD = 2  # chunks of each worker that wait or are worked on


class WorkerDied(FactoryError):
    """A worker process was killed, most likely because memory ran out. Nothing was stored."""


class Pool:
    """``workers`` processes; with 0 the work is done in this process, chunk by chunk."""

    def __init__(self, workers: int | None) -> None:
        self.workers = min(os.cpu_count() or 1, 16) if workers is None else workers
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

        Raises: WorkerDied.
        """
        if self._executor is None:
            for call in calls:
                yield function(*call)
            return
        under_way: deque[Future[R]] = deque()
        try:
            for call in calls:
                under_way.append(self._executor.submit(function, *call))
                if len(under_way) >= self.workers * _AHEAD:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        except BrokenProcessPool as error:
            raise WorkerDied(
                "a worker process of ingest died, most likely because memory ran out; nothing was stored: run it again "
                "with fewer workers or a smaller shard"
            ) from error
