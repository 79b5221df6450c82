"""Registers the gradient and the shapes of results with torch, for the C++ op and for the Triton op."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.library import CustomOpDef


def register_gradient(forward_op: CustomOpDef, backward_op: CustomOpDef) -> None:
    """Register ``backward_op``, (dout, gate, up) → (dgate, dup), as the gradient of ``forward_op``, and fake implementations of both."""

    def keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    def gradients(ctx: Any, dout_XF: Tensor) -> tuple[Tensor, Tensor]:
        return backward_op(dout_XF, *ctx.saved_tensors)  # type: ignore[no-any-return]

    forward_op.register_fake(lambda gate, up: gate.new_empty(gate.shape))
    backward_op.register_fake(lambda dout, gate, up: (gate.new_empty(gate.shape), up.new_empty(up.shape)))
    forward_op.register_autograd(gradients, setup_context=keep)
