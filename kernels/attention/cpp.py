"""Attention in C++ (``attention.cpp``), as torch.library ops, for fp32, and for bf16 on CPUs that multiply bf16 (AVX-512 bf16 or AMX).

For other dtypes and CPUs, ``kernels.attention.recompute`` computes the same with torch's own ops.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from kernels.native import NAMES, call_cpp_function, define_cpu_op, load_library


def is_usable(head_dim: int, dtype: torch.dtype) -> bool:
    """True if the C++ computes in this dtype on this CPU, for heads of this size. bf16 needs AVX-512 bf16 or AMX, and an even size."""
    return dtype == torch.float32 or (dtype == torch.bfloat16 and head_dim % 2 == 0 and _multiplies_bf16())


@functools.cache
def _multiplies_bf16() -> bool:
    return bool(load_library("attention").attention_usable())


# The attribute that torch.compiler.assume_constant_result sets; importing the compiler would take a second.
is_usable._dynamo_marked_constant = True  # type: ignore[attr-defined]


def run_attention(function: str, inputs: list[Tensor], document_BT: Tensor, outputs: list[Tensor]) -> None:
    """Call a C++ function. ``inputs``: q, k, v, then tensors of q's shape, all with a dense last dimension. ``outputs`` must be contiguous.

    Raises: ValueError for shapes or dtypes that do not fit, because the C++ would read past the ends of the tensors.
    """
    (B, T, H, K), G = inputs[0].shape, inputs[1].shape[2]
    shapes = [(B, T, H, K), (B, T, G, K), (B, T, G, K), *[(B, T, H, K)] * len(inputs[3:])]
    fit = [tuple(x.shape) == shape and x.dtype == inputs[0].dtype for x, shape in zip(inputs, shapes)]
    if not all(fit) or inputs[0].dtype not in NAMES or H % G or document_BT.shape != (B, T):
        given = ", ".join(f"{x.dtype} {list(x.shape)}" for x in (*inputs, document_BT))
        raise ValueError(
            f"q [B, T, H, K], k and v [B, T, G, K] in one dtype of {', '.join(NAMES.values())}, document [B, T] do not fit: {given}"
        )
    # The lower 32 bits distinguish the documents of a row: otherwise a row would have to hold 2³² documents.
    document_BT = document_BT.to(torch.int32).contiguous()
    strides = torch.tensor([x.stride()[:3] for x in inputs])
    call_cpp_function(
        "attention",
        f"{function}_{NAMES[inputs[0].dtype]}",
        *inputs[:3],
        document_BT,
        *inputs[3:],
        *outputs,
        strides,
        B,
        T,
        H,
        G,
        K,
        K**-0.5,
    )


def copy_to_dense_rows(x: Tensor) -> Tensor:
    """The tensor with a dense last dimension and even strides, copied if necessary. The C++ moves pairs of neighbouring elements."""
    return x if x.stride(-1) == 1 and not any(step % 2 for step in x.stride()[:-1]) else x.contiguous()


@define_cpu_op("factory::attention")
def forward_op(q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, document_BT: Tensor) -> Tensor:
    o_BTHK = torch.empty_like(q_BTHK, memory_format=torch.contiguous_format)
    run_attention("attention_forward", [copy_to_dense_rows(x) for x in (q_BTHK, k_BTGK, v_BTGK)], document_BT, [o_BTHK])
    return o_BTHK


@define_cpu_op("factory::attention_backward")
def backward_op(
    q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, document_BT: Tensor, do_BTHK: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = [copy_to_dense_rows(x) for x in (q_BTHK, k_BTGK, v_BTGK, do_BTHK)]
    gradients = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs[:3]]
    run_attention("attention_backward", inputs, document_BT, gradients)
    return gradients[0], gradients[1], gradients[2]


@forward_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, document: Tensor) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


@backward_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, document: Tensor, do: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return dq, dk, dv


def save_inputs(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def compute_gradients(ctx: Any, do_BTHK: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    return *backward_op(*ctx.saved_tensors, do_BTHK), None  # type: ignore[return-value]


forward_op.register_autograd(compute_gradients, setup_context=save_inputs)


@register_flop_formula(torch.ops.factory.attention)
def count_forward_flops(q: Any, k: Any, v: Any, document: Any, **_: Any) -> int:
    """FLOPs of two products over the whole score matrix, as torch counts SDPA: shapes do not say what is masked."""
    B, T, H, K = q
    return int(4 * B * H * T * T * K)


@register_flop_formula(torch.ops.factory.attention_backward)
def count_backward_flops(q: Any, k: Any, v: Any, document: Any, do: Any, **_: Any) -> int:
    """FLOPs of five products: the backward pass computes the scores again."""
    B, T, H, K = q
    return int(10 * B * H * T * T * K)
