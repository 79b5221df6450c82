"""How long a call takes: on a GPU by device events, on a CPU by the wall clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]
LEAST, MOST = 7, 60  # timed calls
CACHES = 4  # sizes of the L2 cache that data must be larger than, or several sets are used by turns
L2 = 1 << 26  # where the device does not say
CYCLES = 2_000_000_000  # of a multiprocessor in a second, at most
AHEAD = 1.5  # times what the host takes to launch a call, that the device waits before it
LAUNCHES = 10  # of the host's cost: fewer than a stream queues


@dataclass(frozen=True)
class Took:
    """Seconds of one call: the median and the quartiles of ``calls``."""

    median: float
    low: float
    high: float
    calls: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Took:
        quartiles = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else [seconds[0]] * 3
        return cls(statistics.median(seconds), quartiles[0], quartiles[2], len(seconds))


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def l2_bytes(device: str) -> int:
    return int(getattr(torch.cuda.get_device_properties(0), "L2_cache_size", L2)) if device != "cpu" else L2


def sets_of(bytes_each: float, device: str, most: int = 8) -> int:
    """How many sets of inputs to use by turns, so that none is found in the cache."""
    return max(1, min(most, -(-CACHES * l2_bytes(device) // max(1, int(bytes_each)))))


def took(calls: Sequence[Call], device: str, seconds: float, least: int = LEAST, most: int = MOST) -> Took:
    """Time ``calls`` by turns for about ``seconds``. The first call of each, which compiles, is not counted."""
    for call in calls:
        call()
    synchronize(device)
    count = least
    if least < most:
        began = time.perf_counter()
        calls[0]()
        synchronize(device)
        count = max(least, min(most, int(seconds / max(1e-9, time.perf_counter() - began))))
    turns = [calls[number % len(calls)] for number in range(count)]
    return Took.of(_by_clock(turns) if device == "cpu" else _by_events(turns))


def _by_clock(turns: Sequence[Call]) -> list[float]:
    found = []
    for call in turns:
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return found


def _by_events(turns: Sequence[Call]) -> list[float]:
    """Before each call the whole cache is written, so that nothing of the call's is in it, and the device spins for as long as the host
    takes to launch the call: else the time between the events would be the launch's, where that takes longer than the work."""
    cache = torch.empty(l2_bytes("cuda"), dtype=torch.int8, device="cuda")
    ahead = int(AHEAD * CYCLES * host_seconds(turns[0], "cuda", 3))
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in turns]
    for call, (before, after) in zip(turns, events):
        cache.zero_()
        torch.cuda._sleep(min(ahead, CYCLES // 100))
        before.record()
        call()
        after.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in events]


def host_seconds(call: Call, device: str, launches: int = LAUNCHES) -> float:
    """Of one call, until the host may go on: launching without waiting. On a CPU that is the call."""
    synchronize(device)
    began = time.perf_counter()
    for _ in range(launches):
        call()
    spent = time.perf_counter() - began
    synchronize(device)
    return spent / launches


def product_rate(device: str, size: int, products: int) -> float:
    """FLOP/s of bf16 products of random square matrices, ``products`` of them between two events; the best of three."""
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(a)

    def many() -> None:
        for _ in range(products):
            torch.mm(a, b, out=out)

    return 2 * size**3 * products / took([many], device, 0.0, least=3).low


def copy_rate(device: str, size: int) -> float:
    """Bytes a second, read and written, of a copy of ``size`` bytes."""
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size / took([lambda: target.copy_(source)], device, 0.2).median
