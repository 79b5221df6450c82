"""QK-norm and then rotary position embedding (RoPE), for queries or keys: RMSNorm over each head, then a rotation of its two halves.

QK-norm: Henry et al. 2020, arXiv:2010.04245. RoPE: Su et al. 2021, arXiv:2104.09864, in the rotate-half layout of Hugging Face models: element k is
paired with k + K/2, and cos and sin [B, T, K] repeat their first half.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.contract.op import (
    Cost,
    Inputs,
    Shape,
    draw_normal_tensor,
    make_compiled_implementation,
    make_op,
    make_triton_implementation,
)
from kernels.rms_norm import EPS
from kernels.rms_norm import reference as rms_norm

THETA = 10_000.0


def reference(x_BTHK: Tensor, weight_K: Tensor, cos_BTK: Tensor, sin_BTK: Tensor, eps: float) -> Tensor:
    """x [B, T, heads, K], weight [K], cos and sin [B, T, K] of each token's position. The result has the dtype of x."""
    return apply_rope(rms_norm(x_BTHK, weight_K, eps), cos_BTK, sin_BTK)


def apply_rope(x_BTHK: Tensor, cos_BTK: Tensor, sin_BTK: Tensor) -> Tensor:
    """RoPE alone. The result has the dtype of x."""
    first, second = x_BTHK.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return (x_BTHK * cos_BTK.unsqueeze(2) + rotated * sin_BTK.unsqueeze(2)).to(x_BTHK.dtype)


def cost(shape: Shape, itemsize: int) -> Cost:
    """The cost of one call for the queries."""
    elements = shape.tokens * shape.heads * shape.head_dim
    return Cost(2 * elements * itemsize, 7 * elements, 3 * elements * itemsize, 13 * elements)


def make_inputs(shape: Shape, generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> Inputs:
    x = draw_normal_tensor(generator, (shape.batch, shape.context, shape.heads, shape.head_dim), device, dtype)
    weight = 1 + draw_normal_tensor(generator, (shape.head_dim,), device, dtype, 0.1)
    frequency = THETA ** (-torch.arange(0, shape.head_dim, 2) / shape.head_dim)
    angle = torch.arange(shape.context)[:, None] * frequency
    angle = torch.cat((angle, angle), dim=-1).expand(shape.batch, -1, -1)
    return x, weight, angle.cos().to(device, dtype).contiguous(), angle.sin().to(device, dtype).contiguous(), EPS


TRITON = make_triton_implementation("kernels.qk_norm_rope.triton", function="qk_norm_rope")
OP = make_op(
    "qk_norm_rope",
    reference,
    cost=cost,
    make_inputs=make_inputs,
    gradients=(0, 1),
    implementations=(make_compiled_implementation(reference), TRITON),
)
