"""Fresh arguments for an operation: tensors of a signature's shapes, strides and dtypes, on a device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from agents.line_profiler.signature import Samples, Signature, TensorSpec

BY_DIMENSION = ("gather", "scatter")  # operations whose second argument is the dimension that is indexed


def inputs(signature: Signature, values: Samples, device: torch.device, generator: torch.Generator) -> list[Any]:
    """The leaves of (args, kwargs). Floats are drawn from a normal distribution; integers, masks and scalars keep their
    recorded values, or become valid indices where none were recorded."""
    leaves: list[Any] = []
    for spec, value in zip(signature.leaves, values):
        if isinstance(spec, torch.device):
            leaves.append(device)
        elif not isinstance(spec, TensorSpec):
            leaves.append(spec)
        elif spec.same_as >= 0:
            leaves.append(leaves[spec.same_as])
        elif value is None and not spec.dtype.is_floating_point:
            leaves.append(_indices(signature, spec, device))
        else:
            leaves.append(_tensor(spec, value, device, generator))
    return leaves


def _tensor(spec: TensorSpec, value: Tensor | None, device: torch.device, generator: torch.Generator) -> Tensor:
    storage = torch.empty(spec.span, dtype=spec.dtype, device=device)
    tensor = storage.as_strided(spec.shape, spec.stride)
    if value is None:
        storage.normal_(generator=generator)
    elif any(stride == 0 and size > 1 for size, stride in zip(spec.shape, spec.stride)):
        return value.to(device).as_strided(spec.shape, value.stride())  # expanded: many elements, one place
    else:
        tensor.copy_(value)
    return tensor


def _indices(signature: Signature, spec: TensorSpec, device: torch.device) -> Tensor:
    """Integers below the size of what they index, evenly spread, as balanced routing spreads them."""
    indexed = signature.tensors[0].shape
    if "grouped_mm" in signature.operation:  # where each expert's rows end
        ends = torch.linspace(indexed[0] / spec.shape[0], indexed[0], spec.shape[0])
        return ends.to(dtype=spec.dtype, device=device)
    dimension = 0
    if any(name in signature.operation for name in BY_DIMENSION):
        dimension = next(leaf for leaf in signature.leaves if isinstance(leaf, int))
    below = indexed[dimension] if indexed else 1
    storage = torch.arange(spec.span, device=device) * 7919 % max(1, below)  # a prime: neighbours lie apart
    return storage.to(spec.dtype).as_strided(spec.shape, spec.stride)
