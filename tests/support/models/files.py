"""The names that tensors of transformers' models have in their files.

A separate file, because the proof and the layers for multi-token prediction, which it imports, need it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def list_file_tensors(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a model of transformers by their names in its files: in memory the experts of a layer are joined."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, dict(tensors))


def split_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of parts of a model of transformers by their names in its files, which have a tensor for each matrix of each expert."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        outer, _, key = name.rpartition(".")
        if not outer.endswith(".experts"):
            found[name] = tensor
        elif key == "gate_up_proj":
            for number, both in enumerate(tensor):
                gate, up = both.chunk(2)
                found |= {f"{outer}.{number}.gate_proj.weight": gate, f"{outer}.{number}.up_proj.weight": up}
        else:
            found |= {f"{outer}.{number}.{key}.weight": one for number, one in enumerate(tensor)}
    return found
