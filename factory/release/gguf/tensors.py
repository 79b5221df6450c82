"""The tensors of a GGUF file: their names, their order, and the tensors of the export from which each is made.

Names are those of the package ``gguf``. The file differs from the export in two ways. The matrices of a layer's experts are stacked in one tensor. In
some architectures (``INTERLEAVED_MODEL_TYPES``) llama.cpp rotates neighbouring rows of a head, while transformers rotates row ``i`` with row
``i + head_dim / 2``: there the rows of the query and key projections are reordered.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from factory.core.errors import InputError
from factory.evals.export_config import ExportConfig

if TYPE_CHECKING:
    import gguf

Floats = npt.NDArray[np.float32]

ARCHITECTURES = {
    "qwen3": "QWEN3",
    "llama": "LLAMA",
    "smollm3": "SMOLLM3",
    "glm4_moe": "GLM4_MOE",
}  # model_type → gguf's
INTERLEAVED_MODEL_TYPES = {"llama", "smollm3"}  # LLAMA_ROPE_TYPE_NORM in llama.cpp's llama_model_rope_type
SMOLLM3_STEP = 4  # llama.cpp's constant n_no_rope_layer_step; a GGUF file cannot change it
_EXPERT = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.\d+(\.\w+\.weight)")
_ROTATED = {"self_attn.q_proj.weight": "heads", "self_attn.k_proj.weight": "kv_heads"}


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of a GGUF file."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]  # tensors of the export; if there are several, they are stacked
    rotated_heads: int | None = None  # number of heads, if the rows must be interleaved

    @property
    def is_always_fp32(self) -> bool:
        """Return whether the tensor is always stored in fp32. Vectors and routers are: they are small, and llama.cpp expects fp32."""
        return len(self.shape) == 1 or ".ffn_gate_inp." in self.name

    def build_array(self, tensors: list[Floats]) -> Floats:
        """Make the tensor from its sources, given in their order."""
        if len(self.sources) > 1:
            return np.stack(tensors)
        (found,) = tensors
        return found if self.rotated_heads is None else interleave_rows(found, self.rotated_heads)


def interleave_rows(rows: Floats, heads: int) -> Floats:
    """Reorder the rows of each head in a matrix [heads · head_dim, d] as 0, head_dim / 2, 1, head_dim / 2 + 1 ….

    >>> interleave_rows(np.arange(8, dtype=np.float32).reshape(8, 1), 2).ravel().tolist()
    [0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0]
    """
    count, width = rows.shape
    return rows.reshape(heads, 2, count // heads // 2, width).swapaxes(1, 2).reshape(count, width)


def check_model_is_convertible(config: ExportConfig, model_type: str) -> None:
    """Raises: InputError for a model that llama.cpp cannot compute."""
    if model_type not in ARCHITECTURES:
        raise InputError(
            "gguf.no_architecture",
            "GGUF has no architecture for the model type {model_type}. Model types with an architecture: {known}",
            model_type=model_type,
            known=sorted(ARCHITECTURES),
        )
    expected = tuple((layer + 1) % SMOLLM3_STEP != 0 for layer in range(config.layers))
    if model_type == "smollm3" and config.rope_layers != expected:
        without = [layer for layer, has_rope in enumerate(config.rope_layers) if not has_rope]
        raise InputError(
            "gguf.other_rope_layers",
            "smollm3: llama.cpp omits RoPE in every {step}th layer, and a GGUF file cannot change that. This model has {layers} "
            "layers and omits RoPE in these (counted from 0): {without}. Only models with 'nope_every: {step}' can be converted",
            step=SMOLLM3_STEP,
            without=without,
            layers=config.layers,
        )


def plan_gguf_tensors(config: ExportConfig, model_type: str) -> list[GgufTensor]:
    """Return all tensors of the file, in the export's order. Raises: InputError for a model that llama.cpp cannot compute."""
    import gguf

    check_model_is_convertible(config, model_type)
    names = gguf.get_tensor_name_map(find_gguf_architecture(model_type), config.layers)
    shapes = config.list_tensor_shapes()
    sources: dict[str, list[str]] = {}
    for name in shapes:
        sources.setdefault(_EXPERT.sub(r"\1\2", name), []).append(name)
    found = []
    for together, members in sources.items():
        stacked = together not in shapes
        shape = (len(members), *shapes[members[0]]) if stacked else shapes[together]
        heads = next((getattr(config, field) for end, field in _ROTATED.items() if together.endswith(end)), None)
        key = together.replace("e_score_correction_bias", "e_score_correction.bias")
        theirs = names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, f"gguf has no name for {together} in {model_type}"
        found.append(
            GgufTensor(theirs, shape, tuple(members), heads if model_type in INTERLEAVED_MODEL_TYPES else None)
        )
    return found


def find_gguf_architecture(model_type: str) -> gguf.MODEL_ARCH:
    """Return the architecture that computes ``model_type``, as the package ``gguf`` names it."""
    import gguf

    return gguf.MODEL_ARCH[ARCHITECTURES[model_type]]
