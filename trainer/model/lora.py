"""LoRA and DoRA in the forward pass: each adapted matrix is merged anew for each use, so that every kernel sees an ordinary weight.

A merge costs 2 · rank · out · in FLOPs, where the product with N tokens costs 2 · N · out · in. The memory of gradients and optimiser is saved.

A separate file, because a model that is trained whole needs none of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from trainer.contract.lora import LEAST_NORM, LENGTH, A, AdaptRecipe, B
from trainer.parallel.ranks import get_local_part

Block = Any  # ``trainer.model.transformer`` has the class, and imports this file


def choose_matrix_reader(adapt: AdaptRecipe | None) -> Callable[[Block, str], Tensor]:
    """The function that returns a matrix of a block by name. It is the same object for every layer, so that layers share a compiled graph."""
    if adapt is None:
        return read_matrix
    return read_with_dora if adapt.kind == "dora" else read_with_lora


def read_matrix(block: Block, name: str) -> Tensor:
    found: Tensor = block.weight(getattr(block, name))
    return found


def read_with_lora(block: Block, name: str) -> Tensor:
    """W + scale · B A in the dtype of the layer's products, computed in fp32."""
    if name not in block.adapted:
        return read_matrix(block, name)
    return add_change(block, name).to(block.dtype)


def read_with_dora(block: Block, name: str) -> Tensor:
    """m · (W + scale · B A) / ‖W + scale · B A‖ by row. The norm gets no gradient (arXiv 2402.09353 §4.3)."""
    if name not in block.adapted:
        return read_matrix(block, name)
    whole = add_change(block, name)
    length = getattr(block, f"{name}{LENGTH}").float() / whole.detach().norm(dim=1).clamp_min(LEAST_NORM)
    return (whole * length.unsqueeze(1)).to(block.dtype)


def add_change(block: Block, name: str) -> Tensor:
    a, b = getattr(block, f"{name}{A}"), getattr(block, f"{name}{B}")
    return torch.addmm(getattr(block, name).float(), b.float(), a.float(), alpha=block.adapt_scale)


def set_dora_lengths(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Set each DoRA length to the norm of its row of the weights, so that the function does not change. Each rank has whole rows of its part."""
    held = {name: get_local_part(parameter) for name, parameter in parameters}
    with torch.no_grad():
        for name, lengths in held.items():
            if name.endswith(LENGTH):
                lengths.copy_(held[name.removesuffix(LENGTH)].norm(dim=1))
