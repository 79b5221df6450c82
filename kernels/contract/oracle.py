"""Checks an implementation: its error from the reference in fp64, for the outputs and every gradient, compared with the error of the eager reference.

An implementation passes if, for every output and gradient, its error is at most twice the error of the eager reference in the same dtype, and it
is finite wherever the eager reference is. Two norms of the error are compared, the root mean square and the largest element. Both are relative
to the size of the exact result. An error below the rounding of the dtype always passes, because the error of the eager reference may be zero by
luck. An error below sixteen roundings of fp32 also passes: sums of a thousand terms differ by as much if their order changes.
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
class TensorDeviation:
    """The relative errors of one output or gradient, of the implementation and of the eager reference."""

    name: str
    rms: float
    eager_rms: float
    largest: float
    eager_largest: float
    finite: bool  # True if the implementation is finite wherever the eager reference is
    ok: bool


@dataclass(frozen=True)
class OracleResult:
    """The errors of one implementation on one case. ``ok`` is True if every tensor passes."""

    op: str
    implementation: str
    case: str
    dtype: str
    device: str
    values: str
    tensors: tuple[TensorDeviation, ...]

    @property
    def ok(self) -> bool:
        return all(t.ok for t in self.tensors)

    def describe_failures(self) -> str:
        """One line with the errors of the tensors that do not pass."""
        return "; ".join(
            Message(
                "kernels.wrong_tensor",
                "{tensor}: the rms error is {rms:.3g} (that of the reference is {eager_rms:.3g}), the largest error is {largest:.3g} "
                "(that of the reference is {eager_largest:.3g}), finite wherever the reference is finite: {finite}",
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
    # the implementation must be finite wherever the eager reference and fp64 are
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
    """Compare an implementation and the eager reference, both in ``dtype``, with the reference in fp64. All get the same inputs and gradients.

    ``values``: the kind of values in the inputs, a key of ``HOSTILE``.
    """
    function = op.implementation(implementation).function
    inputs = list(op.inputs(case, device=device, dtype=dtype, seed=seed))
    for position in op.hostile:
        inputs[position] = tree_map_only(Tensor, lambda x: _like(HOSTILE[values](x), x), _detached(inputs[position]))
    exact = compute_outputs_and_gradients(op, op.reference, tree_map_only(Tensor, _double, tuple(inputs)), seed)
    eager = compute_outputs_and_gradients(op, op.reference, tuple(inputs), seed)
    found = compute_outputs_and_gradients(op, function, tuple(inputs), seed)
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


def compute_outputs_and_gradients(op: Op, function: Callable[..., Any], inputs: Inputs, seed: int) -> dict[str, Tensor]:
    """Run a function once. Returns its outputs and gradients by name. The upstream gradients are normal values drawn from the seed.

    Arguments that the op changes in place are copied first. The changed copies are its outputs.
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


def _compare(name: str, found: Tensor, eager: Tensor, exact: Tensor, eps: float) -> TensorDeviation:
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
        return TensorDeviation(name, 0.0, 0.0, 0.0, 0.0, finite, finite)
    mine, theirs = (x[where].double() - truth for x in (found, eager))
    size, peak = _rms(truth) or 1.0, float(truth.abs().max()) or 1.0
    rms, eager_rms = _rms(mine) / size, _rms(theirs) / size
    largest, eager_largest = float(mine.abs().max()) / peak, float(theirs.abs().max()) / peak
    ok = finite and rms <= max(FACTOR * eager_rms, eps) and largest <= max(FACTOR * eager_largest, eps)
    return TensorDeviation(name, rms, eager_rms, largest, eager_largest, finite, ok)


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())
