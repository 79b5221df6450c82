"""Whole training steps: the trainer's own, of ``models``, with ``policies/kernels.yaml`` as it is shipped and nothing tuned by hand.

An item is a model in a precision, in a process of its own. What it finds comes in the order of what it is worth: the first step, tokens/s,
memory, host waits, where the time goes, what a checkpoint costs.
"""

from __future__ import annotations

import gc
import math
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from agents.line_profiler.workload import make_segment_run
from benchmarks.gpu import aims
from benchmarks.gpu.models import Model, model_of
from benchmarks.gpu.needs import ROOT
from benchmarks.gpu.parts import Item, Settings
from benchmarks.gpu.timing import synchronize
from benchmarks.gpu.worker import Context, short
from benchmarks.support.waits import waits
from kernels.contract.host_memory import keep_freed_memory
from kernels.contract.precision import allow_bf16_matmul
from trainer.batch import Batch, prefetch_batches
from trainer.checkpoint_writer import CheckpointWriter
from trainer.contract.checkpoint import format as checkpoints
from trainer.contract.checkpoint.format import Checkpoint
from trainer.contract.errors import RecipeError
from trainer.contract.plan.gpus import find_gpu
from trainer.contract.plan.precision import DTYPES
from trainer.contract.plan.sizing import GpuLayout, estimate_memory_parts, sum_bytes
from trainer.contract.recipe import Recipe
from trainer.run import SegmentRun

KERNELS = ROOT / "policies" / "kernels.yaml"
WARM_UP = 3
TIMES, AT_ONCE, DRY_TIMES = 5, 3, 2  # blocks of steps that are timed, and steps of a block
MADE = 40  # steps that there are batches for
TOP = 10  # kernels of a step that are named, and operators
DULL = (
    "void",
    "native",
    "const",
    "lambda",
    "operator",
    "detail",
    "anonymous",
    "namespace",
    "TensorIteratorBase",
    "TensorIterator",
    "bool",
)
ITEMS = (
    ("1b bf16", 2.5),
    ("0.6b bf16", 2.5),
    ("100m bf16", 1.5),
    ("1b fp8", 3.0),
    ("100m graphs", 2.0),
    ("100m checkpoint", 1.0),
    ("1b checkpoint", 2.0),
)
GRAPHED_ROWS = 4  # of a step that waits for its host
LATER = 30.0  # seconds that an item needs left for what is worth less


@dataclass
class Stepper:
    """A run and its batches; ``step`` is the trainer's loop without its files."""

    run: SegmentRun
    batches: Iterator[Batch]
    recipe: Recipe

    def step(self) -> dict[str, Any]:
        with allow_bf16_matmul(DTYPES.get(self.recipe.precision, torch.bfloat16)):
            return self.run.train_step(next(self.batches).to(self.run.ranks.device))


def stepper(recipe: Recipe, folder: Path, *, compile: bool = True) -> Stepper:
    """Raises: TrainerError, KernelError."""
    run = make_segment_run(recipe, KERNELS, folder, steps=MADE, compile=compile, whole_rows=True)
    return Stepper(run, prefetch_batches(run.order, MADE, pin=run.ranks.device.type == "cuda"), recipe)


def planned_bytes(recipe: Recipe, memory: float) -> float:
    """What ``factory plan`` counts for a step of the whole batch at once on one GPU, without its reserve."""
    optimizer = recipe.optimizer.name
    parts = estimate_memory_parts(
        recipe.model, GpuLayout(1, micro_sequences=recipe.batch.sequences), memory, optimizer=optimizer
    )
    return sum_bytes(part for part in parts if part.name != "reserve")


def seconds_of(
    step: Callable[[], Any], device: str, count: int, left: Callable[[], float] = lambda: 1.0, at_once: int = 1
) -> list[float]:
    """Of a step, ``count`` times or as often as the time holds, once at least; each the mean of ``at_once`` steps, between which nothing
    waits for the device but the step itself."""
    found: list[float] = []
    while len(found) < count and (not found or left() > 0):
        synchronize(device)
        began = time.perf_counter()
        for _ in range(at_once):
            step()
        synchronize(device)
        found.append((time.perf_counter() - began) / at_once)
    return found


def profiled(step: Callable[[], Any], steps: int = 2) -> tuple[float, list[tuple[str, float]], list[tuple[str, float]]]:
    """Of some steps on a GPU: (share of the time in which no kernel runs, [(kernel, its share of the kernels' time)], the same of torch's
    operators, with the sizes of their arguments)."""
    from torch.profiler import ProfilerActivity, profile

    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as found:
        began = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        wall = time.perf_counter() - began
    kernels = Counter[str]()
    for row in found.key_averages():
        kernels[telling(row.key)] += row.self_device_time_total / 1e6
    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True, record_shapes=True
    ) as found:
        step()
        torch.cuda.synchronize()
    operators = Counter[str]()
    for row in found.key_averages(group_by_input_shape=True):
        if row.key.startswith("aten::"):
            sizes = " ".join(str(list(size)) for size in row.input_shapes if size)
            operators[f"{row.key} {sizes}"] += row.self_device_time_total / 1e6 * steps
    busy = kernels.total()
    most = lambda found: [(name, seconds / busy) for name, seconds in found.most_common(TOP) if seconds]
    return max(0.0, 1 - busy / wall), most(kernels), most(operators)


def telling(kernel: str) -> str:
    """Of a kernel's name what tells it from others: a template of torch's has what it computes at its end.

    >>> telling("void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::direct_copy_kernel_cuda(at::"
    ...     "TensorIteratorBase&)::{lambda()#3}::operator()() const::{lambda(float)#1}> >(int, float)")
    'elementwise_kernel gpu_kernel_impl_nocast direct_copy_kernel_cuda float'
    """
    if "at::native" not in kernel and "::" not in kernel:
        return kernel[:90]
    found: list[str] = []
    for word in re.findall(r"[A-Za-z_]\w{3,}", kernel.partition(">(")[0]):
        if word not in found and word not in DULL:
            found.append(word)
    return " ".join(found)[:90]


# -- the part --------------------------------------------------------------------------------------------------------------
def items(settings: Settings) -> list[Item]:
    keep_freed_memory()
    return [Item(name, weight) for name, weight in ITEMS]


def run(item: str, context: Context) -> None:
    name, what = item.split(" ")
    model = model_of(name, context.settings.dry)
    with tempfile.TemporaryDirectory(dir=context.settings.scratch or None) as folder:
        if what == "checkpoint":
            save_and_step(name, model, Path(folder), context)
        elif what == "graphs":
            with_graphs(name, model, Path(folder), context)
        else:
            train(name, model, what, Path(folder), context)


def train(name: str, model: Model, precision: str, folder: Path, context: Context) -> None:
    settings = context.settings
    try:
        recipe = model.recipe(name, "fp32" if settings.dry and precision == "bf16" else precision)
    except RecipeError as error:
        context.not_run(context.item, f"the recipe's schema does not know it: {error}")
        return
    fitting = fits(recipe, model, name, precision, settings)
    if isinstance(fitting, str):
        context.not_run(context.item, fitting)
        return
    context.number("model", model.about, note=f"{recipe.model.parameters / 1e6:,.0f} M weights")
    made, first_s = first_step(fitting, folder, context)
    recipe = made.recipe
    context.number("batch", f"{recipe.batch.sequences} × {recipe.model.context:,} tokens")
    for one in made.run.kernels:
        context.send("computing", op=one.op, chosen=one.chosen, by=one.by, why=one.why)
    aim = aims.FIRST_STEP_S if name == "1b" and recipe.precision == "bf16" else None
    context.number("first step, cold", first_s, "s", **aimed(first_s, aim, least=False))
    speed(name, made, context)
    if settings.device == "cpu":
        context.not_run(
            f"{context.item}: MFU of the data sheet, peak memory, host waits, idle share", "they need a device"
        )
        return
    waiting = waits(made.step)
    context.number(
        "host waits a step",
        len(waiting),
        "",
        note="; ".join(waiting),
        **aimed(len(waiting), aims.HOST_WAITS, least=False),
    )
    if context.left > LATER / 3:
        idle, kernels, operators = profiled(made.step)
        context.number("idle", idle, "share of the step")
        for kernel, share in kernels:
            context.number("kernel", share, "share of the kernels' time", note=kernel)
        for operator, share in operators:
            context.number("operator", share, "share of the kernels' time", note=operator)


def fits(recipe: Recipe, model: Model, name: str, precision: str, settings: Settings) -> Recipe | str:
    """The recipe with as many sequences as the plan says that the memory holds; or why none fits."""
    if settings.device == "cpu":
        free = total = settings.memory or 8e9
    else:
        free, total = torch.cuda.mem_get_info()
        if settings.memory is not None:
            free = min(free, settings.memory)
            torch.cuda.set_per_process_memory_fraction(min(1.0, settings.memory / total))
    sequences = model.sequences
    while sequences > 1 and planned_bytes(recipe, total) > free:
        sequences //= 2
        recipe = model.recipe(name, recipe.precision, sequences)
    planned = planned_bytes(recipe, total)
    if planned > free:
        return f"too little memory: {planned / 1e9:.2f} GB are planned for one sequence, {free / 1e9:.2f} GB are there"
    return recipe


def first_step(recipe: Recipe, folder: Path, context: Context) -> tuple[Stepper, float]:
    """The first step that fits into the memory, and its seconds with all that it compiles; half the batch where it does not."""
    device = context.settings.device
    while True:
        try:
            made = stepper(recipe, folder / str(recipe.batch.sequences))
            synchronize(device)
            began = time.perf_counter()
            made.step()
            synchronize(device)
            return made, time.perf_counter() - began
        except torch.OutOfMemoryError as error:
            if recipe.batch.sequences == 1 or context.left <= 0:
                raise
            context.not_run(
                f"{context.item}, {recipe.batch.sequences} sequences at once", f"out of memory: {short(error)}"
            )
            half = {"sequences": recipe.batch.sequences // 2}
            recipe = recipe.model_copy(update={"batch": recipe.batch.model_copy(update=half)})
        gc.collect()
        torch.cuda.empty_cache()


def speed(name: str, made: Stepper, context: Context) -> None:
    settings, recipe = context.settings, made.recipe
    cuda = settings.device != "cpu"
    seconds_of(made.step, settings.device, 1 if settings.dry else WARM_UP, lambda: context.left)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    times, at_once = (DRY_TIMES, 1) if settings.dry else (TIMES, AT_ONCE)
    each = seconds_of(made.step, settings.device, times, lambda: context.left, at_once)
    if not math.isfinite(loss := float(made.step().get("loss", math.nan))):
        context.wrong(context.item, f"the loss is {loss} after {made.run.step} steps")
    step_s = statistics.median(each)
    rate = recipe.tokens_per_step / step_s
    card = torch.cuda.get_device_name() if cuda else "cpu"
    context.number(
        "step",
        step_s,
        "s",
        note=f"median of {len(each)} blocks of {at_once}, {min(each) * 1e3:.1f} to {max(each) * 1e3:.1f} ms",
    )
    bf16 = recipe.precision == "bf16"  # the aims are of it
    sheet = "MFU of the data sheet" if bf16 else "MFU of the bf16 data sheet"
    context.number("speed", rate, "tokens/s", **aimed(rate, aims.tokens_aim(name, card) if bf16 else None))
    flops = rate * recipe.model.count_flops_per_token()
    context.number("model FLOP rate", flops, "FLOP/s")
    if settings.product_rate:
        context.number("MFU of the measured bf16 product rate", flops / settings.product_rate, "share")
    if cuda:
        gpu = find_gpu(card)
        if gpu is None:
            context.not_run(f"{context.item}: {sheet}", f"no data sheet of {card!r} is known")
        else:
            context.number(
                sheet,
                flops / gpu.peak_flops,
                "share",
                **aimed(flops / gpu.peak_flops, aims.mfu_aim(name, card) if bf16 else None),
            )
        taken = float(torch.cuda.max_memory_allocated())
        total = torch.cuda.mem_get_info()[1]
        context.number("peak memory", taken, "bytes", planned=planned_bytes(recipe, total))
    context.says = f"{rate:,.0f} tokens/s, a step takes {step_s * 1e3:.1f} ms"


def aimed(value: float, aim: float | None, least: bool = True) -> dict[str, Any]:
    """The fields of a number that has an aim."""
    return {} if aim is None else {"aim": aim, "holds": value >= aim if least else value <= aim}


def with_graphs(name: str, model: Model, folder: Path, context: Context) -> None:
    """A small micro-batch with and without CUDA graphs: are they recorded, and what do they gain?"""
    settings = context.settings
    if settings.device == "cpu":
        context.not_run(context.item, "CUDA graphs need a device")
        return
    seconds = {}
    for graphs in ("off", "on"):
        recipe = model.recipe(name, "bf16", GRAPHED_ROWS).model_copy(update={"cuda_graphs": graphs})
        made = stepper(recipe, folder / graphs)
        seconds_of(made.step, settings.device, WARM_UP, lambda: context.left)
        each = seconds_of(made.step, settings.device, TIMES, lambda: context.left, AT_ONCE)
        seconds[graphs] = statistics.median(each)
        context.number(f"step, cuda_graphs: {graphs}", seconds[graphs], "s", note=f"{GRAPHED_ROWS} rows")
        if made.run.graphs is not None:
            context.number("replays", made.run.graphs.replays, "", note=made.run.graphs.why_not)
        del made
        gc.collect()
        torch.cuda.empty_cache()
    context.says = f"{seconds['off'] / seconds['on']:.2f} times as fast with graphs"


def save_and_step(name: str, model: Model, folder: Path, context: Context) -> None:
    """What a save costs the step that it begins in: the first one, which makes pinned memory, and the second; beside a blocking one."""
    settings = context.settings
    fitting = fits(model.recipe(name, "fp32" if settings.dry else "bf16"), model, name, "bf16", settings)
    if isinstance(fitting, str):
        context.not_run(context.item, fitting)
        return
    made, _ = first_step(fitting, folder / "run", context)
    usual = statistics.median(seconds_of(made.step, settings.device, 4, lambda: context.left))

    def save_then_step() -> None:
        made.run.save()
        made.step()

    with writing(made.run, folder / "checkpoints") as writer:
        for which in ("first", "second"):
            (with_save,) = seconds_of(save_then_step, settings.device, 1)
            context.number(
                f"stall of the {which} save",
                with_save - usual,
                "s",
                note=f"a step takes {usual * 1e3:.1f} ms without it",
            )
            began = time.perf_counter()
            path = writer.wait_for_last_save()
            context.number(f"the {which} save on disk after", time.perf_counter() - began, "s")
            if context.left <= 0:
                context.not_run(f"{context.item}: what follows the {which} save", "its time was up")
                return
        assert path is not None
        context.number("size", sum(file.stat().st_size for file in path.iterdir()), "bytes")
    began = time.perf_counter()
    contents, _ = made.run.collect_checkpoint_contents()
    state = {"step": made.run.step, "sampler": made.run.sampler, "recipe": made.recipe.model_dump()}
    checkpoints.save_checkpoint(folder / "blocking", Checkpoint(contents["model"], contents["optimizer"], state))
    context.number("a blocking save", time.perf_counter() - began, "s")
    context.says = f"a save stalls a step for {(with_save - usual) * 1e3:.1f} ms"


@contextmanager
def writing(run: SegmentRun, folder: Path) -> Iterator[CheckpointWriter]:
    reserve = run.count_checkpoint_bytes() if run.ranks.device.type == "cuda" else 0  # as ``trainer.segment`` has it
    writer = run.writer = CheckpointWriter(folder, 1, reserve=reserve)
    try:
        yield writer
    finally:
        run.writer = None
        writer.close()
