"""Describes the arguments of an operation without the tensors' data, so that it can be called again on fresh data of the same kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten

LARGEST_SAMPLE = 1 << 24  # elements: integers of larger tensors are not recorded


@dataclass(frozen=True)
class TensorSpec:
    """One tensor argument. ``same_as``: the position of an earlier argument that was the same tensor, or −1."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    same_as: int

    @property
    def storage_element_count(self) -> int:
        """Elements of the smallest storage that holds the tensor."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride))

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True)
class OperationSignature:
    """An operation and its arguments: tensors as specs, everything else by value. Equal signatures are measured once."""

    func: Any  # torch._ops.OpOverload
    leaves: tuple[Any, ...]  # TensorSpec in place of tensors
    tree: TreeSpec  # of (args, kwargs)

    @property
    def operation_name(self) -> str:
        return str(self.func)

    @property
    def tensor_arguments(self) -> list[TensorSpec]:
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorSpec)]

    @property
    def tensor_bytes(self) -> int:
        """Memory that its tensor arguments take."""
        return sum(
            spec.storage_element_count * spec.dtype.itemsize for spec in self.tensor_arguments if spec.same_as < 0
        )

    def __hash__(self) -> int:
        return hash((self.func, self.leaves))

    def __str__(self) -> str:
        return f"{self.operation_name}({', '.join(map(str, self.tensor_arguments))})"


Samples = tuple[Tensor | None, ...]  # by leaf: the values of integers, masks and scalars; None for random floats


def make_operation_signature(func: Any, args: Any, kwargs: Any) -> OperationSignature:
    """The signature of a call. Raises: TypeError when an argument cannot be compared by value."""
    leaves, tree = tree_flatten((args, kwargs))
    first: dict[tuple[int, int], int] = {}
    specs: list[Any] = []
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            identity = (leaf.untyped_storage()._cdata, int(leaf.storage_offset()))
            same = first.setdefault(identity, position)
            if same != position and (specs[same].shape, specs[same].stride) != (leaf.shape, leaf.stride()):
                same = position
            specs.append(TensorSpec(tuple(leaf.shape), leaf.stride(), leaf.dtype, same if same != position else -1))
        else:
            hash(leaf)
            specs.append(leaf)
    return OperationSignature(func, tuple(specs), tree)


def copy_nonrandom_inputs(args: Any, kwargs: Any) -> Samples:
    """By leaf, copies of the inputs that random numbers must not replace: indices, masks, scalars such as a loss scale."""
    leaves, _ = tree_flatten((args, kwargs))
    return tuple(leaf.detach().clone() if _is_kept(leaf) else None for leaf in leaves)


def _is_kept(leaf: Any) -> bool:
    if not isinstance(leaf, Tensor) or leaf.device.type == "meta" or leaf.numel() > LARGEST_SAMPLE:
        return False
    return not leaf.is_floating_point() or leaf.numel() <= 1
