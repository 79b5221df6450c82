"""Times one implementation of an op against another: ``python -m kernels.contract.bench --op attention --implementation recompute``.

Runs of both implementations alternate in one process. The command prints one JSON object: the seconds of a forward and backward pass at the
recipe's shapes, and the median of the paired ratios, because machines are noisy. If the recipe compiles its blocks, both implementations are
compiled.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.contract.host_memory import keep_freed_memory
from kernels.contract.machine import choose_fast_precision
from kernels.contract.message import format_error_with_code
from kernels.contract.op import KernelError, Op, OracleCase, Shape, make_unreadable_file_error
from kernels.contract.precision import DTYPES, allow_bf16_matmul
from kernels.contract.registry import DEVICE_CLASSES, OPS, find_implementation, find_op, make_unknown_device_class_error
from kernels.contract.strict_yaml import read_yaml


@dataclass(frozen=True)
class BenchSetting:
    """The setting in which a recipe runs an op: shapes, precision, and whether blocks are compiled."""

    shape: Shape = Shape()
    precision: str = "bf16"
    compile: bool = False
    layers: int = 1  # number of layers: how often a step calls an op that is part of a block

    @classmethod
    def from_recipe_file(cls, path: Path | str) -> BenchSetting:
        """The setting of a recipe's file. Raises: KernelError if the file is not a recipe."""
        try:
            recipe: Any = read_yaml(Path(path).read_text(encoding="utf-8"), str(path), KernelError)
            return cls.from_recipe_mapping(recipe)
        except (OSError, UnicodeDecodeError) as error:
            raise make_unreadable_file_error(path, error) from error
        except (KeyError, TypeError) as error:
            raise KernelError(
                "kernels.not_a_recipe",
                "{file} is not a recipe. A key is missing or has the wrong type: {problem}",
                file=str(path),
                problem=str(error),
            ) from error

    @classmethod
    def from_recipe_mapping(cls, recipe: dict[str, Any]) -> BenchSetting:
        sizes = {
            k: recipe["model"][k] for k in ("context", "d_model", "heads", "kv_heads", "head_dim", "d_ff", "vocab_size")
        }
        batch = recipe["batch"]
        shape = Shape(batch=batch.get("micro_sequences") or batch["sequences"], **sizes)
        return cls(
            shape, recipe.get("precision", "auto"), recipe.get("compile", True), recipe["model"].get("layers", 1)
        )


@dataclass(frozen=True)
class Comparison:
    """The times of two implementations. ``ratio``: the time of ``against`` divided by that of ``implementation``, so above one means faster.
    ``seconds`` and ``against_seconds``: one forward and backward pass."""

    op: str
    implementation: str
    against: str
    device: str
    precision: str
    compiled: bool
    seconds: float
    against_seconds: float
    ratio: float
    ratio_low: float  # quartiles of the paired ratios
    ratio_high: float
    pairs: int


def compare_implementations(
    name: str | Op,
    implementation: str,
    against: str = "reference",
    setting: BenchSetting = BenchSetting(),
    *,
    device: str = "cpu",
    pairs: int = 9,
    warmup: int = 3,
    seconds: float = math.inf,
) -> Comparison:
    """Time two implementations in ``pairs`` of runs: fewer if ``seconds``, which include compilation, are over, but at least one.

    Raises: KernelError if the op or an implementation does not exist or does not run on the device, or if there is no such device.
    """
    op = find_op(name) if isinstance(name, str) else name
    deadline = time.monotonic() + seconds
    if device.split(":")[0] not in DEVICE_CLASSES:
        raise make_unknown_device_class_error(device)
    if device != "cpu" and not torch.cuda.is_available():
        raise KernelError(
            "kernels.no_gpu",
            "Device {device!r} cannot be used, because torch sees no GPU on this machine. Use 'cpu'.",
            device=device,
        )
    case = OracleCase("recipe", setting.shape)
    both = [find_implementation(op, n, torch.device(device).type) for n in (against, implementation)]
    functions = [one.function for one in both]
    if setting.compile and op.in_block:
        functions = [torch.compile(f, dynamic=False) for f in functions]
    steps = [
        _step(
            f, one.prepare_inputs(op.inputs(case, device=device, dtype=DTYPES[setting.precision])), op.gradients, device
        )
        for f, one in zip(functions, both)
    ]
    for step in steps:
        step()
        for _ in range(warmup - 1):
            if time.monotonic() < deadline:
                step()
    times: list[list[float]] = [[], []]
    for pair in range(pairs):
        if pair and time.monotonic() > deadline:
            break
        for side in (0, 1) if pair % 2 else (1, 0):
            began = time.perf_counter()
            steps[side]()
            times[side].append(time.perf_counter() - began)
    ratios = sorted(a / b for a, b in zip(*times))
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    base, mine = (statistics.median(t) for t in times)
    return Comparison(
        op.name,
        implementation,
        against,
        device,
        setting.precision,
        setting.compile and op.in_block,
        mine,
        base,
        quartiles[1],
        quartiles[0],
        quartiles[2],
        len(ratios),
    )


def _step(
    function: Callable[..., Any], inputs: tuple[Any, ...], gradients: tuple[int, ...], device: str
) -> Callable[[], None]:
    """A function that runs one forward and backward pass and waits for the device. Upstream gradients are dense and made beforehand."""
    leaves = [inputs[p] for p in gradients]
    upstream = [torch.ones_like(o) if o.ndim == 0 else torch.randn_like(o) for o in _wanted(function(*inputs))]

    def step() -> None:
        outputs = function(*inputs)
        if leaves:
            torch.autograd.grad(_wanted(outputs), leaves, upstream)
        if device != "cpu":
            torch.cuda.synchronize()

    return step


def _wanted(outputs: Any) -> list[Tensor]:
    """The outputs that receive an upstream gradient."""
    return [o for o in (outputs if isinstance(outputs, tuple) else (outputs,)) if o is not None and o.requires_grad]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.contract.bench", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--list", action="store_true", help="print every op and implementation")
    parser.add_argument("--op")
    parser.add_argument("--implementation")
    parser.add_argument("--against", default="reference")
    parser.add_argument("--recipe", type=Path, help="take shapes, precision and compilation from this recipe")
    parser.add_argument(
        "--precision",
        choices=tuple(DTYPES),
        help="default: the recipe's precision; for 'auto', the one in which this machine multiplies fastest",
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pairs", type=int, default=9)
    chosen = parser.parse_args(arguments)
    keep_freed_memory()  # as the trainer does: page faults would drown what is measured
    try:
        if chosen.list or not (chosen.op and chosen.implementation):
            table = {
                o.name: {
                    i.name: {"about": i.description, "runs_here": i.can_run_on(chosen.device)}
                    for i in o.implementations.values()
                }
                for o in OPS.values()
            }
            print(json.dumps(table, indent=1))
            return 0
        setting = BenchSetting.from_recipe_file(chosen.recipe) if chosen.recipe else BenchSetting()
        given = chosen.precision or setting.precision
        setting = replace(setting, precision=choose_fast_precision(chosen.device) if given == "auto" else given)
        with allow_bf16_matmul(DTYPES[setting.precision]):  # as the trainer does
            found = compare_implementations(
                chosen.op,
                chosen.implementation,
                chosen.against,
                setting,
                device=chosen.device,
                pairs=chosen.pairs,
            )
        print(json.dumps(asdict(found)))
    except KernelError as error:
        print(format_error_with_code(error), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
