"""The ranks of a run: the part of the work of each rank, and how they split weights, gradients and positions.

The ranks form a mesh [replica, shard, tensor]. FSDP2 splits weights, gradients and optimiser over *shard* and sums gradients over *replica* and
*shard*. Over *tensor* each matrix is split by heads or hidden units. Between the matrices each row is split by position (sequence parallelism:
Korthikanti et al. 2022, arXiv 2205.05198 §4.2.2).

The weights of a batch's tokens are already divided by the global sum. Therefore the sum of gradients over ranks is the gradient of the global mean.
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

from models.spec import ModelSpec
from trainer.contract.checkpoint.region import Region, is_distributed_tensor
from trainer.contract.errors import RecipeError
from trainer.contract.recipe import ParallelRecipe
from trainer.parallel.tensor_ranks import TensorRanks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# How long a rank waits for another rank, which may be hashing a checkpoint or compiling. torch's defaults are 10 minutes in NCCL, 30 in gloo
# and 5 for a store. No rank waits this long for a rank that died, because torchrun then ends all ranks at once.
PATIENCE = timedelta(minutes=30)


@dataclass(frozen=True)
class Ranks:
    """This rank: its number, its device and its place in the mesh; and the number of ranks."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh | None = None  # [replica, shard, tensor]; None for one rank
    data_rank: int = 0  # number of this rank's part of the batch
    data_ranks: int = 1

    @classmethod
    def join(cls, parallel: ParallelRecipe, model: ModelSpec) -> Ranks:
        """Join the other ranks that torchrun started (it sets RANK, WORLD_SIZE, LOCAL_RANK). Without torchrun there is one rank.

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
            store=open_rendezvous_store(),
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
        """True for rank 0, which writes the files of the run."""
        return self.rank == 0

    @property
    def tensor(self) -> TensorRanks:
        if self.mesh is None or self.mesh["tensor"].size() == 1:
            return TensorRanks()
        from trainer.parallel.split_tensor_ranks import SplitTensorRanks

        return SplitTensorRanks(self.mesh["tensor"])

    def sum_over_ranks_in_place(self, tensor: Tensor) -> None:
        """Sum ``tensor`` over all ranks, in place."""
        assert tensor.is_contiguous(), "gloo sums the memory from the first element on, whatever the strides"
        if self.size > 1:
            dist.all_reduce(tensor)

    def wait(self) -> None:
        """Wait until every rank has called this."""
        if self.size > 1:
            dist.barrier()

    def leave(self) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


_joined = itertools.count()  # number of groups that this process joined; the same in every rank


def open_rendezvous_store() -> dist.Store | None:
    """Open the store through which ranks find one another. Returns None if torch's default store is to be used.

    torchrun may offer its own store (c10d and static rendezvous). It still holds the addresses of ranks that died (pytorch/pytorch#135712), or
    those of an earlier group of the same process. Therefore each attempt, and each group of a process, uses a prefix of its own in the store. Each
    node counts attempts by itself, so restarts work only on a single node.

    Raises: RecipeError if several nodes use torchrun's store and restarts.
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


def get_local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor. It shares the tensor's memory. A tensor that is not split is its own part."""
    held: Any = tensor.detach()
    return held.to_local() if is_distributed_tensor(held) else held  # type: ignore[no-any-return]


def count_tensor_copies(tensor: Any) -> int:
    """The number of ranks that hold each element of a tensor."""
    if not is_distributed_tensor(tensor):
        return 1
    count = 1
    for size, placement in zip(tensor.device_mesh.shape, tensor.placements):
        count *= size if placement.is_replicate() else 1
    return count


def is_first_rank_with_part(tensor: Any) -> bool:
    """True if this rank is the first of the ranks that hold the same part of a tensor."""
    if not is_distributed_tensor(tensor):
        return True
    coordinates = tensor.device_mesh.get_coordinate()
    assert coordinates is not None
    return not any(c for c, placement in zip(coordinates, tensor.placements) if placement.is_replicate())


def gather_whole_tensor(value: Tensor, like: Tensor) -> Tensor:
    """The whole tensor of which ``value`` is this rank's part. The tensor is split like ``like``. All ranks must call it: it sums over ranks."""
    if not is_distributed_tensor(like):
        return value
    total = value.new_zeros(like.shape)
    if is_first_rank_with_part(like):
        Region.from_tensor(like).view_in_whole_tensor(total).copy_(value)
    dist.all_reduce(total)
    return total
