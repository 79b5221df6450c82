"""Workers that measure: processes of this machine, or Ray's of many. A worker that dies costs its item's time, no more."""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from agents.line_profiler.sweep.stealing import StealingQueue

MOST_TRIES = 3  # an item that has cost so many workers is given up


class SweepError(Exception):
    """What was asked for cannot be had here; says what to do."""


@dataclass(frozen=True)
class Lost:
    """In place of a result: the item's worker died each time."""

    tries: int


class Crew(Protocol):
    workers: int

    def send(self, worker: int, item: Any) -> None:
        """Give a worker that is idle an item."""
        ...

    def wait(self) -> list[tuple[int, Any]]:
        """(worker, result) of those that are done; the result is ``Lost`` of a worker that died and was replaced."""
        ...

    def stop(self) -> None: ...


def measure_on(
    crew: Crew, items: Sequence[Any], costs: Sequence[float], report: Callable[[int, int], None] = lambda done, of: None
) -> list[Any]:
    """The result of each item, or ``Lost``. ``costs``: estimated, in any unit."""
    queue = StealingQueue(costs, crew.workers)
    results: dict[int, Any] = {}
    tries: Counter[int] = Counter()
    busy: dict[int, int] = {}

    def feed(worker: int) -> None:
        item = queue.take(worker)
        if item is not None:
            busy[worker] = item
            crew.send(worker, items[item])

    try:
        for worker in range(crew.workers):
            feed(worker)
        while busy:
            for worker, result in crew.wait():
                item = busy.pop(worker, None)
                if item is None:
                    continue  # an idle worker died
                tries[item] += 1
                if isinstance(result, Lost) and tries[item] < MOST_TRIES:
                    queue.give_back(item)
                else:
                    results[item] = Lost(tries[item]) if isinstance(result, Lost) else result
                    report(len(results), len(items))
                feed(worker)
                if queue.lost:  # those that found nothing to do may take it
                    for idle in set(range(crew.workers)) - busy.keys():
                        feed(idle)
    finally:
        crew.stop()
    return [results[item] for item in range(len(items))]


class Processes:
    """``workers`` processes of this machine, each with a pipe. ``function`` runs in them and must be importable."""

    def __init__(self, function: Callable[[Any], Any], workers: int) -> None:
        self.function, self.workers = function, workers
        self.context = multiprocessing.get_context("spawn")  # a fork would copy torch's locks and threads
        self.processes: list[Any] = [None] * workers
        self.pipes: list[Connection] = [self._start(worker) for worker in range(workers)]

    def _start(self, worker: int) -> Connection:
        ours, theirs = self.context.Pipe()
        self.processes[worker] = self.context.Process(target=_serve, args=(theirs, self.function), daemon=True)
        self.processes[worker].start()
        theirs.close()
        return ours

    def send(self, worker: int, item: Any) -> None:
        with contextlib.suppress(OSError):  # it died while idle: wait() finds the end of its pipe
            self.pipes[worker].send(item)

    def wait(self) -> list[tuple[int, Any]]:
        done: list[tuple[int, Any]] = []
        for pipe in wait(self.pipes):
            worker = self.pipes.index(pipe)  # type: ignore[arg-type]
            try:
                done.append((worker, self.pipes[worker].recv()))
            except (EOFError, OSError):
                self.processes[worker].join()
                self.pipes[worker].close()
                self.pipes[worker] = self._start(worker)
                done.append((worker, Lost(1)))
        return done

    def stop(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.terminate()
            process.join()


def _serve(pipe: Connection, function: Callable[[Any], Any]) -> None:
    while True:
        try:
            item = pipe.recv()
        except (EOFError, OSError):
            return
        pipe.send(function(item))


def require_ray() -> None:
    """Raises: SweepError where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise SweepError("--ray: Ray is not installed here: pip install ray, or use --workers for local processes")


class RayActors:
    """``workers`` actors of a Ray cluster, one GPU each where it has any. Imported only here.

    Raises: SweepError when Ray is missing or the cluster cannot be reached.
    """

    def __init__(self, function: Callable[[Any], Any], workers: int, address: str) -> None:
        require_ray()
        import ray

        self.ray, self.function, self.workers = ray, function, workers
        try:
            ray.init(address=None if address == "local" else address, log_to_driver=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise SweepError(f"--ray {address}: {str(error).splitlines()[0]}") from None
        gpus = 1 if ray.cluster_resources().get("GPU", 0) else 0
        self.kind = ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=0)(_Actor)
        self.actors: list[Any] = [self.kind.remote(function) for _ in range(workers)]
        self.running: dict[Any, int] = {}

    def send(self, worker: int, item: Any) -> None:
        self.running[self.actors[worker].call.remote(item)] = worker

    def wait(self) -> list[tuple[int, Any]]:
        ready, _ = self.ray.wait(list(self.running), num_returns=1)
        done: list[tuple[int, Any]] = []
        for reference in ready:
            worker = self.running.pop(reference)
            try:
                done.append((worker, self.ray.get(reference)))
            except self.ray.exceptions.RayActorError:
                self.actors[worker] = self.kind.remote(self.function)
                done.append((worker, Lost(1)))
        return done

    def stop(self) -> None:
        self.ray.shutdown()


class _Actor:
    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def call(self, item: Any) -> Any:
        return self.function(item)
