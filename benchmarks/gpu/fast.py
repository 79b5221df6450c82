"""How fast every op is, forward and backward, at three widths, beside what else computes it.

An item is an op at a width. A call's floor is the larger of two times: its least traffic at the measured copy bandwidth, and its FLOPs at
the measured product rate (``Op.cost``). ``share`` is that floor over the time taken: 1.0 cannot be passed. ``compile`` calls everything
once, side by side in several processes, and leaves what was compiled in the caches of this run.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import shapes, timing
from benchmarks.gpu.parts import Item, Settings
from benchmarks.gpu.right import ORDER, compile_every_shape, interpreter_is_too_old, round_as_a_gpu
from benchmarks.gpu.rivals import WHOLE_ROWS, Rival, Unavailable, disagreement, rivals
from benchmarks.gpu.worker import Context, poisoned, short
from benchmarks.support.waits import waits
from kernels.contract.choice import find_default_implementation, split_implementation_names
from kernels.contract.machine import describe_this_machine
from kernels.contract.op import Inputs, Op, OracleCase, Shape
from kernels.contract.oracle import compare_with_fp64, compute_outputs_and_gradients
from kernels.contract.precision import allow_bf16_matmul
from kernels.contract.registry import OPS

SECONDS = 0.08  # of the timing of one pass
SMALL = OracleCase(
    "agreement", Shape(batch=2, context=256, d_model=512, heads=8, kv_heads=2, head_dim=64, d_ff=1024, vocab_size=2048)
)
FIRST_WIDTH_ALONE = ("flex",)  # implementations that compile for more than 20 s a shape (H200)
LEFT_FREE = 0.8  # of the memory that is free, what a call may take


@dataclass(frozen=True)
class Timed:
    """One way to compute an op on one shape. Seconds of a call; ``share`` of the floor, ``of`` which ceiling."""

    forward: timing.Took
    both: timing.Took  # forward and backward; the forward pass alone where there is no gradient
    host_s: float  # of launching both without waiting
    share: float | None
    of: str
    waits: list[str]  # where the host waits for the device in both


def floor(
    op: Op, shape: Shape, copy_rate: float | None, product_rate: float | None, executed: float = 1.0
) -> tuple[float, str] | None:
    """(seconds that a forward and backward takes at least, 'copy' or 'product'); None where the ceilings were not measured.

    ``executed``: the share of the op's FLOPs that its inputs ask for.
    """
    if not copy_rate or not product_rate:
        return None
    cost = op.cost(shape, shapes.dtype_of(op).itemsize)
    moving = (cost.forward_bytes + cost.backward_bytes) / copy_rate
    computing = executed * (cost.forward_flops + cost.backward_flops) / product_rate
    return (moving, "copy") if moving >= computing else (computing, "product")


def executed(op: Op, inputs: Inputs) -> float:
    """Of attention, the share of the rows' causal triangles that lies within documents; of other ops all.

    >>> executed(OPS["attention"], (None, None, None, torch.tensor([[0, 0, 1, 1]])))
    0.6
    """
    if op.name != "attention":
        return 1.0
    document_BT = inputs[3]
    T = document_BT.shape[1]
    lengths: Any = torch.bincount(
        (document_BT + T * torch.arange(len(document_BT), device=document_BT.device)[:, None]).flatten()
    )
    return float((lengths * (lengths + 1)).sum()) / (len(document_BT) * T * (T + 1))


def drawn(op: Op, shape: Shape, device: str, seed: int = 0) -> Inputs:
    """The op's inputs, drawn on the device: on a CPU a gigabyte of normal values takes seconds."""
    with torch.device(device):
        made = list(
            op.make_inputs(shape, torch.Generator(device).manual_seed(seed), torch.device(device), shapes.dtype_of(op))
        )
    for position in op.gradients:
        made[position] = made[position].detach().requires_grad_()
    return tuple(made)


def passes(function: Callable[..., Any], op: Op, inputs: Inputs) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """(the forward pass, both): calls of ``function``; upstream gradients are made beforehand."""

    def forward() -> Any:
        return function(*inputs)

    leaves = [inputs[position] for position in op.gradients]
    if not leaves:
        return forward, forward
    upstream = [torch.randn_like(output) for output in wanted(forward())]

    def both() -> None:
        torch.autograd.grad(wanted(forward()), leaves, upstream)

    return forward, both


def wanted(outputs: Any) -> list[Tensor]:
    every = outputs if isinstance(outputs, tuple) else (outputs,)
    return [output for output in every if output is not None and output.requires_grad]


def timed(rival: Rival, op: Op, shape: Shape, settings: Settings) -> Timed:
    """Raises: Unavailable; torch.OutOfMemoryError; what compilers and kernels raise."""
    device, dry = settings.device, settings.dry
    each = op.cost(shape, shapes.dtype_of(op).itemsize).forward_bytes
    sets = [drawn(op, shape, device, seed) for seed in range(1 if dry else timing.sets_of(each, device))]
    function = rival.prepare(sets[0])
    calls = [passes(function, op, inputs) for inputs in sets]
    least, most, seconds = (1, 1, 0.0) if dry else (timing.LEAST, timing.MOST, SECONDS)
    both = timing.took([call for _, call in calls], device, seconds, least, most)
    forward = timing.took([call for call, _ in calls], device, seconds, least, most) if op.gradients else both
    host_s = timing.host_seconds(calls[0][1], device, 1 if dry else timing.LAUNCHES)
    waiting = [] if device == "cpu" else waits(calls[0][1])
    asked = 1.0 if rival.name == WHOLE_ROWS else executed(op, sets[0])
    least_time = floor(op, shape, settings.copy_rate, settings.product_rate, asked)
    share, of = (least_time[0] / both.median, least_time[1]) if least_time else (None, "")
    return Timed(forward, both, host_s, share, of, waiting)


_off: dict[tuple[str, str], str] = {}  # (op, rival) → its disagreement: looked for once a process
_told: set[tuple[str, str]] = set()  # of them, what was reported


def disagrees(rival: Rival, op: Op, settings: Settings) -> str:
    """Does it compute something else than the reference? '': it agrees. Raises: as ``timed``.

    What is registered: as the part 'right' found it in this run; what that has not judged, by the oracle on one small shape. Any other
    rival beside the reference on that shape, within ``rivals.ALIKE``.
    """
    registered = f"{op.name}/{rival.implementation}"
    if not rival.judged or registered in settings.right:
        return ""
    if registered in settings.wrong:
        return "by the part 'right'"
    if (op.name, rival.name) not in _off:
        case = OracleCase("agreement", shapes.DRY[0]) if settings.dry else SMALL
        dtype = shapes.dtype_of(op)
        if rival.implementation:
            result = compare_with_fp64(op, rival.implementation, case, dtype=dtype, device=settings.device)
            off = "" if result.ok else str(result.describe_failures())
        else:
            inputs = op.inputs(case, device=settings.device, dtype=dtype)
            found = compute_outputs_and_gradients(op, rival.prepare(inputs), inputs, 0)
            off = disagreement(op, found, compute_outputs_and_gradients(op, op.reference, inputs, 0))
        _off[op.name, rival.name] = off
    return _off[op.name, rival.name]


def free_bytes(settings: Settings) -> float:
    """Memory that a call may take: of what was free when the run began, so that 'compile' and 'fast' choose the same shapes."""
    free = settings.free if settings.free is not None else 1e9
    return LEFT_FREE * (free if settings.memory is None else min(free, settings.memory))


# -- the parts 'compile' and 'fast' ----------------------------------------------------------------------------------------
def items(settings: Settings) -> list[Item]:
    if settings.dry:
        round_as_a_gpu()
    compile_every_shape()
    limit_memory(settings)
    return [
        Item(f"{name}/{number}") for number in range(len(shapes.WIDTHS)) for name in (*ORDER, *extra()) if name in OPS
    ]


def in_order(op: Op, number: int, device: str) -> list[Rival]:
    """All that is timed at the n-th width, what ``auto`` runs on this machine first, then eager: without the two nothing is told."""
    shipped = split_implementation_names(find_default_implementation(op.name, describe_this_machine().name))
    every = [rival for rival in rivals(op, device) if number == 0 or rival.implementation not in FIRST_WIDTH_ALONE]
    rank = lambda rival: (
        rival.implementation != shipped[0],
        rival.name != "eager",
        rival.implementation not in shipped,
    )
    return sorted(every, key=rank)


def always_tried(rival: Rival, op: Op) -> bool:
    """Is it what ``auto`` runs here, or eager? All others are compared with these two, so they are timed even if they did not compile in time."""
    return (
        rival.name == "eager"
        or rival.implementation
        == split_implementation_names(find_default_implementation(op.name, describe_this_machine().name))[0]
    )


def limit_memory(settings: Settings) -> None:
    """Past ``settings.memory`` this process gets torch's out-of-memory error, as on a smaller card."""
    if settings.device != "cpu" and settings.memory is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, settings.memory / total))


def extra() -> list[str]:
    return [name for name in OPS if name not in ORDER]


def run(item: str, context: Context) -> None:
    name, number = item.split("/")
    op, settings = OPS[name], context.settings
    warms = context.part.name == "compile"
    try:
        shape = shapes.shape_for(op, int(number), free_bytes(settings), settings.dry)
    except shapes.TooLarge as error:
        context.not_run(f"{name} at width {width_of(int(number), settings)}", str(error))
        return
    done, skipped = 0, 0
    with allow_bf16_matmul(shapes.dtype_of(op)):  # as the trainer does
        for rival in in_order(op, int(number), settings.device):
            if context.left <= 0:
                if not warms:
                    context.not_run(f"{name} by {rival.name} at width {shape.d_model}", "its time was up")
                skipped += 1
                continue
            ours = rival.side == "ours"
            what = f"{name}/{rival.name} at {shape.d_model}"
            if what in settings.hung and not always_tried(rival, op):
                context.not_run(f"{name} by {rival.name} at width {shape.d_model}", "it did not compile in its time")
                continue
            context.at(what, ours)
            try:
                if warms:
                    warm(rival, op, shape, settings)
                else:
                    compare(rival, op, shape, context)
                done += 1
            except Exception as error:  # compilers and kernels raise what they like
                if poisoned(error):
                    raise
                excused = isinstance(error, Unavailable | torch.OutOfMemoryError)
                if ours and not warms and not excused and not (settings.dry and interpreter_is_too_old(error)):
                    context.send("failed", op=name, by=rival.name, width=shape.d_model, why=short(error))
                elif not warms:
                    context.not_run(f"{name} by {rival.name} at width {shape.d_model}", why(error))
            if settings.device != "cpu":
                gc.collect()
                torch.cuda.empty_cache()
    context.says = f"{done} of them {'compiled' if warms else 'timed'}" + f", {skipped} not reached" * bool(skipped)


def why(error: Exception) -> str:
    if isinstance(error, Unavailable):
        return str(error)
    return f"out of memory: {short(error)}" if isinstance(error, torch.OutOfMemoryError) else f"failed: {short(error)}"


def width_of(number: int, settings: Settings) -> int:
    return (shapes.DRY if settings.dry else shapes.WIDTHS)[number].d_model


def warm(rival: Rival, op: Op, shape: Shape, settings: Settings) -> None:
    """One call of both passes. What nothing compiles is left to its timing."""
    if rival.name == "eager" or settings.dry and rival.side == "ours":
        return
    disagrees(rival, op, settings)
    inputs = drawn(op, shape, settings.device)
    passes(rival.prepare(inputs), op, inputs)[1]()
    timing.synchronize(settings.device)


def compare(rival: Rival, op: Op, shape: Shape, context: Context) -> None:
    settings = context.settings
    off = disagrees(rival, op, settings)
    if off and not rival.implementation:
        raise Unavailable(f"it computes something else than our reference: {off}")
    if (op.name, rival.name) in _off.keys() - _told and off:  # of the part 'right' all is reported
        _told.add((op.name, rival.name))
        context.wrong(f"{op.name}/{rival.implementation}, a small case before it was timed", off)
    found = timed(rival, op, shape, settings)
    context.send(
        "timed",
        op=op.name,
        width=shape.d_model,
        shape=shapes.words(shape, op),
        by=rival.name,
        side=rival.side,
        note=rival.note,
        comparable=not rival.note,
        wrong=off,
        implementation="reference" if rival.name == "eager" else rival.implementation,
        forward_s=found.forward.median,
        both_s=found.both.median,
        low_s=found.both.low,
        high_s=found.both.high,
        calls=found.both.calls,
        share=found.share,
        of=found.of,
        host_s=found.host_s,
        waits=found.waits,
        bytes=cost_bytes(op, shape),
    )


def cost_bytes(op: Op, shape: Shape) -> float:
    cost = op.cost(shape, shapes.dtype_of(op).itemsize)
    return cost.forward_bytes + cost.backward_bytes
