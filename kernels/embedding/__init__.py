"""The embedding: row t of the weight for each token t. The backward pass sums the gradients of all places that have the same token.

The eager op sums in the weight's dtype. On a GPU it uses atomic additions, whose order can change. ``triton`` sorts the places by token and sums
the gradients of each token in fp32, in the order of their places. Therefore it always gives the same bits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
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


def reference(tokens_X: Tensor, weight_VD: Tensor) -> Tensor:
    """tokens: any shape, integers in [0, V). weight: [V, D]. Returns [..., D] in the weight's dtype."""
    return F.embedding(tokens_X, weight_VD)


def cost(shape: Shape, itemsize: int) -> Cost:
    """The forward pass moves one row for each token. The backward pass reads one row for each token, and writes the gradient of the whole table."""
    elements, table = shape.tokens * shape.d_model, shape.vocab_size * shape.d_model
    return Cost(2 * elements * itemsize, 0, (elements + table) * itemsize, elements)


def make_inputs(shape: Shape, generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Tokens as in text: a few are frequent (Zipf's law), and many never occur."""
    V = shape.vocab_size
    ranks = torch.rand((shape.batch, shape.context), generator=generator).mul(torch.tensor(V + 1.0).log()).exp() - 1
    return ranks.long().clamp(max=V - 1).to(device), draw_normal_tensor(generator, (V, shape.d_model), device, dtype)


TRITON = make_triton_implementation(
    "kernels.embedding.triton",
    function="embedding",
    about="backward by sorted places, summed in fp32 in one Triton kernel",
)
OP = make_op(
    "embedding",
    reference,
    cost=cost,
    make_inputs=make_inputs,
    gradients=(1,),
    in_block=False,
    implementations=(make_compiled_implementation(reference), TRITON),
)
