"""``python -m trainer.tools.average OUT CHECKPOINT… [--weights W,W,…]``: the weighted mean of checkpoints, as a checkpoint in OUT.

Uniform without ``--weights``: the last few of a run at a constant rate, averaged, stand in for a decay of the rate (LAWA,
Kaddour 2022, arXiv 2209.14981; beside warm-up–stable–decay: Hägele et al. 2024, arXiv 2405.18392 §4). Each checkpoint is
verified as it is read; they must share one recipe and one shape. Sums are in fp64. The optimiser, the place in the data and
all counters are the newest one's; ``averaged_from`` in state.json says what went in, with which weight.

Memory: 8 bytes a parameter for the sums, one checkpoint at a time, and the newest one's optimiser. Prints the new folder.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.contract.checkpoint import format as checkpoints
from trainer.contract.checkpoint.format import Checkpoint
from trainer.contract.errors import CheckpointError, TrainerError, exit_code_of


class AverageError(TrainerError):
    """An argument is wrong; the message says which."""


def average(sources: Sequence[Path], weights: Sequence[float] | None = None) -> Checkpoint:
    """The mean of checkpoints, weighted; weights are made to sum to one.

    Raises: AverageError for a wrong list of sources or weights; CheckpointError when one does not verify, or does not fit
    the first: it names the first key or tensor that differs.
    """
    if len(sources) < 2:
        raise AverageError(f"an average needs at least two checkpoints, {len(sources)} given")
    if len({path.resolve() for path in sources}) < len(sources):
        raise AverageError("a checkpoint is named twice: give it a larger weight instead")
    weights = checked(weights if weights is not None else [1.0] * len(sources), len(sources))
    total = sum(weights)
    sums: dict[str, Tensor] = {}
    first: dict[str, Any] = {}
    newest: Checkpoint | None = None
    used = []
    for path, weight in zip(sources, weights, strict=True):
        loaded = checkpoints.load(path)
        if not first:
            first = loaded.state["recipe"]
            sums = {name: torch.zeros(tensor.shape, dtype=torch.float64) for name, tensor in loaded.model.items()}
        refuse_another(path, sources[0], loaded, first, sums)
        for name, tensor in loaded.model.items():
            sums[name].add_(tensor.double(), alpha=weight)
        used.append(
            {"manifest_sha256": checkpoints.manifest_sha256(path), "step": loaded.step, "weight": weight / total}
        )
        if newest is None or loaded.step > newest.step:
            newest = loaded
    assert newest is not None
    model = {name: (sums.pop(name) / total).to(tensor.dtype) for name, tensor in newest.model.items()}
    for name, tensor in model.items():
        if not bool(tensor.isfinite().all()):
            raise CheckpointError(f"{name} is not finite in one of the checkpoints: leave that checkpoint out")
    return Checkpoint(model, newest.optimizer, newest.state | {"averaged_from": used})


def checked(weights: Sequence[float], count: int) -> Sequence[float]:
    """Raises: AverageError for weights that nothing can be averaged with."""
    if len(weights) != count:
        raise AverageError(f"--weights: {len(weights)} given for {count} checkpoints")
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or sum(weights) <= 0:
        raise AverageError("--weights: each must be a finite number of at least zero, and one must be above zero")
    return weights


def refuse_another(
    path: Path, other: Path, loaded: Checkpoint, recipe: dict[str, Any], sums: dict[str, Tensor]
) -> None:
    """Raises: CheckpointError when ``loaded`` was not made with that recipe, or has not those tensors."""
    key = first_difference(recipe, loaded.state["recipe"])
    if key:
        raise CheckpointError(
            f"{path}: recipe.{key} differs from that of {other}: only checkpoints of one recipe can be averaged"
        )
    wanted = {name: list(tensor.shape) for name, tensor in sums.items()}
    held = {name: list(tensor.shape) for name, tensor in loaded.model.items()}
    for name in sorted(wanted.keys() | held.keys()):
        if wanted.get(name) != held.get(name):
            raise CheckpointError(
                f"{path}: {name} is {held.get(name, 'missing')}, {other} has {wanted.get(name, 'none')}"
            )


def first_difference(a: dict[str, Any], b: dict[str, Any]) -> str:
    """The first key, dots between levels, under which two recipes differ; empty when they are equal.

    >>> first_difference({"model": {"layers": 2}}, {"model": {"layers": 3}})
    'model.layers'
    """
    for key in sorted(a.keys() | b.keys()):
        x, y = a.get(key), b.get(key)
        if x != y:
            inner = first_difference(x, y) if isinstance(x, dict) and isinstance(y, dict) else ""
            return f"{key}.{inner}" if inner else key
    return ""


def main(arguments: list[str]) -> int:
    weights = None
    if "--weights" in arguments:
        at = arguments.index("--weights")
        try:
            weights = [float(word) for word in arguments[at + 1].split(",")]
        except (IndexError, ValueError):
            print("trainer.tools.average: --weights: expected numbers with commas between them", file=sys.stderr)
            return 2
        arguments = arguments[:at] + arguments[at + 2 :]
    if len(arguments) < 2 or any(word.startswith("-") for word in arguments):
        print(__doc__, file=sys.stderr)
        return 2
    out, *sources = map(Path, arguments)
    return exit_code_of(
        "trainer.tools.average", lambda: print(checkpoints.save(out, average(sources, weights))), where=out
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
