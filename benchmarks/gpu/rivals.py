"""What is timed beside our implementations: torch eager and torch.compile, torch's newer ops, Liger-Kernel and quack.

A rival computes the op, or what it is named to compute instead, from the op's own inputs. ``prepare`` makes, outside of the time, what a
training step makes once for all layers (a mask, the bounds of documents), and returns the function that is timed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.ops import liger
from kernels.contract.op import Implementation, Inputs, Op

Function = Callable[..., Any]
NOT_OURS = ("reference", "compiled")  # implementations that are torch's
ALIKE = 0.03  # relative error to the reference, in bf16, within which a rival computes the op
WHOLE_ROWS = "SDPA over whole rows"
NO_Z_LOSS = "without z-loss"


class Unavailable(Exception):
    """A rival that cannot be timed here; the message says why."""


@dataclass(frozen=True)
class Rival:
    name: str
    side: str  # 'ours', 'torch', 'Liger' or 'quack'
    prepare: Callable[[Inputs], Function]
    note: str = ""  # what it computes otherwise than the op does
    judged: bool = True  # is it to agree with the reference?
    implementation: str = (
        ""  # the name that it is registered by, of which the oracle judges; else ``disagreement`` does
    )


def rivals(op: Op, device: str) -> Iterator[Rival]:
    """Ours first, then torch eager and torch.compile, then all others, whether or not they are installed."""
    for implementation in op.implementations.values():
        if (
            implementation.name not in NOT_OURS
            and implementation.can_run_on(device)
            and "cuda" in implementation.devices
        ):
            side = "torch" if (op.name, implementation.name) == ("adamw", "fused") else "ours"
            yield Rival(implementation.name, side, as_in_a_layer(implementation), implementation=implementation.name)
    yield Rival("eager", "torch", given(op.reference), judged=False)
    registered = "compiled" if "compiled" in op.implementations else ""
    yield Rival("torch.compile", "torch", compiled(op.reference), implementation=registered)
    yield from TORCH.get(op.name, ())
    if op.name in liger.FUNCTIONS:
        note = "per-token losses left out" if op.name == "linear_cross_entropy" else ""
        yield Rival("Liger-Kernel", "Liger", installed("liger_kernel", given(liger.FUNCTIONS[op.name])), note)
    if op.name in QUACK:
        function, note = QUACK[op.name]
        yield Rival("quack", "quack", installed("quack", given(function)), note)


def as_in_a_layer(implementation: Implementation) -> Callable[[Inputs], Function]:
    """With what it makes of the documents once a batch made beforehand."""

    def prepare(inputs: Inputs) -> Function:
        if implementation.prepare is None:
            return implementation.function
        made = implementation.prepare_inputs(inputs)[-1]
        return lambda *given: implementation.function(*given[:-1], made)

    return prepare


def given(function: Function) -> Callable[[Inputs], Function]:
    return lambda inputs: function


def compiled(function: Function) -> Callable[[Inputs], Function]:
    return lambda inputs: torch.compile(function, dynamic=False)


def installed(package: str, prepare: Callable[[Inputs], Function]) -> Callable[[Inputs], Function]:
    def found(inputs: Inputs) -> Function:
        if importlib.util.find_spec(package) is None:
            raise Unavailable(f"{package.replace('_', '-')} is not installed here")
        return prepare(inputs)

    return found


# -- torch's newer ops -----------------------------------------------------------------------------------------------------
def rms_norm(x_XD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x_XD, (x_XD.shape[-1],), weight_D, eps)


def linear_cross_entropy(inputs: Inputs) -> Function:
    """Of torch ≥ 2.13, its logits a part at a time."""
    if not hasattr(F, "linear_cross_entropy"):
        raise Unavailable(f"torch {torch.__version__} has no F.linear_cross_entropy: it came with 2.13")
    options = torch.nn.LinearCrossEntropyOptions()

    def head_loss(x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, weights_N: Tensor, z_loss: float) -> Tensor:
        targets_N = torch.where(weights_N != 0, targets_N, -100)
        summed = F.linear_cross_entropy(x_ND, weight_VD, targets_N, reduction="sum", options=options)
        return summed * weights_N.max()

    return head_loss


def whole_rows(q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, *_: Any) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BTGK, v_BTGK))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def muon(inputs: Inputs) -> Function:
    """A step of torch.optim.Muon over the matrices."""
    if not hasattr(torch.optim, "Muon"):
        raise Unavailable(f"torch {torch.__version__} has no torch.optim.Muon: it came with 2.9")
    parameters = [torch.nn.Parameter(matrix.clone()) for matrix in inputs[0]]
    for parameter, gradient in zip(parameters, inputs[0]):
        parameter.grad = gradient.clone()
    optimizer = torch.optim.Muon(parameters, lr=1e-3)

    def step(*_: Any) -> None:
        optimizer.step()

    return step


TORCH: dict[str, tuple[Rival, ...]] = {
    "rms_norm": (Rival("F.rms_norm", "torch", given(rms_norm)),),
    "linear_cross_entropy": (
        Rival("F.linear_cross_entropy", "torch", linear_cross_entropy, f"{NO_Z_LOSS}; per-token losses left out"),
    ),
    "attention": (
        Rival(WHOLE_ROWS, "torch", given(whole_rows), "sees across documents: another function", judged=False),
    ),
    "newton_schulz": (Rival("optim.Muon", "torch", muon, "with momentum, decay and update", judged=False),),
}


# -- quack -----------------------------------------------------------------------------------------------------------------
def quack_rms_norm(x_XD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    from quack import rmsnorm

    return rmsnorm(x_XD, weight_D, eps=eps)


def quack_add_rms_norm(x_XD: Tensor, y_XD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    from quack import rmsnorm

    normed, summed = rmsnorm(x_XD, weight_D, residual=y_XD, eps=eps, prenorm=True)
    return summed, normed


def quack_head_loss(x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, weights_N: Tensor, z_loss: float) -> Tensor:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    targets_N = torch.where(weights_N != 0, targets_N, -100)
    return chunked_linear_cross_entropy(x_ND, weight_VD, targets_N, reduction="sum") * weights_N.max()


QUACK: dict[str, tuple[Function, str]] = {
    "rms_norm": (quack_rms_norm, ""),
    "add_rms_norm": (quack_add_rms_norm, ""),
    "linear_cross_entropy": (quack_head_loss, f"{NO_Z_LOSS}; per-token losses left out"),
}


def disagreement(op: Op, found: dict[str, Tensor], expected: dict[str, Tensor]) -> str:
    """Where a rival's outputs and gradients are not the reference's, within ``ALIKE``; '': nowhere.

    An output that the rival does not have is not compared: of the loss head some give the loss alone.
    """
    for name, tensor in found.items():
        truth = expected[name].double()
        error = float((tensor.double() - truth).norm() / truth.norm().clamp(min=1e-30))
        if not error <= ALIKE:  # NaN is no agreement
            return f"{name} is off by {error:.2g}"
    return ""
