"""LoRA and DoRA in the forward pass: each adapted matrix is merged anew for each use, so that every kernel sees an ordinary weight.

A merge costs 2 · rank · out · in FLOPs, where the product with N tokens costs 2 · N · out · in. The memory of gradients and optimiser is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from models.tensors import Shape
from trainer.contract.lora import LENGTH, A, AdaptRecipe, B, list_lora_shapes
from trainer.parallel.ranks import get_local_part

if TYPE_CHECKING:
    from torch import nn

    from trainer.model.transformer import Block


def choose_matrix_reader(shapes: Mapping[str, Shape], adapt: AdaptRecipe | None) -> Callable[[Block, str], Tensor]:
    """The function that returns a matrix of a block by name. ``shapes``: the tensors of the block."""
    if adapt is None:
        return read_matrix
    adapted = {name.removesuffix(A) for name in list_lora_shapes(shapes, adapt) if name.endswith(A)}
    merge, scale = (merge_dora if adapt.kind == "dora" else merge_lora), adapt.scale
    return lambda block, name: merge(block, name, scale) if name in adapted else read_matrix(block, name)


def read_matrix(block: Block, name: str) -> Tensor:
    return block.weight(getattr(block, name))


def merge_lora(block: Block, name: str, scale: float) -> Tensor:
    """W + scale · B A in the dtype of the layer's products, computed in fp32."""
    return _sum(block, name, scale).to(block.dtype)


def merge_dora(block: Block, name: str, scale: float) -> Tensor:
    """m · (W + scale · B A) / ‖W + scale · B A‖ by row. The norm gets no gradient (arXiv 2402.09353 §4.3)."""
    whole = _sum(block, name, scale)
    length = getattr(block, f"{name}{LENGTH}").float() / whole.detach().norm(dim=1)
    return (whole * length.unsqueeze(1)).to(block.dtype)


def _sum(block: Block, name: str, scale: float) -> Tensor:
    a, b = getattr(block, f"{name}{A}"), getattr(block, f"{name}{B}")
    return torch.addmm(getattr(block, name).float(), b.float(), a.float(), alpha=scale)


def set_dora_lengths(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Set each DoRA length to the norm of its row of the weights, so that the function does not change. Each rank has whole rows of its part."""
    held = {name: get_local_part(parameter) for name, parameter in parameters}
    with torch.no_grad():
        for name, lengths in held.items():
            if name.endswith(LENGTH):
                lengths.copy_(held[name.removesuffix(LENGTH)].norm(dim=1))
