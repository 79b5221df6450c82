"""Times each operation alone, outside the step: calls it repeatedly on fresh tensors of the recorded shapes, strides and dtypes.

An operation gets ten warm-ups, then 100 timed calls. A slow operation gets fewer, so that all fit into a time budget; the profile says how
many each got. The calls alternate between several sets of inputs, so that an operation does not find data in the cache that the step would
have to fetch. Floating-point inputs are random. Integers, masks and scalars keep their recorded values, because random ones could be
invalid, such as an index that is too large.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_unflatten

from agents.line_profiler.capture import is_view_or_empty
from agents.line_profiler.signature import OperationSignature, Samples, TensorSpec

WARMUP, ITERATIONS = 10, 100
LEAST_ITERATIONS = 3
LEAST_WARMUP = 1
CACHE_BYTES = 64 << 20  # the sets of inputs together take more than a last-level cache
MOST_SETS = 8


@dataclass(frozen=True)
class IsolatedTime:
    """Seconds of one call; ``spread_s`` is the distance between the quartiles."""

    median_s: float
    spread_s: float
    iterations: int
    why_not: str = ""  # why the operation could not be called outside the step; the times are zero then


def time_operations_alone(
    recorded: Mapping[OperationSignature, Samples],
    estimates: Mapping[OperationSignature, float],
    device: torch.device,
    budget_s: float,
    report: Callable[[int, int], None] = lambda done, of: None,
) -> dict[OperationSignature, IsolatedTime]:
    """Measure each signature once, within ``budget_s`` seconds in all. The fastest come first, each with an equal part of the remaining
    time, so that the time that they do not use is left for the slow ones.

    ``estimates``: seconds of one call in the step. Operations that move no memory are left out.
    """
    wanted = [signature for signature in recorded if not is_view_or_empty(signature.func)]
    wanted.sort(key=lambda signature: estimates.get(signature, 0.0))
    ends = time.perf_counter() + budget_s
    found = {}
    for done, signature in enumerate(wanted):
        part = max(0.0, ends - time.perf_counter()) / (len(wanted) - done)
        found[signature] = time_operation_alone(signature, recorded[signature], device, part)
        report(done + 1, len(wanted))
    return found


def time_operation_alone(
    signature: OperationSignature, values: Samples, device: torch.device, budget_s: float, seed: int = 0
) -> IsolatedTime:
    """Measure one operation alone. If it raises, ``why_not`` holds the message: an operation that cannot be repeated is not an error."""
    try:
        with torch.no_grad():
            return _measure(signature, values, device, budget_s, seed)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
        return IsolatedTime(
            0.0, 0.0, 0, f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"
        )


def _measure(
    signature: OperationSignature, values: Samples, device: torch.device, budget_s: float, seed: int
) -> IsolatedTime:
    began = time.perf_counter()
    generator = torch.Generator(device).manual_seed(seed)
    sets = [make_operation_inputs(signature, values, device, generator)]
    written = _written(signature)
    pristine = [sets[0][i].clone() for i in written]  # torch.clone keeps the strides of a dense tensor
    clock = make_call_timer(device)

    def call(number: int) -> float:
        leaves = sets[number % len(sets)]
        for position, before in zip(written, pristine):
            leaves[position].copy_(before)  # or a hundred updates in place would end in infinities
        args, kwargs = tree_unflatten(leaves, signature.tree)
        return clock(lambda: signature.func(*args, **kwargs))

    first = call(0)
    making = time.perf_counter() - began - first
    more_sets = min(MOST_SETS, -(-CACHE_BYTES // max(1, signature.tensor_bytes))) - 1
    if more_sets * making < budget_s / 4:
        sets += [make_operation_inputs(signature, values, device, generator) for _ in range(more_sets)]
    return time_repeatedly(call, first, began + budget_s)


def time_repeatedly(call: Callable[[int], float], first_seconds: float, deadline: float) -> IsolatedTime:
    """Make warm-up calls, then timed calls; fewer if the time ``deadline`` comes first. ``call(number)`` makes one call and returns its seconds.

    ``first_seconds``: the seconds of one call that was made already.
    """
    affordable = int(max(0.0, deadline - time.perf_counter()) / max(1e-9, first_seconds))
    for number in range(min(WARMUP, max(LEAST_WARMUP, affordable // 10)) - 1):
        call(number + 1)
    times: list[float] = []
    while len(times) < ITERATIONS and (len(times) < LEAST_ITERATIONS or time.perf_counter() < deadline):
        times.append(call(len(times)))
    quartiles = statistics.quantiles(times, n=4)
    return IsolatedTime(statistics.median(times), quartiles[2] - quartiles[0], len(times))


def make_call_timer(device: torch.device) -> Callable[[Callable[[], Any]], float]:
    """A function that calls another function on a device and returns the seconds of the call."""
    return _cuda_seconds if device.type == "cuda" else _seconds


def _seconds(function: Callable[[], Any]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def _cuda_seconds(function: Callable[[], Any]) -> float:
    """Seconds of a call by device events around it. The launch on the host counts only if the device waits for it."""
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    function()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1e3


def _written(signature: OperationSignature) -> list[int]:
    """The positions, among the leaves, of the tensors that the operation writes to by its schema."""
    schema = signature.func._schema
    if not schema.is_mutable:
        return []
    names = [argument.name for argument in schema.arguments]
    mutable = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    numbers = tree_unflatten(list(range(len(signature.leaves))), signature.tree)
    given = dict(zip(names, numbers[0])) | numbers[1]
    positions: list[int] = []
    for name in mutable:
        value = given.get(name)
        positions += value if isinstance(value, (list, tuple)) else [value] if value is not None else []
    return [position for position in positions if isinstance(signature.leaves[position], TensorSpec)]


# -- fresh arguments ----------------------------------------------------------------------------------------------------
BY_DIMENSION = ("gather", "scatter")  # operations whose second argument is the dimension that is indexed


def make_operation_inputs(
    signature: OperationSignature, values: Samples, device: torch.device, generator: torch.Generator
) -> list[Any]:
    """The leaves of (args, kwargs). Floats are drawn from a normal distribution; integers, masks and scalars keep their
    recorded values, or become valid indices where none were recorded."""
    leaves: list[Any] = []
    for spec, value in zip(signature.leaves, values):
        if isinstance(spec, torch.device):
            leaves.append(device)
        elif not isinstance(spec, TensorSpec):
            leaves.append(spec)
        elif spec.same_as >= 0:
            leaves.append(leaves[spec.same_as])
        elif value is None and not spec.dtype.is_floating_point:
            leaves.append(_indices(signature, spec, device))
        else:
            leaves.append(_tensor(spec, value, device, generator))
    return leaves


def _tensor(spec: TensorSpec, value: Tensor | None, device: torch.device, generator: torch.Generator) -> Tensor:
    storage = torch.empty(spec.storage_element_count, dtype=spec.dtype, device=device)
    tensor = storage.as_strided(spec.shape, spec.stride)
    if value is None:
        storage.normal_(generator=generator)
    elif any(stride == 0 and size > 1 for size, stride in zip(spec.shape, spec.stride)):
        return value.to(device).as_strided(spec.shape, value.stride())  # expanded: many elements, one place
    else:
        tensor.copy_(value)
    return tensor


def _indices(signature: OperationSignature, spec: TensorSpec, device: torch.device) -> Tensor:
    """Integers below the size of what they index, evenly spread, as balanced routing spreads them."""
    indexed = signature.tensor_arguments[0].shape
    if "grouped_mm" in signature.operation_name:  # where each expert's rows end
        ends = torch.linspace(indexed[0] / spec.shape[0], indexed[0], spec.shape[0])
        return ends.to(dtype=spec.dtype, device=device)
    dimension = 0
    if any(name in signature.operation_name for name in BY_DIMENSION):
        dimension = next(leaf for leaf in signature.leaves if isinstance(leaf, int))
    below = indexed[dimension] if indexed else 1
    storage = (
        torch.arange(spec.storage_element_count, device=device) * 7919 % max(1, below)
    )  # a prime: neighbours lie apart
    return storage.to(spec.dtype).as_strided(spec.shape, spec.stride)
