"""Tensor and sequence parallelism by DTensor, for several ranks that split each matrix.

A separate file, because importing DTensor takes a while, and a run with one rank does not need it.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from trainer.parallel.tensor_ranks import TensorRanks


class SplitTensorRanks(TensorRanks):
    """The ranks that split each matrix. Between the matrices each of them has S of the T positions of a row."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.size = mesh.size()

    def take_own_positions(self, x_BT: Tensor) -> Tensor:
        return x_BT.chunk(self.size, dim=1)[self.mesh.get_local_rank()]

    def gather(self, x_BSD: Tensor) -> Tensor:
        """All positions [B, T, D]. The backward pass sums the gradients of the ranks and gives each rank its positions of the sum."""
        whole = DTensor.from_local(x_BSD, self.mesh, [Shard(1)], run_check=False).redistribute(placements=[Replicate()])
        return whole.to_local(grad_placements=[Partial()])

    def scatter(self, y_BTD: Tensor) -> Tensor:
        return (
            DTensor.from_local(y_BTD, self.mesh, [Partial()], run_check=False)
            .redistribute(placements=[Shard(1)])
            .to_local()
        )

    def weight(self, parameter: Tensor) -> Tensor:
        """This rank's part of a parameter. If the parameter is not split, its gradient is the sum of what the ranks compute."""
        if not isinstance(parameter, DTensor):
            return parameter
        grads = [Partial() if placement.is_replicate() else placement for placement in parameter.placements]
        return parameter.to_local(grad_placements=grads)  # type: ignore[no-any-return]
