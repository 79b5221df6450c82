"""Checks an implementation: its error against the reference in fp64, forward and every gradient, next to the eager op's.

An implementation passes when, for every output and gradient, its error is at most twice that of the eager reference at the
same dtype, and it is finite wherever eager is. Two norms are compared: the root mean square of the error, and its largest
element, both relative to the size of the exact result. An error below the dtype's own rounding always passes (eager's may
be zero by luck), and so does one below sixteen roundings of fp32, by which sums of a thousand terms differ when taken in
another order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from kernels.contract.message import Message
from kernels.contract.op import Inputs, Op, OracleCase

FACTOR = 2.0


@dataclass(frozen=True)
class TensorError:
    """One output or gradient: relative errors of the implementation and of eager."""

    name: str
    rms: float
    eager_rms: float
    largest: float
    eager_largest: float
    finite: bool  # finite wherever eager is
    ok: bool


@dataclass(frozen=True)
class OracleResult:
    """The errors of one implementation on one case. ``ok``: every tensor passes."""

    op: str
    implementation: str
    case: str
    dtype: str
    device: str
    values: str
    tensors: tuple[TensorError, ...]

    @property
    def ok(self) -> bool:
        return all(t.ok for t in self.tensors)

    def failures(self) -> str:
        """The tensors that are off, one line."""
        return "; ".join(
            Message(
                "kernels.wrong_tensor",
                "{tensor}: rms error {rms:.3g} (eager: {eager_rms:.3g}), largest error {largest:.3g} (eager: "
                "{eager_largest:.3g}), finite: {finite}",
                tensor=t.name, rms=t.rms, eager_rms=t.eager_rms, largest=t.largest, eager_largest=t.eager_largest, finite=t.finite,
            )
            for t in self.tensors
            if not t.ok
        )  # fmt: skip


def _constant_rows(x: Tensor) -> Tensor:
    return x[..., :1].expand(x.shape).clone()


def _every_61st(x: Tensor) -> Tensor:
    return torch.arange(x.numel(), device=x.device).view(x.shape) % 61 == 7


HOSTILE: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "large": lambda x: x * 1e3,
    "tiny": lambda x: x * 1e-12,
    "zero": torch.zeros_like,
    "constant": _constant_rows,
    # where eager and fp64 stay finite, so must the implementation
    "infinite": lambda x: torch.where(_every_61st(x), float("inf"), x),
    "outlier": lambda x: torch.where(_every_61st(x), x * 1e4, x),
}


def compare_with_fp64(
    op: Op,
    implementation: str,
    case: OracleCase,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    values: str = "normal",
    seed: int = 0,
) -> OracleResult:
    """Run implementation and eager at ``dtype`` and the reference in fp64 on the same inputs and upstream gradients."""
    function = op.implementation(implementation).function
    inputs = list(op.inputs(case, device=device, dtype=dtype, seed=seed))
    for position in op.hostile:
        inputs[position] = tree_map_only(Tensor, lambda x: _like(HOSTILE[values](x), x), _detached(inputs[position]))
    exact = outputs_and_gradients(op, op.reference, tree_map_only(Tensor, _double, tuple(inputs)), seed)
    eager = outputs_and_gradients(op, op.reference, tuple(inputs), seed)
    found = outputs_and_gradients(op, function, tuple(inputs), seed)
    eps = max(torch.finfo(dtype).eps, 16 * torch.finfo(torch.float32).eps)
    tensors = tuple(_compare(name, found[name], eager[name], exact[name], eps) for name in exact)
    return OracleResult(op.name, implementation, case.name, str(dtype).removeprefix("torch."), device, values, tensors)


def _like(values: Tensor, layout: Tensor) -> Tensor:
    out = torch.empty_strided(layout.shape, layout.stride(), dtype=values.dtype, device=values.device)
    return out.copy_(values)


def _double(x: Tensor) -> Tensor:
    return x.detach().double() if x.is_floating_point() else x


def _detached(x: Any) -> Any:
    return tree_map_only(Tensor, torch.Tensor.detach, x)


def outputs_and_gradients(op: Op, function: Callable[..., Any], inputs: Inputs, seed: int) -> dict[str, Tensor]:
    """Run once: outputs and gradients by name, for an upstream gradient of normal values drawn from the seed.

    Arguments that the op writes in place are copied first, and are its outputs.
    """
    arguments = list(_detached(inputs))
    for position in op.writes:
        arguments[position] = tree_map_only(Tensor, lambda x: _like(x, x), arguments[position])
    for position in op.gradients:
        arguments[position] = arguments[position].requires_grad_()
    outputs = function(*arguments)
    outputs = tuple(tree_leaves([arguments[p] for p in op.writes])) if op.writes else outputs
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    named = {f"output {i}": o.detach() for i, o in enumerate(outputs)}
    if not op.gradients:
        return named
    generator = torch.Generator().manual_seed(seed + 1)
    wanted = [o for o in outputs if o.requires_grad]
    # The upstream gradient of a loss is a power of two. Any other number would round once more what the op computed in its forward pass.
    # Training never does that: there the upstream gradient is one.
    drawn = [torch.randn(o.shape, generator=generator) if o.ndim else torch.tensor(-0.5) for o in wanted]
    upstream = [u.to(dtype=o.dtype, device=o.device) for u, o in zip(drawn, wanted)]
    # Inside the sums, not as an argument of grad(): for the argument torch imports sympy, half a second of a trainer's start.
    weighted = [(o * u).sum() for o, u in zip(wanted, upstream)]
    gradients = torch.autograd.grad(weighted, [arguments[p] for p in op.gradients])
    return named | {f"gradient of argument {p}": g for p, g in zip(op.gradients, gradients, strict=True)}


def _compare(name: str, found: Tensor, eager: Tensor, exact: Tensor, eps: float) -> TensorError:
    assert found.shape == exact.shape and found.dtype == eager.dtype, (
        name,
        found.shape,
        exact.shape,
        found.dtype,
        eager.dtype,
    )
    where = eager.isfinite() & exact.isfinite()
    finite = bool(found[where].isfinite().all())
    truth = exact[where]
    if truth.numel() == 0:
        return TensorError(name, 0.0, 0.0, 0.0, 0.0, finite, finite)
    mine, theirs = (x[where].double() - truth for x in (found, eager))
    size, peak = _rms(truth) or 1.0, float(truth.abs().max()) or 1.0
    rms, eager_rms = _rms(mine) / size, _rms(theirs) / size
    largest, eager_largest = float(mine.abs().max()) / peak, float(theirs.abs().max()) / peak
    ok = finite and rms <= max(FACTOR * eager_rms, eps) and largest <= max(FACTOR * eager_largest, eps)
    return TensorError(name, rms, eager_rms, largest, eager_largest, finite, ok)


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())
