"""Regions: the part of a whole tensor that a rank holds. The checkpoint format depends on them, so agents may not patch this file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


def is_distributed_tensor(tensor: Tensor) -> bool:
    """True for a DTensor. The test does not import DTensor, which callers that only read tensors do not need."""
    return hasattr(tensor, "placements")


@dataclass(frozen=True)
class Region:
    """The part of a tensor that a rank holds: it has ``shape`` and begins at ``offset`` of a tensor of shape ``whole``."""

    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def from_tensor(cls, tensor: Any) -> Region:
        """The region of a tensor that this rank holds; the whole tensor if it is not split."""
        whole = tuple(tensor.shape)
        if not is_distributed_tensor(tensor):
            return cls(whole, (0,) * len(whole), whole)
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        shape, offset = compute_local_shape_and_global_offset(whole, tensor.device_mesh, tensor.placements)
        return cls(whole, tuple(offset), tuple(shape))

    def view_in_whole_tensor(self, tensor: Tensor) -> Tensor:
        """This region of a whole tensor, as a view."""
        assert tuple(tensor.shape) == self.whole, (tensor.shape, self.whole)
        for dimension, (start, length) in enumerate(zip(self.offset, self.shape)):
            tensor = tensor.narrow(dimension, start, length)
        return tensor
