"""The interface through which a block of the model uses the ranks that split its matrices. The class here is for a single rank."""

from __future__ import annotations

from torch import Tensor


class TensorRanks:
    """A single rank, which has all of each matrix and each row. ``split_tensor_ranks`` has the class for several ranks."""

    size = 1

    def take_own_positions(self, x_BT: Tensor) -> Tensor:
        """This rank's positions, [B, S, …]."""
        return x_BT

    def gather(self, x_BSD: Tensor) -> Tensor:
        """All positions [B, T, D], from this rank's positions. Call it before a matrix that is split by rows."""
        return x_BSD

    def scatter(self, y_BTD: Tensor) -> Tensor:
        """This rank's positions [B, S, D] of the sum of ``y_BTD`` over the ranks. Call it after a matrix that is split by columns."""
        return y_BTD

    def weight(self, parameter: Tensor) -> Tensor:
        """This rank's part of a parameter, or all of a parameter that is not split."""
        return parameter
