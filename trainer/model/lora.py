"""LoRA and DoRA in the forward pass: y = x Wᵀ + scale · (x Aᵀ) Bᵀ, beside the product with the unchanged matrix.

The change is not merged into W. A merged matrix needs its whole gradient, which is a third of a layer's products, and autograd keeps a merged copy of
every matrix until the backward pass. The two thin products take rank · (in + out) / (in · out) of the product with W (LoRA, arXiv 2106.09685 §4.1).
They are added in place: sums in tensors of their own left holes in a CPU's heap that doubled the memory of the activations.
DoRA multiplies each output by its row's length / norm. The norm of a row of W + scale · B A follows from products with A alone.

A separate file, because a model that is trained whole needs none of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.contract.lora import LEAST_NORM, LENGTH, A, B
from trainer.parallel.ranks import get_local_part

Block = Any  # ``trainer.model.block`` has the class, and imports this file


def multiply_adapted(block: Block, x_BTD: Tensor, names: Sequence[str]) -> list[Tensor]:
    """x (W + scale · B A)ᵀ for each matrix of these names, of which at least one is adapted. For DoRA it is scaled by row."""
    weights = [block.weight(getattr(block, name)) for name in names]
    if block.fp8:  # the product with W has operands of eight bits, the thin ones have not
        products = [block.multiply(x_BTD, weight) for weight in weights]
        return [
            scale_rows(block, y + F.linear(F.linear(x_BTD, read_a(block, [name])), read_b(block, name)), name)
            if name in block.adapted
            else y
            for y, name in zip(products, names, strict=True)
        ]
    sizes = [len(weight) for weight in weights]
    if block.joined and len(names) > 1:
        joined_XD = block.joined_frozen.get(tuple(names))
        joined_BTX = multiply_joined(block, x_BTD, torch.cat(weights) if joined_XD is None else joined_XD, names, sizes)
        products = list(joined_BTX.split(sizes, dim=-1))
    else:
        products = [
            multiply_joined(block, x_BTD, weight, [name], [size])
            if name in block.adapted
            else block.multiply(x_BTD, weight)
            for weight, name, size in zip(weights, names, sizes, strict=True)
        ]
    return [scale_rows(block, y, name) for y, name in zip(products, names, strict=True)]


def multiply_joined(block: Block, x_BTD: Tensor, weight_XD: Tensor, names: Sequence[str], sizes: list[int]) -> Tensor:
    """``AdaptedProduct`` with matrices whose rows, ``sizes`` many, follow one another in ``weight_XD``."""
    adapted = [name for name in names if name in block.adapted]
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    rows = tuple((end - size, end) for name, size, end in zip(names, sizes, ends) if name in block.adapted)
    a_RD = read_a(block, adapted)
    product: Tensor = AdaptedProduct.apply(x_BTD, weight_XD, a_RD, rows, *(read_b(block, name) for name in adapted))  # type: ignore[no-untyped-call]
    return product


def read_a(block: Block, names: Sequence[str]) -> Tensor:
    """A of each of these matrices, one below the other, in the dtype of the layer's products."""
    return torch.cat([getattr(block, f"{name}{A}") for name in names]).to(block.dtype)


def read_b(block: Block, name: str) -> Tensor:
    """scale · B in the dtype of the layer's products."""
    b_XR: Tensor = getattr(block, f"{name}{B}")
    return (b_XR if block.adapt_scale == 1 else b_XR * block.adapt_scale).to(block.dtype)


class AdaptedProduct(torch.autograd.Function):
    """x Wᵀ, to whose columns ``rows[i]`` (first, end) is added (x A_iᵀ) B_iᵀ. A [Σ rank, D] has the A_i below one another. W gets no gradient."""

    @staticmethod
    def forward(
        ctx: Any, x_BTD: Tensor, weight_XD: Tensor, a_RD: Tensor, rows: tuple[tuple[int, int], ...], *b: Tensor
    ) -> Tensor:
        x_ND = x_BTD.flatten(0, -2)
        y_NX, inner_NR = x_ND @ weight_XD.t(), x_ND @ a_RD.t()
        for (first, end), b_Xr, inner_Nr in zip(rows, b, inner_NR.split([m.shape[1] for m in b], dim=1), strict=True):
            y_NX[:, first:end].addmm_(inner_Nr, b_Xr.t())
        ctx.save_for_backward(x_BTD, weight_XD, a_RD, inner_NR, *b)
        ctx.rows = rows
        return y_NX.unflatten(0, x_BTD.shape[:-1])

    @staticmethod
    def backward(ctx: Any, dy_BTX: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x_BTD, weight_XD, a_RD, inner_NR, *b = ctx.saved_tensors
        dy_NX, x_ND = dy_BTX.flatten(0, -2), x_BTD.flatten(0, -2)
        parts = [dy_NX[:, first:end] for first, end in ctx.rows]
        inners = inner_NR.split([m.shape[1] for m in b], dim=1)
        db = [dy.t() @ inner_Nr for dy, inner_Nr in zip(parts, inners, strict=True)]
        dinner_NR = torch.cat([dy @ b_Xr for dy, b_Xr in zip(parts, b, strict=True)], dim=1)
        dx_BTD = None
        if ctx.needs_input_grad[0]:
            dx_BTD = (dy_NX @ weight_XD).addmm_(dinner_NR, a_RD).view(x_BTD.shape)
        return dx_BTD, None, dinner_NR.t() @ x_ND, None, *db


def scale_rows(block: Block, y_BTX: Tensor, name: str) -> Tensor:
    """For DoRA, m · y / ‖W + scale · B A‖ of each row. The norm gets no gradient (arXiv 2402.09353 §4.3)."""
    length_X = getattr(block, f"{name}{LENGTH}", None)
    return y_BTX if length_X is None else (y_BTX * (length_X.float() / measure_rows(block, name))).to(block.dtype)


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
