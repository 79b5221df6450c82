"""What of a model is trained: all of it, all but what is frozen, or adapters beside frozen weights.

A frozen weight needs no gradient, no moments and no fp32 copy. LoRA (arXiv 2106.09685 §4.1) adds to a matrix [out, in] the product of two matrices of
one rank, rank · (in + out) parameters. DoRA (arXiv 2402.09353 §4.1) also learns the length of each of its rows, out more.

    >>> spec = ModelSpec(vocab_size=512, d_model=64, layers=4, heads=4, kv_heads=2, head_dim=16, d_ff=128, context=32)
    >>> freeze(spec, ["embedding", "blocks.0-1"]).first_layer
    2
    >>> adapt(spec, "lora", 8, ["q"]).adapters == 4 * 8 * (64 + 64)
    True
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from models.spec import ModelSpec
from models.tensors import (
    BUFFERS,
    find_missing_layer,
    is_multi_token,
    list_block_shapes,
    list_tensor_shapes,
    matches_pattern,
)
from trainer.contract.errors import RecipeError
from trainer.contract.lora import list_adaptable_matrices


@dataclass(frozen=True)
class TrainedParts:
    """Numbers of trained parameters. Of every part that is 0, the weights are frozen."""

    layers: int  # of the layers and the last norm
    embedding: int  # a tied embedding is also the head
    head: int
    adapters: int = 0
    largest_layer: int = 0  # in the layer with most, adapters included
    first_layer: int = 0  # gradients reach no layer below, so no layer below keeps activations
    kept_by_adapters: int = 0  # elements that the adapters of the layer with most keep for each token

    @property
    def weights(self) -> int:
        """Weights of the model that are trained."""
        return self.layers + self.embedding + self.head

    @property
    def parameters(self) -> int:
        """All trained parameters."""
        return self.weights + self.adapters


def train_everything(model: ModelSpec) -> TrainedParts:
    return freeze(model, ())


def freeze(model: ModelSpec, patterns: Sequence[str]) -> TrainedParts:
    """Train all but the tensors that ``patterns`` name, and the layers for multi-token prediction: a recipe without ``multi_token_weight`` carries
    them along.

    A pattern is a native tensor's name or its beginning (``embedding``, ``blocks.3``), a range of layers (``blocks.0-11``), or has wildcards
    (``blocks.*.experts_*``). Raises: RecipeError if a pattern names nothing or a layer that the model lacks, or if nothing is left to train.
    """
    trained = {name: math.prod(shape) for name, shape in list_tensor_shapes(model).items() if not _is_buffer(name)}
    trained = {name: size for name, size in trained.items() if not is_multi_token(name)}
    for pattern in patterns:
        named = [name for name in list_tensor_shapes(model) if matches_pattern(name, pattern)]
        if (layer := find_missing_layer(pattern, model.layers)) is not None:
            raise RecipeError(
                "plan.freezes_missing_layer",
                "freeze: {pattern!r} names layer {layer}, but the last layer is {last}.",
                pattern=pattern,
                layer=layer,
                last=model.layers - 1,
            )
        if not named:
            raise RecipeError(
                "plan.freezes_nothing",
                "freeze: {pattern!r} is no tensor of the model. Tensors are named embedding, head (if it is not tied), final_norm, blocks.0, "
                "blocks.0-{last}, blocks.*.q and so on.",
                pattern=pattern,
                last=model.layers - 1,
            )
        for name in named:
            trained.pop(name, None)
    if not trained:
        raise RecipeError("plan.all_frozen", "freeze: {patterns} leave nothing to train.", patterns=list(patterns))
    by_layer = [0] * model.layers
    for name, size in trained.items():
        if name.startswith("blocks."):
            by_layer[int(name.split(".")[1])] += size
    ends = {name: trained.get(name, 0) for name in ("embedding", "head")}
    reached = [0] if ends["embedding"] else [layer for layer, size in enumerate(by_layer) if size]
    return TrainedParts(
        sum(trained.values()) - sum(ends.values()),
        **ends,
        largest_layer=max(by_layer),
        first_layer=min(reached, default=model.layers),
    )


def adapt(
    model: ModelSpec, kind: Literal["lora", "dora"], rank: int, targets: Sequence[str] | None = None
) -> TrainedParts:
    """Train adapters of ``rank`` alone. ``targets``: native names of matrices in a layer; None: all matrices of
    attention and of dense MLPs (QLoRA, arXiv 2305.14314 §4).

    Raises: RecipeError for a target that cannot have an adapter, or a rank that saves nothing.
    """
    by_layer, kept = [0] * model.layers, [0] * model.layers
    adaptable = list_adaptable_matrices(model)
    chosen = adaptable if targets is None else set(targets)
    seen: set[str] = set()
    for layer in range(model.layers):
        for key, shape in list_block_shapes(model, layer).items():
            if key not in chosen:
                continue
            seen.add(key)
            if key not in adaptable:
                raise _no_target(model, key)
            outputs, inputs = shape
            if rank * (outputs + inputs) >= outputs * inputs:
                raise RecipeError(
                    "plan.rank_too_large",
                    "adapt: an adapter of rank {rank} has as many parameters as the matrix {key} [{outputs}, {inputs}]. Choose a smaller rank, or "
                    "train the whole model.",
                    rank=rank,
                    key=key,
                    outputs=outputs,
                    inputs=inputs,
                )
            by_layer[layer] += rank * (outputs + inputs) + outputs * (kind == "dora")
            kept[layer] += rank + outputs * (kind == "dora")
    if missing := next((key for key in targets or () if key not in seen), None):
        raise _no_target(model, missing)
    first = next(layer for layer, size in enumerate(by_layer) if size)
    return TrainedParts(
        0,
        0,
        0,
        adapters=sum(by_layer),
        largest_layer=max(by_layer),
        first_layer=first,
        kept_by_adapters=max(kept),
    )


def _no_target(model: ModelSpec, key: str) -> RecipeError:
    return RecipeError(
        "plan.no_adapter",
        "adapt: {key} cannot have an adapter in this model. Possible targets: {known}.",
        key=key,
        known=sorted(list_adaptable_matrices(model)),
    )


def _is_buffer(name: str) -> bool:
    return name.rpartition(".")[2] in BUFFERS
