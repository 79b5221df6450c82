"""Splits the weights over the mesh of ranks: FSDP2 over *shard* and *replica*, tensor and sequence parallelism over *tensor*."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainer.parallel.ranks import Ranks


def shard_parameters(model: nn.Module, blocks: Iterable[nn.Module], ranks: Ranks, dtype: torch.dtype) -> None:
    """Split the parameters of a model over the mesh. The model is on the meta device: its parameters get values later.

    ``model.find_split_dimension(name)`` returns the dimension along which *tensor* ranks split a parameter, or None if each rank has all of it.
    """
    assert ranks.mesh is not None
    tensor_mesh = ranks.mesh["tensor"]
    if tensor_mesh.size() > 1:
        for name, parameter in list(model.named_parameters()):
            dimension = model.find_split_dimension(name)  # type: ignore[operator]
            placement: Placement = Replicate() if dimension is None else Shard(dimension)
            owner_name, _, key = name.rpartition(".")
            split = nn.Parameter(_split(parameter, tensor_mesh, placement), parameter.requires_grad)
            setattr(model.get_submodule(owner_name), key, split)
    replicas = ranks.mesh["replica"].size() > 1
    mesh = ranks.mesh["replica", "shard"] if replicas else ranks.mesh["shard"]
    # Weights are fp32; the gathered weights of a block are in ``dtype``, and gradients are summed in fp32.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=module is not model)
        module.set_gradient_divide_factor(1.0)  # type: ignore[operator]
        module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]


def _split(parameter: Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    shape, _ = compute_local_shape_and_global_offset(parameter.shape, mesh, [placement])
    local = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
    return DTensor.from_local(local, mesh, [placement], run_check=False)
