"""Measures which precision is fastest for a recipe with ``precision: auto`` (``python -m trainer.contract.plan.precision RECIPE``).

The probe times three parts of a step, forward and backward: the matrix products of the layers, attention and the loss head. It times them at
the recipe's own sizes, in every precision of the device, with torch's plain operations. The speeds differ widely. A CPU that cannot multiply
bf16 in hardware takes up to fifty times as long in bf16 as in fp32 (measured under AVX2: Zen 3 1.1 GFLOP/s in bf16 and 58 in fp32, Zen 4 1.4
and 44). A CPU with matrix units takes a quarter as long in bf16. Therefore the probe starts each part at few rows and adds rows while the
part's share of the time lasts. It estimates the rest of the step from the measured rate.

On a CPU the probe computes in one thread and measures that thread's CPU time, which excludes the time that other processes take.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.contract.message import Message, format_error_with_code
from kernels.contract.precision import DTYPES as DTYPES
from kernels.contract.precision import FP8, allow_bf16_matmul
from models.spec import ModelSpec
from models.tensors import list_block_shapes
from trainer.contract.errors import RecipeError
from trainer.contract.recipe import AUTO, Recipe

SECONDS = 3.0  # the most that a whole probe takes
WORTH = (
    1.1  # another precision is chosen only if it is this many times as fast: more than a probe's run-to-run variation
)
WARN = 1.3  # a warning is given if another precision is more than this many times as fast as the explicit one
MOST_WEIGHTS = 1 << 24  # elements of a matrix; of a larger matrix only a part is timed
SMALLEST = 64  # rows and columns of the first product, which only shows how large the next product may be


@dataclass(frozen=True)
class TimedPart:
    """Operations of a step that are timed together. ``make(share)`` prepares a share of them. It returns (function to time, FLOPs of one call)."""

    flops: float  # of a whole step, forward and backward
    make: Callable[[float], tuple[Callable[[], None], float]]


@dataclass(frozen=True)
class PrecisionTimings:
    """The measurements. ``seconds``: the time of all three parts in one step (on a CPU, as if its threads shared the work evenly). ``rates``:
    FLOP/s of each part (on a CPU, of one thread)."""

    device: str
    seconds: dict[str, float]  # by precision
    rates: dict[str, dict[str, float]]  # by precision, by part

    @property
    def fastest_precision(self) -> str:
        return min(self.seconds, key=lambda name: self.seconds[name])

    def compute_slowdown(self, precision: str) -> float:
        """The time of ``precision`` divided by that of the fastest precision."""
        return self.seconds[precision] / self.seconds[self.fastest_precision]

    def __str__(self) -> str:
        by_precision = [
            f"{name} {self.seconds[name] * 1e3:.0f} ms ("
            + ", ".join(f"{part} {rate / 1e9:.3g} GFLOP/s" for part, rate in self.rates[name].items())
            + ")"
            for name in self.seconds
        ]
        return Message(
            "plan.probe",
            "the matrix products, attention and loss head of one step take these times in each precision: {times}",
            times="; ".join(by_precision),
            seconds=self.seconds,
        )


@dataclass(frozen=True)
class ChosenPrecision:
    """The precision in which a segment trains, and the measurements behind it."""

    precision: str
    asked: str  # what the recipe says
    probe: PrecisionTimings
    warning: str = ""  # one line if an explicit precision is slow on this machine

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def list_supported_precisions(device: torch.device) -> tuple[str, ...]:
    """The precisions that ``auto`` chooses from. Every CPU has bf16, some slowly; GPUs have it from compute capability 8.0 on."""
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return ("fp32",)
    return ("fp32", "bf16")


def supports_fp8(device: torch.device) -> bool:
    """True if torch can multiply in fp8 on the device: a GPU of compute capability 8.9 or higher, or a CPU for which this torch has code."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 9)
    try:
        _products_in_fp8([(16, 16)], 16, device)[0]()
    except (RuntimeError, NotImplementedError):
        return False
    return True


def refuse_unsupported_precision(recipe: Recipe, device: torch.device) -> None:
    """Raises: RecipeError for a precision that the device does not have."""
    asked, offered = recipe.precision, list_supported_precisions(device)
    if asked == AUTO or asked in offered or asked == FP8 and supports_fp8(device):
        return
    if device.type == "cuda":
        name: str = repr(torch.cuda.get_device_name(device))
    else:
        name = Message("plan.this_torch", "under this version of PyTorch")
    needed = Message("plan.fp8_gpu", " (fp8 needs a GPU of compute capability 8.9 or higher)") if asked == FP8 else ""
    raise RecipeError(
        "plan.no_precision",
        "recipe {recipe}: the {device} device {name} does not support precision {precision}{needed}. Write "
        "'precision: {other}' or 'precision: {auto}'.",
        recipe=recipe.name,
        device=device.type,
        name=name,
        precision=asked,
        needed=needed,
        other=offered[-1],
        auto=AUTO,
    )


def choose_precision(
    recipe: Recipe, device: torch.device, before: str = "", seconds: float = SECONDS
) -> ChosenPrecision:
    """The precision for a recipe on a device. ``before``: the run's precision so far. It is kept unless another one is ``WORTH`` times as fast.

    Raises: RecipeError for an explicit precision that the device does not have.
    """
    refuse_unsupported_precision(recipe, device)
    found = time_precisions(recipe, device, seconds)
    return choose_precision_from_timings(
        recipe.precision, found, before if before in list_supported_precisions(device) else ""
    )


def choose_precision_from_timings(asked: str, timings: PrecisionTimings, before: str = "") -> ChosenPrecision:
    """Choose the precision from the measurements alone. ``asked``: the recipe's precision. ``before``: the run's precision so far.

    >>> probe = PrecisionTimings("cpu", {"fp32": 0.2, "bf16": 0.1}, {})
    >>> choose_precision_from_timings("auto", probe).precision, choose_precision_from_timings("auto", probe, before="fp32").precision
    ('bf16', 'bf16')
    """
    if asked != AUTO:
        ratio = timings.compute_slowdown(asked)
        warning = (
            Message(
                "plan.slow_precision",
                "precision: the recipe sets {precision}, but {fastest} is {ratio:.1f}x as fast on this machine. To use "
                "the fastest precision, write 'precision: {auto}'",
                precision=asked,
                fastest=timings.fastest_precision,
                ratio=ratio,
                auto=AUTO,
            )
            if ratio > WARN
            else ""
        )
        return ChosenPrecision(asked, asked, timings, warning)
    kept = before or ("fp32" if "fp32" in timings.seconds else timings.fastest_precision)
    taken = timings.fastest_precision if timings.compute_slowdown(kept) >= WORTH else kept
    return ChosenPrecision(taken, asked, timings)


def choose_training_device() -> torch.device:
    """The device that training uses on this machine: its GPU, else its CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def replace_auto_precision(recipe: Recipe, device: torch.device) -> Recipe:
    """The recipe with ``auto`` replaced by the precision that the probe finds fastest."""
    if recipe.precision != AUTO:
        return recipe
    return recipe.model_copy(update={"precision": choose_precision(recipe, device).precision})


# -- measuring ---------------------------------------------------------------------------------------------------------
def time_precisions(recipe: Recipe, device: torch.device, seconds: float = SECONDS) -> PrecisionTimings:
    """Time each part in each precision of the device, and in fp8 if the recipe asks for it. All measurements together take ``seconds``."""
    offered = list_supported_precisions(device) + ((FP8,) if recipe.precision == FP8 else ())
    taken: dict[str, float] = {}
    rates: dict[str, dict[str, float]] = {}
    share = seconds / (len(offered) * 4)  # three parts, and the small product before them
    with limit_to_one_thread(device) as threads:
        for name in offered:
            dtype = DTYPES[name]
            with allow_bf16_matmul(dtype):
                run, flops = _square(SMALLEST, device, dtype)
                run()  # the first call of a process loads libraries
                guess = flops / _shortest(run, device, share / 4)
                timed = make_timed_parts(recipe, device, dtype, in_fp8=name == FP8)
                rates[name] = {label: _grown(part, guess, device, share) for label, part in timed.items()}
            taken[name] = sum(part.flops / rates[name][label] for label, part in timed.items()) / threads
    return PrecisionTimings(device.type, taken, rates)


@contextmanager
def limit_to_one_thread(device: torch.device) -> Iterator[int]:
    """Within this context, torch computes in one thread on a CPU. Yields the previous number of threads (1 on a GPU)."""
    threads = torch.get_num_threads()
    if device.type != "cpu":
        yield 1
        return
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)


def make_timed_parts(
    recipe: Recipe, device: torch.device, dtype: torch.dtype, in_fp8: bool = False
) -> dict[str, TimedPart]:
    """The parts of a step that are timed. Their FLOPs count forward and backward: three products for each product of the forward pass.
    ``in_fp8``: the products of the layers run in fp8. The time that quantising takes is not measured."""
    model, rows = recipe.model, recipe.batch.micro_sequences or recipe.batch.sequences
    tokens = rows * model.context
    matrices = list_products(model)
    head = 6.0 * tokens * model.d_model * model.vocab_size
    inside = 6.0 * tokens * model.matmul_parameter_count - head
    # the whole square, with values as wide as keys: torch's plain attention computes it
    attention = 12.0 * rows * model.layers * model.heads * model.head_dim * model.context**2

    def products(share: float) -> tuple[Callable[[], None], float]:
        some = max(1, int(share * tokens))
        return _products_in_fp8(matrices, some, device) if in_fp8 else _products(matrices, some, device, dtype)

    return {
        "products": TimedPart(inside, products),
        "attention": TimedPart(attention, lambda share: _attention(model, share * rows * model.heads, device, dtype)),
        "loss head": TimedPart(head, lambda share: _head(model, max(1, int(share * tokens)), device, dtype)),
    }


def list_products(model: ModelSpec) -> list[tuple[int, int]]:
    """(inputs, outputs) of each matrix product of the last layer. Of routed experts, those that one token goes to are one product as wide as all."""
    found = []
    for key, shape in list_block_shapes(model, model.layers - 1).items():
        if len(shape) == 2 and key != "router":
            outputs, inputs = shape
            found.append((inputs, outputs))
        elif len(shape) == 3:
            assert model.experts is not None
            _, outputs, inputs = shape
            many = model.experts.per_token
            found.append((inputs * many, outputs) if key == "experts_down" else (inputs, outputs * many))
    return found


def _products(
    matrices: list[tuple[int, int]], rows: int, device: torch.device, dtype: torch.dtype
) -> tuple[Callable[[], None], float]:
    made = [(_leaf((rows, a), device, dtype), _leaf((b, a), device, dtype)) for a, b in matrices]

    def run() -> None:
        for x, w in made:
            y = F.linear(x, w)
            torch.autograd.grad(y, (x, w), y.detach())

    return run, 6.0 * rows * sum(a * b for a, b in matrices)


def _products_in_fp8(
    matrices: list[tuple[int, int]], rows: int, device: torch.device
) -> tuple[Callable[[], None], float]:
    """The layers' products in fp8. ``rows`` is rounded up to a multiple of 16, as the products require. The operands' rows are contiguous."""
    rows, one = -(-rows // 16) * 16, torch.ones((), device=device)
    full = lambda size, dtype: torch.full(size, 0.5, dtype=torch.bfloat16, device=device).to(dtype)
    forward, gradient = torch.float8_e4m3fn, torch.float8_e5m2
    made = []
    for a, b in matrices:
        for dtype, first, second in (
            (forward, (rows, a), (b, a)),
            (gradient, (rows, b), (a, b)),
            (gradient, (b, rows), (a, rows)),
        ):
            made.append((full(first, dtype), full(second, forward).t()))

    def run() -> None:
        for first, second in made:
            torch._scaled_mm(first, second, one, one, out_dtype=torch.bfloat16)

    return run, 6.0 * rows * sum(a * b for a, b in matrices)


def _attention(
    model: ModelSpec, heads: float, device: torch.device, dtype: torch.dtype
) -> tuple[Callable[[], None], float]:
    """Attention over ``heads`` heads of the whole batch. If ``heads`` is less than one, one head over fewer positions."""
    positions = model.context if heads >= 1 else max(16, int(model.context * math.sqrt(heads)))
    shape = (1, max(1, int(heads)), positions, model.head_dim)
    q, k, v = (_leaf(shape, device, dtype) for _ in range(3))

    def run() -> None:
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(o, (q, k, v), o.detach())

    return run, 12.0 * shape[1] * positions**2 * model.head_dim


def _head(model: ModelSpec, rows: int, device: torch.device, dtype: torch.dtype) -> tuple[Callable[[], None], float]:
    vocabulary = min(model.vocab_size, MOST_WEIGHTS // model.d_model)
    x, w = _leaf((rows, model.d_model), device, dtype), _leaf((vocabulary, model.d_model), device, dtype)
    target = torch.zeros(rows, dtype=torch.long, device=device)

    def run() -> None:
        loss = F.cross_entropy(F.linear(x, w).float(), target)
        torch.autograd.grad(loss, (x, w))

    return run, 6.0 * rows * model.d_model * vocabulary


def _square(size: int, device: torch.device, dtype: torch.dtype) -> tuple[Callable[[], None], float]:
    a, b = (_leaf((size, size), device, dtype).detach() for _ in range(2))

    def run() -> None:
        a @ b

    return run, 2.0 * size**3


def _leaf(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.full(
        shape, 0.01, dtype=dtype, device=device
    ).requires_grad_()  # a product's time does not depend on the values


def _grown(part: TimedPart, guess: float, device: torch.device, seconds: float) -> float:
    """FLOP/s of a part, measured on the largest share of it that ``seconds`` allow. ``guess``: FLOP/s of a small product, for the first share."""
    clock = _clock(device)
    share = min(1.0, seconds * guess / 32 / part.flops)
    run, flops = part.make(share)
    if flops / guess > seconds:
        return guess  # the smallest share would take more than the time that is left
    run()  # the first call of an operation loads its libraries
    deadline = clock() + seconds
    while True:
        taken = _shortest(run, device, (deadline - clock()) / 3)
        grown = min(1.0, share * min(8.0, (deadline - clock()) / (3 * taken)))  # to warm up, to time, and some room
        if grown <= share or (grown < 2 * share and grown < 1.0):
            return flops / taken
        share = grown
        run, flops = part.make(share)


def _shortest(run: Callable[[], None], device: torch.device, seconds: float) -> float:
    """Seconds of the fastest of up to nine runs within ``seconds``. The first run counts only if there was no time for a second one."""
    clock = _clock(device)
    began = clock()
    times: list[float] = []
    while not times or len(times) < 9 and clock() - began + min(times) < seconds:
        start = clock()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(max(clock() - start, 1e-7))
    return min(times[1:] or times)


def _clock(device: torch.device) -> Callable[[], float]:
    """The clock for a device. On a CPU it counts the CPU seconds of this thread."""
    return time.thread_time if device.type == "cpu" else time.perf_counter


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m trainer.contract.plan.precision", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--json", action="store_true", help="print the choice and all measurements")
    parser.add_argument(
        "--before", default="", choices=("", *DTYPES), help="the precision in which the run trained so far"
    )
    chosen = parser.parse_args(arguments)
    device = choose_training_device()
    try:
        recipe = Recipe.load(chosen.recipe)
        found = choose_precision(recipe, device, chosen.before)
    except RecipeError as error:
        print(format_error_with_code(error), file=sys.stderr)
        return 2
    if chosen.json:
        print(json.dumps(found.to_json()))
    else:
        print(f"{recipe.name}: {found.precision}\n{found.probe}" + (f"\n{found.warning}" if found.warning else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
