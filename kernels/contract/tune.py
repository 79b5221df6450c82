"""Finds the fastest implementation of each op on this machine: ``python -m kernels.contract.tune --recipe FILE --precision fp32``.

Every implementation that runs on the device and passes the oracle is timed against the op's reference, forward and backward, at the recipe's
shapes, in pairs (``kernels.contract.bench``). Ops with more work in a step are timed first. If ``--seconds`` are too few, the least important
implementations are not timed. The command prints a line for each implementation to standard error, and one JSON object to standard output. All
registered implementations are approved code, so a choice among them needs no proposal.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import yaml

from kernels.contract import machine
from kernels.contract.bench import BenchSetting, Comparison, compare_implementations
from kernels.contract.choice import Choice, find_default_implementation, split_implementation_names
from kernels.contract.host_memory import keep_freed_memory
from kernels.contract.message import Message, format_error_with_code
from kernels.contract.op import CASES, Implementation, KernelError, Op
from kernels.contract.oracle import compare_with_fp64
from kernels.contract.precision import DTYPES, allow_bf16_matmul
from kernels.contract.registry import OPS, list_idle_ops

SECONDS = 60.0
PAIRS = 7
WORTH = 1.02  # an implementation is chosen only if it is this many times as fast as the reference: less can be noise
Report = Callable[[str], None]


@dataclass(frozen=True)
class TimedImplementation:
    """One implementation of an op compared with its reference."""

    op: str
    implementation: str
    ratio: float | None = None  # the reference's time / this one's, the median of the pairs; None: not timed
    low: float | None = None  # quartiles of the ratios of the pairs
    high: float | None = None
    seconds: float | None = None
    why: str = ""  # the reason why it was not timed


@dataclass(frozen=True)
class TuningResult:
    """The measurements of ``tune``, and the choice that follows from them."""

    setting: BenchSetting
    choice: Choice  # every op, by name
    timed: list[TimedImplementation]


def list_implementations_to_time(op: Op, setting: BenchSetting, device: str) -> Iterator[Implementation]:
    """Yields the implementations of an op other than its reference, as the recipe would run them.

    ``compiled`` is left out where it is the same as the reference: in a block that is compiled anyway, or if the recipe compiles nothing.
    """
    for implementation in op.implementations.values():
        same = implementation.name == "reference"
        same |= implementation.name == "compiled" and (op.in_block or not setting.compile)
        interpreted = implementation.needs_triton and device == "cpu"
        if not same and not interpreted and implementation.can_run_on(device):
            function = implementation.function if setting.compile else implementation.eager
            yield replace(implementation, function=function or implementation.function)


def tune(
    setting: BenchSetting, device: str, seconds: float = SECONDS, ops: tuple[str, ...] = (), say: Report = print
) -> TuningResult:
    """Time all implementations within ``seconds``. An op whose implementations were not timed gets ``find_default_implementation``.

    Raises: KernelError if this machine does not have the device.
    """
    deadline = time.monotonic() + seconds
    there = machine.describe_this_machine(device).name if device != "cpu" else device
    choice: Choice = {name: find_default_implementation(name, there) for name in OPS}
    wanted = [OPS[name] for name in OPS if not ops or name in ops]
    every = list_in_timing_order(wanted, setting, device)
    timed: list[TimedImplementation] = []
    last = {
        True: 0.0,
        False: 0.0,
    }  # seconds of the last implementation that starts a compiler (which cannot be stopped), and that does not
    for number, (op, implementation) in enumerate(every):
        began = time.monotonic()
        left, compiles = deadline - began, implementation.eager is not None
        fair = 2 * left / (len(every) - number)  # twice an equal share, because most take less
        op = replace(op, implementations={**op.implementations, implementation.name: implementation})
        one = _time(op, implementation, setting, device, min(left, fair) if left > last[compiles] else 0.0)
        last[compiles] = time.monotonic() - began
        timed.append(one)
        say(_progress(one))
    choice |= {
        op.name: choose_fastest_implementation([one for one in timed if one.op == op.name], choice[op.name])
        for op in wanted
    }
    return TuningResult(setting, choice, timed)


def list_in_timing_order(ops: Sequence[Op], setting: BenchSetting, device: str) -> list[tuple[Op, Implementation]]:
    """The implementations in the order in which to time them. Those that start no compiler come first. Within both kinds, ops alternate, and an op
    with more work comes more often (Sainte-Laguë's divisors)."""
    turn: Counter[tuple[str, bool]] = Counter()
    every = []
    for op in ops:
        for implementation in list_implementations_to_time(op, setting, device):
            compiles = implementation.eager is not None
            turn[op.name, compiles] += 1
            every.append(
                (compiles, -count_min_flops_of_op(op, setting) / (2 * turn[op.name, compiles] - 1), op, implementation)
            )
    return [(op, implementation) for _, _, op, implementation in sorted(every, key=lambda one: one[:2])]


def choose_fastest_implementation(timed: Sequence[TimedImplementation], untuned: str) -> str:
    """The implementation to run: the fastest of those that were faster than the reference in three of four pairs. If there is none, ``untuned`` (the
    implementation before tuning), or the reference if ``untuned`` was slower.

    >>> choose_fastest_implementation([TimedImplementation("swiglu", "native", 1.3, 1.2, 1.4, 0.01), TimedImplementation("swiglu",
    ...     "compiled", 1.5, 0.9, 2.1, 0.01)], "reference")
    'native'
    """
    shown = [one for one in timed if one.low is not None and one.low > WORTH]
    if shown:
        return max(shown, key=lambda one: one.ratio or 0.0).implementation
    slower = any(
        one.implementation == split_implementation_names(untuned)[0] and one.high is not None and one.high < 1
        for one in timed
    )
    return "reference" if slower else untuned


def count_min_flops_of_op(op: Op, setting: BenchSetting) -> float:
    """The least work of all calls of the op in a step, in FLOPs. A byte counts as eight FLOPs, about as many as a machine computes in that time."""
    calls = setting.layers if op.in_block else 1
    cost = op.cost(setting.shape, DTYPES[setting.precision].itemsize)
    return calls * (cost.forward_flops + cost.backward_flops + 8 * (cost.forward_bytes + cost.backward_bytes))


def _time(
    op: Op, implementation: Implementation, setting: BenchSetting, device: str, seconds: float
) -> TimedImplementation:
    """Time one implementation. If it does not compile, run or pass the oracle on this machine, the result says why. Raises nothing."""
    name, dtype = implementation.name, DTYPES[setting.precision]
    if seconds <= 0:
        why: str = Message("kernels.no_seconds", "too little of the tuning time is left")
        return TimedImplementation(op.name, name, why=why)
    if fallback := implementation.fallback(setting.shape, dtype):
        reason = fallback.partition(": ")[2] or fallback
        return TimedImplementation(
            op.name,
            name,
            why=Message(
                "kernels.other_computes", "another implementation would run in its place ({reason})", reason=reason
            ),
        )
    try:
        checked = compare_with_fp64(op, name, CASES[0], dtype=dtype, device=device)
        if not checked.ok:
            tensors = checked.describe_failures()
            why = Message(
                "kernels.wrong_here",
                "it computes wrong results on this machine ({tensors})",
                tensors=tensors,
            )
            return TimedImplementation(op.name, name, why=why)
        with allow_bf16_matmul(dtype):
            found: Comparison = compare_implementations(
                op, name, setting=setting, device=device, pairs=PAIRS, warmup=2, seconds=seconds
            )
    except Exception as error:  # compilers raise what they like
        lines = str(error).strip().splitlines() or ["no message"]
        why = Message(
            "kernels.raised",
            "it raised {error}: {problem}",
            error=type(error).__name__,
            problem=lines[0][:200],
        )
        return TimedImplementation(op.name, name, why=why)
    return TimedImplementation(op.name, name, found.ratio, found.ratio_low, found.ratio_high, found.seconds)


def _progress(one: TimedImplementation) -> Message:
    if one.ratio is None or one.seconds is None:
        return Message(
            "kernels.not_timed",
            "{op}: {implementation} was not timed, because {why}",
            op=one.op,
            implementation=one.implementation,
            why=one.why,
        )
    return Message(
        "kernels.timed",
        "{op}: {implementation} takes {ms:.1f} ms and is {ratio:.2f} times as fast as the reference",
        op=one.op,
        implementation=one.implementation,
        ms=one.seconds * 1e3,
        ratio=one.ratio,
    )


def list_training_ops(recipe: Path) -> tuple[str, ...]:
    """The ops that training with a recipe calls. Newton–Schulz, which takes the longest to time, is left out unless the optimiser is Muon."""
    read = yaml.safe_load(recipe.read_text("utf-8"))
    optimizer = (read.get("optimizer") or {}).get("name", "adamw")
    idle = (*list_idle_ops(read.get("model") or {}), *(() if optimizer == "muon" else ("newton_schulz",)))
    return tuple(name for name in OPS if name not in idle)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.contract.tune", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--recipe", type=Path, required=True, help="take shapes and compilation from this recipe")
    parser.add_argument("--precision", choices=tuple(DTYPES), required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--ops", nargs="*", default=[], help="tune only these ops")
    chosen = parser.parse_args(arguments)
    keep_freed_memory()  # as the trainer does
    try:
        setting = BenchSetting.from_recipe_file(chosen.recipe)
        setting = replace(setting, precision=chosen.precision)
        say = lambda line: print(line, file=sys.stderr, flush=True)
        found = tune(setting, chosen.device, chosen.seconds, tuple(chosen.ops) or list_training_ops(chosen.recipe), say)
    except KernelError as error:
        print(format_error_with_code(error), file=sys.stderr)
        return 2
    print(json.dumps({"machine": machine.describe_this_machine(chosen.device).to_json(), **asdict(found)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
