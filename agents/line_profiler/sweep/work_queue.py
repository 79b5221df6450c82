"""A work queue over several workers: processes of this machine, or Ray actors of many.

The longest items (by estimate) are started first, so that no long item is left for the end. A worker that dies is replaced,
and its item is measured again.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol

from kernels.contract.message import CodedError

MOST_TRIES = 3  # an item that killed so many workers is not tried again


class SweepError(CodedError):
    """A sweep cannot run with these options on this machine; the message says what to do."""


@dataclass(frozen=True)
class UnmeasuredItem:
    """Stands in place of a result: the worker died at each of ``tries`` tries, or the measurement raised ``error``."""

    tries: int
    error: str = ""


class Workers(Protocol):
    """``count`` workers. As many threads call ``measure`` at once, each with a worker number of its own."""

    count: int

    def measure(self, worker: int, item: Any) -> Any:
        """The item's result. Raises: ``SweepWorkerDiedError`` after the worker was replaced."""
        ...

    def stop(self) -> None: ...


class SweepWorkerDiedError(Exception):
    """The worker died while it measured an item."""


def order_longest_first(costs: Sequence[float]) -> list[int]:
    """The positions of the items in the order in which they are started."""
    return sorted(range(len(costs)), key=lambda item: -costs[item])


def measure_items_on_workers(
    workers: Workers,
    items: Sequence[Any],
    costs: Sequence[float],
    report: Callable[[int, int], None] = lambda done, of: None,
) -> list[Any]:
    """The result of each item, or ``UnmeasuredItem``. ``costs``: the items' estimated costs, in any unit."""
    idle: SimpleQueue[int] = SimpleQueue()
    for worker in range(workers.count):
        idle.put(worker)

    def measure(item: Any) -> Any:
        worker = idle.get()
        try:
            for _ in range(MOST_TRIES):
                try:
                    return workers.measure(worker, item)
                except SweepWorkerDiedError:
                    continue
                except Exception as error:  # one item that cannot be measured must not cost the others' hours
                    return UnmeasuredItem(1, f"{type(error).__name__}: {error}")
            return UnmeasuredItem(MOST_TRIES)
        finally:
            idle.put(worker)

    threads = ThreadPoolExecutor(workers.count)
    try:
        futures = {item: threads.submit(measure, items[item]) for item in order_longest_first(costs)}
        for done, future in enumerate(as_completed(futures.values()), start=1):
            future.result()
            report(done, len(items))
        return [futures[item].result() for item in range(len(items))]
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        workers.stop()


class ProcessWorkers:
    """``count`` processes of this machine. ``function`` runs in them and must be importable.

    Each is a pool of its own: when a process dies, ``ProcessPoolExecutor`` gives up everything that was submitted to it.
    """

    def __init__(self, function: Callable[[Any], Any], count: int) -> None:
        self.function, self.count, self.stopped = function, count, False
        self.pools = [self._start() for _ in range(count)]

    def _start(self) -> ProcessPoolExecutor:
        # A fork would copy torch's locks and threads.
        return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))

    def measure(self, worker: int, item: Any) -> Any:
        try:
            return self.pools[worker].submit(self.function, item).result()
        except BrokenProcessPool:
            if not self.stopped:
                self.pools[worker] = self._start()
            raise SweepWorkerDiedError from None

    def stop(self) -> None:
        """Stop all workers at once, also in the middle of an item, which may never end."""
        self.stopped = True
        for pool in self.pools:
            for process in list((pool._processes or {}).values()):  # ``kill_workers`` from Python 3.14 on
                process.terminate()
            pool.shutdown(wait=False, cancel_futures=True)


def require_ray() -> None:
    """Raises: SweepError if Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise SweepError(
            "line_profiler.no_ray",
            "--ray: Ray is not installed. Install it with 'pip install ray', or use --workers for local processes.",
        )


class RayActors:
    """``count`` actors of a Ray cluster, with one GPU each if the cluster has GPUs. Only this class imports Ray.

    Raises: SweepError if Ray is missing or the cluster cannot be reached.
    """

    def __init__(self, function: Callable[[Any], Any], count: int, address: str) -> None:
        require_ray()
        import ray

        self.ray, self.function, self.count = ray, function, count
        try:
            ray.init(address=None if address == "local" else address, log_to_driver=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise SweepError(
                "line_profiler.no_cluster",
                "--ray {address}: Ray cannot start, or cannot connect to the cluster ({problem}).",
                address=address,
                problem=str(error).splitlines()[0],
            ) from None
        gpus = 1 if ray.cluster_resources().get("GPU", 0) else 0
        self.kind = ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=0)(_Actor)
        self.actors: list[Any] = [self.kind.remote(function) for _ in range(count)]

    def measure(self, worker: int, item: Any) -> Any:
        try:
            return self.ray.get(self.actors[worker].call.remote(item))
        except self.ray.exceptions.RayActorError:
            self.actors[worker] = self.kind.remote(self.function)
            raise SweepWorkerDiedError from None

    def stop(self) -> None:
        self.ray.shutdown()


class _Actor:
    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def call(self, item: Any) -> Any:
        return self.function(item)
