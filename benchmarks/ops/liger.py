"""Liger-Kernel (Hsu et al. 2024, arXiv 2410.10989) as a contender: its functions with the signatures of our ops.

An optional extra (``pip install '.[gpu]'``), used where it is installed. Its kernels are Triton: timed on CUDA, and checked
against the oracle on a CPU in triton's interpreter (``TRITON_INTERPRET=1``).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from kernels.contract.op import Implementation, Op
from kernels.contract.registry import OPS

NAME = "liger"


def installed() -> str | None:
    """Its version, or None."""
    return version("liger-kernel") if importlib.util.find_spec("liger_kernel") else None


def rms_norm(x_XD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return LigerRMSNormFunction.apply(x_XD, weight_D, eps, 0.0, "gemma", False)  # fp32 until the end, as ours


def add_rms_norm(x_XD: Tensor, y_XD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    normed, summed = LigerFusedAddRMSNormFunction.apply(x_XD, y_XD, weight_D, eps, 0.0, "gemma", False)
    return summed, normed


def swiglu(gate_XF: Tensor, up_XF: Tensor) -> Tensor:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return LigerSiLUMulFunction.apply(gate_XF, up_XF, 1.0, 1.0)


def head_loss(x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, weights_N: Tensor, z_loss: float) -> Tensor:
    """The loss alone, for weights that are one number or zero, as make_inputs draws them; Liger knows no others."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    targets_N = torch.where(weights_N != 0, targets_N, -100)
    summed = LigerFusedLinearCrossEntropyFunction.apply(
        x_ND, weight_VD, targets_N, None, None, -100, z_loss, 0.0, "sum"
    )[0]
    return summed * weights_N.max()


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "rms_norm": rms_norm,
    "add_rms_norm": add_rms_norm,
    "swiglu": swiglu,
    "linear_cross_entropy": head_loss,
}


def contest(name: str) -> Op:
    """The op with Liger's implementation among the others, where it is installed and has one.

    Of the loss head all give the loss alone then: what Liger gives per token is another thing.
    """
    op = OPS[name]
    if installed() is None or name not in FUNCTIONS:
        return op
    made = dict(op.implementations)
    reference = op.reference
    if name == "linear_cross_entropy":
        made = {key: replace(i, function=_first(i.function)) for key, i in made.items()}
        reference = _first(reference)
    about = f"Liger-Kernel {installed()}"
    made[NAME] = Implementation(NAME, FUNCTIONS[name], about, devices=("cuda",), needs_triton=True)
    return replace(op, reference=reference, implementations=made)


def _first(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: function(*arguments)[0]
