"""``python -m trainer.tools.average OUT CHECKPOINT… [--weights W,W,…]``: the weighted mean of checkpoints, as a checkpoint in OUT.

Without ``--weights`` all weights are equal. The mean of the last few checkpoints at a constant rate can replace a decay of the rate (LAWA,
Kaddour 2022, arXiv 2209.14981; compared with warm-up–stable–decay: Hägele et al. 2024, arXiv 2405.18392 §4). The mean of a model and of the same
model trained further can keep more of what it knew (WiSE-FT, arXiv 2109.01903 §3). Each checkpoint is verified when it is read. Their recipes must
describe one function of the same weights; other keys may differ. LoRA's matrices are merged into the weights first, because the mean of products is
not the product of means. Sums are in fp64. The recipe, the optimiser, the position in the data and all counters are the newest checkpoint's, without
LoRA. ``averaged_from`` in state.json names the checkpoints and their weights.

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

from kernels.contract.message import format_error_with_code
from trainer.contract.checkpoint import format as checkpoints
from trainer.contract.checkpoint.format import Checkpoint
from trainer.contract.checkpoint.model_function_changes import find_model_function_changes
from trainer.contract.errors import CheckpointError, TrainerError, run_and_get_exit_code
from trainer.contract.lora import AdaptRecipe, is_lora_tensor, merge_lora


class AverageError(TrainerError):
    """An argument of ``average_checkpoints`` is wrong. The message names the argument."""


def average_checkpoints(sources: Sequence[Path], weights: Sequence[float] | None = None) -> Checkpoint:
    """The weighted mean of checkpoints. The weights are scaled to sum to one.

    Raises: AverageError if the list of sources or weights is wrong. CheckpointError if a checkpoint cannot be verified, or does not fit the first
    one. Its message names the first key or tensor that differs.
    """
    if len(sources) < 2:
        raise AverageError(
            "trainer.one_checkpoint",
            "An average needs at least two checkpoints, but {given:,|checkpoint was|checkpoints were} given.",
            given=len(sources),
        )
    if len({path.resolve() for path in sources}) < len(sources):
        raise AverageError(
            "trainer.checkpoint_twice",
            "A checkpoint is given twice. Give each checkpoint once. To make one count more, raise its weight in "
            "--weights.",
        )
    weights = check_weights(weights if weights is not None else [1.0] * len(sources), len(sources))
    total = sum(weights)
    sums: dict[str, Tensor] = {}
    first: dict[str, Any] = {}
    newest: Checkpoint | None = None
    used = []
    for path, weight in zip(sources, weights, strict=True):
        loaded = load_without_lora(path)
        if not first:
            first = loaded.state["recipe"]
            sums = {name: torch.zeros(tensor.shape, dtype=torch.float64) for name, tensor in loaded.model.items()}
        refuse_different_model(path, sources[0], loaded, first, sums)
        for name, tensor in loaded.model.items():
            sums[name].add_(tensor.double(), alpha=weight)
        used.append({"manifest_sha256": checkpoints.hash_manifest(path), "step": loaded.step, "weight": weight / total})
        if newest is None or loaded.step > newest.step:
            newest = loaded
    assert newest is not None
    model = {name: (sums.pop(name) / total).to(tensor.dtype) for name, tensor in newest.model.items()}
    for name, tensor in model.items():
        if not bool(tensor.isfinite().all()):
            raise CheckpointError(
                "trainer.not_finite",
                "Tensor {tensor} is not finite in one of the checkpoints. Leave that checkpoint out.",
                tensor=name,
            )
    return Checkpoint(model, newest.optimizer, newest.state | {"averaged_from": used})


def load_without_lora(path: Path) -> Checkpoint:
    """A verified checkpoint with LoRA's matrices merged into the weights: its recipe has no ``adapt``, and its optimiser no state of the matrices."""
    loaded = checkpoints.load_checkpoint(path)
    recipe = dict(loaded.state["recipe"])
    if not (adapt := recipe.pop("adapt", None)):
        return loaded
    model = merge_lora(loaded.model, AdaptRecipe.model_validate(adapt))
    optimizer = {name: tensor for name, tensor in loaded.optimizer.items() if not is_lora_tensor(name)}
    return Checkpoint(model, optimizer, loaded.state | {"recipe": recipe})


def check_weights(weights: Sequence[float], count: int) -> Sequence[float]:
    """Return the weights. Raises: AverageError if there are not ``count`` weights, or they cannot be used for an average."""
    if len(weights) != count:
        raise AverageError(
            "trainer.weight_count",
            "--weights: {given} weights were given for {checkpoints} checkpoints. Give one weight for each checkpoint.",
            given=len(weights),
            checkpoints=count,
        )
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or sum(weights) <= 0:
        raise AverageError(
            "trainer.wrong_weight",
            "--weights: each weight must be a finite number of at least zero, and at least one weight must be above "
            "zero.",
        )
    return weights


def refuse_different_model(
    path: Path, other: Path, loaded: Checkpoint, recipe: dict[str, Any], sums: dict[str, Tensor]
) -> None:
    """Raises: CheckpointError if the weights of ``loaded`` are those of another function, or it has other tensors. ``recipe``: of ``other``."""
    changes = find_model_function_changes(recipe["model"], loaded.state["recipe"]["model"])
    if changes:
        key = next(iter(changes))
        raise CheckpointError(
            "trainer.other_recipe",
            "{checkpoint}: recipe.model.{key} is {found}, but {expected} in {other}. Only checkpoints of one function can be averaged.",
            checkpoint=str(path),
            key=key,
            found=changes[key][1],
            expected=changes[key][0],
            other=str(other),
        )
    wanted = {name: list(tensor.shape) for name, tensor in sums.items()}
    held = {name: list(tensor.shape) for name, tensor in loaded.model.items()}
    for name in sorted(wanted.keys() | held.keys()):
        if wanted.get(name) != held.get(name):
            raise CheckpointError(
                "trainer.other_tensor",
                "{checkpoint}: the shape of tensor {tensor} is {found}, but in {other} it is {expected}.",
                checkpoint=str(path),
                tensor=name,
                found=str(held.get(name, "missing")),
                other=str(other),
                expected=str(wanted.get(name, "missing")),
            )


def main(arguments: list[str]) -> int:
    weights = None
    if "--weights" in arguments:
        at = arguments.index("--weights")
        try:
            weights = [float(word) for word in arguments[at + 1].split(",")]
        except (IndexError, ValueError):
            said = AverageError(
                "trainer.not_weights", "The value of --weights must be numbers with commas between them."
            )
            print(f"trainer.tools.average: {format_error_with_code(said)}", file=sys.stderr)
            return 2
        arguments = arguments[:at] + arguments[at + 2 :]
    if len(arguments) < 2 or any(word.startswith("-") for word in arguments):
        print(__doc__, file=sys.stderr)
        return 2
    out, *sources = map(Path, arguments)
    return run_and_get_exit_code(
        "trainer.tools.average",
        lambda: print(checkpoints.save_checkpoint(out, average_checkpoints(sources, weights))),
        output_folder=out,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
