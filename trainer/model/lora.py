"""LoRA and DoRA in the forward pass: y = x Wᵀ + scale · (x Aᵀ) Bᵀ, beside the product with the unchanged matrix.

The change is not merged into W. A merged matrix needs its whole gradient, which is a third of a layer's products, and autograd keeps a merged copy of
every matrix until the backward pass. The two thin products take rank · (in + out) / (in · out) of the product with W (LoRA, arXiv 2106.09685 §4.1).
DoRA multiplies each output by its row's length / norm. The norm of a row of W + scale · B A follows from products with A alone.

A separate file, because a model that is trained whole needs none of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.contract.lora import LEAST_NORM, LENGTH, A, AdaptRecipe, B
from trainer.parallel.ranks import get_local_part

Block = Any  # ``trainer.model.transformer`` has the class, and imports this file
Change = Callable[[Block, Sequence[Tensor], Tensor, Sequence[str]], Sequence[Tensor]]


def choose_change(adapt: AdaptRecipe | None) -> Change:
    """The function (block, products, x, names) → products that adds what is learned to the products of ``x`` with the matrices of these names.
    It is the same object for every layer, so that layers share a compiled graph."""
    if adapt is None:
        return add_nothing
    return add_dora if adapt.kind == "dora" else add_lora


def add_nothing(block: Block, products: Sequence[Tensor], x_BTD: Tensor, names: Sequence[str]) -> Sequence[Tensor]:
    return products


def add_lora(block: Block, products: Sequence[Tensor], x_BTD: Tensor, names: Sequence[str]) -> Sequence[Tensor]:
    """x Wᵀ + scale · (x Aᵀ) Bᵀ in the dtype of the layer's products, for each matrix that is adapted."""
    adapted = [name for name in names if name in block.adapted]
    if not adapted:
        return products
    # one product for all, as their input is the same
    inner_BTR = F.linear(x_BTD, torch.cat([getattr(block, f"{name}{A}") for name in adapted]).to(block.dtype))
    inner = dict(zip(adapted, inner_BTR.split(block.adapt_rank, dim=-1)))
    return [
        y_BTX + F.linear(inner[name], scaled_b(block, name)) if name in inner else y_BTX
        for y_BTX, name in zip(products, names, strict=True)
    ]


def scaled_b(block: Block, name: str) -> Tensor:
    b_XR: Tensor = getattr(block, f"{name}{B}")
    return (b_XR if block.adapt_scale == 1 else b_XR * block.adapt_scale).to(block.dtype)


def add_dora(block: Block, products: Sequence[Tensor], x_BTD: Tensor, names: Sequence[str]) -> Sequence[Tensor]:
    """m · (x (W + scale · B A)ᵀ) / ‖W + scale · B A‖ for each row. The norm gets no gradient (arXiv 2402.09353 §4.3)."""
    return [
        (y_BTX * (getattr(block, f"{name}{LENGTH}").float() / measure_rows(block, name))).to(block.dtype)
        if name in block.adapted
        else y_BTX
        for y_BTX, name in zip(add_lora(block, products, x_BTD, names), names, strict=True)
    ]


@torch.no_grad()
def measure_rows(block: Block, name: str) -> Tensor:
    """‖W + scale · B A‖ of each row, fp32 [out], of W as the products have it. ‖w + b A‖² = ‖w‖² + 2 w Aᵀ bᵀ + b A Aᵀ bᵀ."""
    weight, a = block.weight(getattr(block, name)), getattr(block, f"{name}{A}").float()
    b = block.adapt_scale * getattr(block, f"{name}{B}").float()
    squares = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).square()
    crossed = F.linear(weight, a.to(weight.dtype)).float() * b
    return (squares + (2 * crossed + (b @ (a @ a.t())) * b).sum(1)).clamp_min(0).sqrt().clamp_min(LEAST_NORM)


def set_dora_lengths(parameters: Iterable[tuple[str, nn.Parameter]], weights: Mapping[str, Tensor]) -> None:
    """Set each DoRA length to the norm of its row of ``weights``, so that the function does not change. Each rank has whole rows of its part."""
    with torch.no_grad():
        for name, parameter in parameters:
            if name.endswith(LENGTH):
                get_local_part(parameter).copy_(weights[name.removesuffix(LENGTH)].float().norm(dim=1))
