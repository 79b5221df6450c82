"""Ranks: each one's part of the work, and the split of weights, gradients and positions among them.

The ranks form a mesh [replica, shard, tensor]. FSDP2 splits weights, gradients and optimiser over *shard* and sums
gradients over *replica* and *shard*. Over *tensor* each matrix is split by heads or hidden units, and between the
matrices each row is split by position (sequence parallelism: Korthikanti et al. 2022, arXiv 2205.05198 §4.2.2).

A batch's weights already hold the global normaliser, so that the sum over ranks is the gradient of the global mean.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.contract.checkpoint.region import Region, is_split
from trainer.contract.errors import RecipeError
from trainer.contract.recipe import ModelRecipe, ParallelRecipe
from trainer.parallel.tensor_ranks import TensorRanks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# How long a rank waits for the others, one of which may be hashing a checkpoint or compiling. torch's defaults are 10 minutes in NCCL, 30 in
# gloo and 5 for a store. No rank waits this long for a rank that died: torchrun ends the others at once.
PATIENCE = timedelta(minutes=30)


@dataclass(frozen=True)
class Ranks:
    """This rank's number, device, and place in the mesh."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh | None = None  # [replica, shard, tensor]; None for one rank
    data_rank: int = 0  # number of this rank's part of the batch
    data_ranks: int = 1

    @classmethod
    def join(cls, parallel: ParallelRecipe, model: ModelRecipe) -> Ranks:
        """One rank, or those that torchrun started (it sets RANK, WORLD_SIZE, LOCAL_RANK).

        Raises: RecipeError that names the key that does not fit the number of ranks.
        """
        size = int(os.environ.get("WORLD_SIZE", "1"))
        rank = int(os.environ.get("RANK", "0"))
        data_ranks = parallel.data_ranks(size, model)
        cuda = torch.cuda.is_available()
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(device)
        if size == 1:
            return cls(rank, size, device)
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            timeout=PATIENCE,
            store=join_ranks(),
            rank=rank,
            world_size=size,
            device_id=device if cuda else None,  # so that NCCL forms each group of the mesh here, not in the first step
        )
        from torch.distributed.device_mesh import init_device_mesh

        shape = (parallel.replicas, data_ranks // parallel.replicas, parallel.tensor)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replica", "shard", "tensor"))
        for group in mesh.get_all_groups():  # a mesh gives its groups the default timeout, not that of the whole group
            dist.distributed_c10d._set_pg_timeout(PATIENCE, group)
        return cls(rank, size, device, mesh, rank // parallel.tensor, data_ranks)

    @property
    def is_leader(self) -> bool:
        """True for the rank that writes the files that all ranks share."""
        return self.rank == 0

    @property
    def tensor(self) -> TensorRanks:
        if self.mesh is None or self.mesh["tensor"].size() == 1:
            return TensorRanks()
        from trainer.parallel.split_tensor_ranks import SplitTensorRanks

        return SplitTensorRanks(self.mesh["tensor"])

    def sum_(self, tensor: Tensor) -> None:
        """Sum over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)

    def wait(self) -> None:
        """Wait until every rank calls this."""
        if self.size > 1:
            dist.barrier()

    def leave(self) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


_joined = itertools.count()  # number of groups that this process joined; the same in every rank


def join_ranks() -> dist.Store | None:
    """The store through which ranks find one another; None: torch's default.

    torchrun may lend its own store (c10d and static rendezvous), which still holds the addresses of ranks that died
    (pytorch/pytorch#135712), or of an earlier group of the same process. Therefore each attempt, and each group of a process, gets its own names
    in it. Each node counts attempts for itself, so restarts work on one node only.

    Raises: RecipeError for several nodes with restarts on torchrun's store.
    """
    found = os.environ.get
    if found("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    if found("TORCHELASTIC_MAX_RESTARTS", "0") != "0" and found("GROUP_WORLD_SIZE", "1") != "1":
        raise RecipeError(
            "trainer.restarts_on_nodes",
            "With torchrun --max-restarts on several nodes, restarted ranks look for the other ranks at the "
            "addresses of dead processes. Use --rdzv-backend=c10d, and set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in "
            "torchrun's environment.",
        )
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store.set_timeout(PATIENCE)
    return dist.PrefixStore(f"attempt-{os.environ['TORCHELASTIC_RESTART_COUNT']}-group-{next(_joined)}", store)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor; it shares the tensor's memory."""
    held: Any = tensor.detach()
    return held.to_local() if is_split(held) else held  # type: ignore[no-any-return]


def copies_of_tensor(tensor: Any) -> int:
    """The number of ranks that hold each element of a tensor."""
    if not is_split(tensor):
        return 1
    count = 1
    for size, placement in zip(tensor.device_mesh.shape, tensor.placements):
        count *= size if placement.is_replicate() else 1
    return count


def is_first_rank_with_part(tensor: Any) -> bool:
    """True if this is the first of the ranks that hold the same part of a tensor."""
    if not is_split(tensor):
        return True
    coordinates = tensor.device_mesh.get_coordinate()
    assert coordinates is not None
    return not any(c for c, placement in zip(coordinates, tensor.placements) if placement.is_replicate())


def gather_whole(value: Tensor, like: Tensor) -> Tensor:
    """The whole tensor of which each rank has ``value``, split as ``like`` is: a sum over ranks, each in its region."""
    if not is_split(like):
        return value
    total = value.new_zeros(like.shape)
    if is_first_rank_with_part(like):
        Region.region_of_tensor(like).view_of(total).copy_(value)
    dist.all_reduce(total)
    return total
