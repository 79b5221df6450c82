"""The items of a sweep: each distinct operation of all slices once, if it fits in memory and time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from agents.line_profiler.capture import is_view_or_empty
from agents.line_profiler.isolation import IsolatedTime, make_call_timer, time_operation_alone, time_repeatedly
from agents.line_profiler.lines import PeakRates
from agents.line_profiler.sweep.slices import ATTENTION, DTYPE, LayerSlice, record_slice_operations
from kernels.contract.host_memory import keep_freed_memory
from kernels.contract.message import Message
from kernels.contract.op import OracleCase
from kernels.contract.precision import allow_bf16_matmul
from kernels.contract.registry import OPS, find_implementation

FILL_BYTES_PER_S = 4e8  # making random inputs on one core
LEAST_CALLS = 4  # one warm-up and three timed calls
SLOWER = 3.0  # an operation is estimated to take this many times its roofline time


@dataclass(frozen=True)
class SweepItem:
    """One operation of a slice: the ``index``-th of its events, or attention (−1). Small, because it is sent to a worker."""

    of: LayerSlice
    index: int
    what: str
    bytes: float  # of memory that it needs
    roof_s: float  # by the roofline
    estimated_s: float  # of measuring it
    fits: str = ""  # the reason why it is not measured; empty: it is measured


@dataclass(frozen=True)
class SweepLimits:
    """The limits of a worker: memory, seconds for one item, seconds for all its items, threads."""

    memory_bytes: float
    item_s: float
    total_s: float
    threads: int


def collect_distinct_operations(slices: Iterable[LayerSlice], roof: PeakRates) -> list[SweepItem]:
    """The distinct operations of all slices."""
    found: dict[object, SweepItem] = {}
    for of in slices:
        cost = of.attention_cost
        seconds = roof.estimate_least_seconds(cost.forward_flops, cost.forward_bytes) + roof.estimate_least_seconds(
            cost.backward_flops, cost.backward_bytes
        )
        moved = cost.forward_bytes + cost.backward_bytes
        what = f"{ATTENTION}, forward and backward, {of}"
        found[make_attention_shape_key(of)] = SweepItem(of, -1, what, 4 * moved, seconds, 0.0)
        for index, event in enumerate(record_slice_operations(of)):
            signature = event.signature
            if signature is not None and signature not in found and not is_view_or_empty(signature.func):
                seconds = roof.estimate_least_seconds(event.flops, event.bytes)
                found[signature] = SweepItem(of, index, str(signature), event.bytes, seconds, 0.0)
    return list(found.values())


def make_attention_shape_key(layer_slice: LayerSlice) -> object:
    """Slices with the same attention shape share one measurement."""
    s = layer_slice.shape
    return (ATTENTION, s.batch, s.context, s.heads, s.kv_heads, s.head_dim)


def mark_measurable_items(items: Sequence[SweepItem], limits: SweepLimits, workers: int) -> list[SweepItem]:
    """All items with their estimates; ``fits`` of an item that is not measured gives the reason. The shortest items get the time first."""
    sized = [_sized(item, limits) for item in items]
    spent = 0.0
    done: dict[int, SweepItem] = {}
    for number in sorted(range(len(sized)), key=lambda n: sized[n].estimated_s):
        item = sized[number]
        if not item.fits:
            spent += item.estimated_s
            if spent > limits.total_s * workers:
                item = replace(
                    item,
                    fits=Message(
                        "line_profiler.no_time",
                        "the time limit of {seconds:.0f} s for all operations is used up",
                        seconds=limits.total_s,
                    ),
                )
        done[number] = item
    return [done[number] for number in range(len(sized))]


def _sized(item: SweepItem, limits: SweepLimits) -> SweepItem:
    making = item.bytes / FILL_BYTES_PER_S
    least = making + LEAST_CALLS * SLOWER * item.roof_s
    why: str = ""
    if item.bytes > limits.memory_bytes:
        why = Message(
            "line_profiler.needs_memory",
            "the operation needs {needs:.1f} GB, but only {limit:.1f} GB are allowed",
            needs=item.bytes / 1e9,
            limit=limits.memory_bytes / 1e9,
        )
    elif least > limits.item_s:
        why = Message(
            "line_profiler.needs_time",
            "the operation needs about {needs:.1f} s, but only {limit:.1f} s are allowed",
            needs=least,
            limit=limits.item_s,
        )
    return replace(item, estimated_s=least + min(limits.item_s, 110 * SLOWER * item.roof_s), fits=why)


@dataclass(frozen=True)
class SweepTask:
    """An item as it is sent to a worker."""

    item: SweepItem
    device: str
    attention: str  # the implementation of kernels.yaml
    limits: SweepLimits


def measure_sweep_item(task: SweepTask) -> tuple[IsolatedTime, float]:
    """(the measurement, seconds that it took in all). Runs in a worker."""
    began = time.perf_counter()
    device = torch.device(task.device)
    _prepare_worker()
    if device.type == "cpu":
        torch.set_num_threads(task.limits.threads)
    with allow_bf16_matmul(DTYPE):
        if task.item.index < 0:
            found = _attention(task, device)
        else:
            signature = record_slice_operations(task.item.of)[task.item.index].signature
            assert signature is not None
            found = time_operation_alone(signature, (None,) * len(signature.leaves), device, task.limits.item_s)
    return found, time.perf_counter() - began


@cache
def _prepare_worker() -> None:
    keep_freed_memory()


def compile_attention_kernel(implementation: str, device: torch.device) -> None:
    """Compile the native library once, before every worker needs it."""
    op = OPS[ATTENTION]
    made = op.inputs(op.cases[0], device=device, dtype=DTYPE)
    find_implementation(ATTENTION, implementation, device.type).function(*made)


def _attention(task: SweepTask, device: torch.device) -> IsolatedTime:
    began = time.perf_counter()
    try:
        op = OPS[ATTENTION]
        function = find_implementation(ATTENTION, task.attention, device.type).function
        made = op.inputs(OracleCase("sweep", task.item.of.shape), device=device, dtype=DTYPE)
        needed = [made[position] for position in op.gradients]
        gradient = torch.randn_like(made[0])
        clock = make_call_timer(device)
        call = lambda number: clock(lambda: torch.autograd.grad(function(*made), needed, gradient))
        return time_repeatedly(call, call(0), began + task.limits.item_s)
    except RuntimeError as error:
        return IsolatedTime(0.0, 0.0, 0, f"{type(error).__name__}: {str(error).splitlines()[0][:160]}")
