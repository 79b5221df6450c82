"""The ranks that split each matrix, as a block of the model uses them. This is the case of one rank."""

from __future__ import annotations

from torch import Tensor


class TensorRanks:
    """One rank, which has each matrix and each row whole. For several see ``split_tensor_ranks``."""

    size = 1

    def part(self, x_BT: Tensor) -> Tensor:
        """This rank's positions, [B, S, …]."""
        return x_BT

    def gather(self, x_BSD: Tensor) -> Tensor:
        """All positions, before a matrix that is split by rows."""
        return x_BSD

    def scatter(self, y_BTD: Tensor) -> Tensor:
        """This rank's positions of the sum over the ranks: after a matrix that is split by columns."""
        return y_BTD

    def weight(self, parameter: Tensor) -> Tensor:
        """This rank's share of a parameter, or all of a parameter that is not split."""
        return parameter
