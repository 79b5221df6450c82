"""The tensors of a GGUF file: their names, their order, and the tensors of the export from which each is made.

Names are those of the package ``gguf``. A file differs from the export as llama.cpp's converter makes it differ. The matrices of a layer's experts
are stacked in one tensor. Where llama.cpp rotates neighbouring rows of a head (``interleaved``), the rows of query and key projections are reordered.
Gemma's norms have 1 added. Llama 3's scaling of RoPE is a tensor of factors.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from factory.core.errors import InputError
from factory.evals.export_folder import get_family, list_file_shapes
from kernels.contract.message import Message
from models.rope import compute_rope_frequencies
from models.spec import ModelSpec

if TYPE_CHECKING:
    import gguf

Floats = npt.NDArray[np.float32]
ROPE_FACTORS = "rope_freqs.weight"
GEMMA2_WINDOW, GEMMA3_PERIOD, GEMMA3_WINDOW_THETA = 4096, 6, 10_000.0


@dataclass(frozen=True)
class LlamaCppArchitecture:
    """What llama.cpp computes for a family, from its ``src/models`` and its converter."""

    name: str  # of ``gguf.MODEL_ARCH``
    holds: frozenset[str] = frozenset()  # of ``OPTIONAL``, the keys whose tensors it reads
    scalings: frozenset[str] = frozenset({"linear", "yarn"})  # kinds of ``RopeScaling``
    constants: Callable[[ModelSpec], dict[str, Any]] = lambda spec: {}  # what its code fixes: key of ModelSpec → value
    interleaved: bool = False  # LLAMA_ROPE_TYPE_NORM in llama.cpp's llama_model_rope_type
    adds_one: bool = False  # the converter adds 1 to the weights of norms
    needs_output: bool = False  # a tied head must be stored too


def _gemma_scale(spec: ModelSpec, layers_of_27b: int) -> float:
    """The scale of scores that llama.cpp derives from the shape. It knows the 27B model by its number of layers."""
    size = spec.d_model // spec.heads if spec.layers == layers_of_27b else spec.head_dim
    return float(size**-0.5)


def _fix_gemma2(spec: ModelSpec) -> dict[str, Any]:
    window = next((one for one in spec.windows or [] if one), GEMMA2_WINDOW)  # llama.cpp has one without the key
    return {
        "windows": [window if number % 2 == 0 else None for number in range(spec.layers)],
        "attention_scale": _gemma_scale(spec, 46),
        "attention_softcap": spec.attention_softcap or 50.0,  # it is always computed
        "logit_softcap": spec.logit_softcap or 30.0,
    }


def _fix_gemma3(spec: ModelSpec) -> dict[str, Any]:
    window = next((one for one in spec.windows or [] if one), None)
    return {
        "windows": [window if (number + 1) % GEMMA3_PERIOD else None for number in range(spec.layers)],
        "window_rope_theta": GEMMA3_WINDOW_THETA,
        "attention_scale": _gemma_scale(spec, 62),
        "logit_softcap": None,
    }


OPTIONAL = {"qkv_bias": False, "attention_out_bias": False, "mlp_bias": False}
ALL_BIASES, BIAS_OF_QKV = frozenset(OPTIONAL), frozenset({"qkv_bias"})
# By model_type. llama.cpp's code for SmolLM3 has RoPE's step as a constant, which a file cannot change.
ARCHITECTURES = {
    "qwen3": LlamaCppArchitecture("QWEN3"),
    "llama": LlamaCppArchitecture("LLAMA", ALL_BIASES, frozenset({"linear", "yarn", "llama3"}), interleaved=True),
    "smollm3": LlamaCppArchitecture("SMOLLM3", constants=lambda spec: {"nope_every": 4}, interleaved=True),
    "glm4_moe": LlamaCppArchitecture("GLM4_MOE", BIAS_OF_QKV, constants=lambda spec: {"experts.groups": 1}),
    "qwen2": LlamaCppArchitecture("QWEN2", BIAS_OF_QKV),
    "qwen3_moe": LlamaCppArchitecture(
        "QWEN3MOE", constants=lambda spec: {"experts.normalise": True, "experts.dense_layers": 0}
    ),
    "mistral": LlamaCppArchitecture("LLAMA", ALL_BIASES, frozenset({"linear", "yarn", "llama3"}), interleaved=True),
    "olmo2": LlamaCppArchitecture("OLMO2", needs_output=True),
    "gemma2": LlamaCppArchitecture("GEMMA2", scalings=frozenset(), constants=_fix_gemma2, adds_one=True),
    "gemma3_text": LlamaCppArchitecture("GEMMA3", scalings=frozenset({"linear"}), constants=_fix_gemma3, adds_one=True),
}
_EXPERT = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.\d+(\.\w+\.weight)")
_ROTATED = re.compile(r"self_attn\.([qk])_proj\.(weight|bias)$")


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of a GGUF file."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[
        str, ...
    ]  # tensors of the export; if there are several, they are stacked; if there are none, ``values`` is the tensor
    rotated_heads: int | None = None  # number of heads, if the rows must be interleaved
    added: float = 0.0
    values: tuple[float, ...] = ()

    @property
    def is_always_fp32(self) -> bool:
        """Return whether the tensor is always stored in fp32. Vectors and routers are: they are small, and llama.cpp expects fp32."""
        return len(self.shape) == 1 or ".ffn_gate_inp." in self.name

    def build_array(self, tensors: list[Floats]) -> Floats:
        """Make the tensor from its sources, given in their order."""
        if not self.sources:
            return np.array(self.values, dtype=np.float32)
        if len(self.sources) > 1:
            return np.stack(tensors)
        (found,) = tensors
        if self.rotated_heads is not None:
            found = interleave_rows(found, self.rotated_heads)
        return found + np.float32(self.added) if self.added else found


def interleave_rows(rows: Floats, heads: int) -> Floats:
    """Reorder the rows of each head in a matrix [heads · head_dim, d], or the values of a bias, as 0, head_dim / 2, 1, head_dim / 2 + 1 ….

    >>> interleave_rows(np.arange(8, dtype=np.float32).reshape(8, 1), 2).ravel().tolist()
    [0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0]
    """
    count = len(rows)
    return rows.reshape(heads, 2, count // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def check_model_is_convertible(spec: ModelSpec) -> None:
    """Raises: InputError for a model that llama.cpp cannot compute, naming each key of ``ModelSpec`` that it cannot hold."""
    architecture = ARCHITECTURES.get(spec.family or "")
    if architecture is None:
        raise InputError(
            "gguf.no_architecture",
            "The factory cannot write a GGUF file for the model type {model_type}. Model types that it can convert: {known}",
            model_type=spec.family,
            known=sorted(ARCHITECTURES),
        )
    if found := _list_obstacles(spec, architecture):
        raise InputError(
            "gguf.cannot_hold",
            "llama.cpp cannot compute this model of type {model_type}, and a GGUF file cannot change that: {obstacles}",
            model_type=spec.family,
            obstacles=found,
        )


def _list_obstacles(spec: ModelSpec, architecture: LlamaCppArchitecture) -> list[Message]:
    windows = [spec.layer(number).window for number in range(spec.layers)]
    needed: dict[str, Any] = {key: usual for key, usual in OPTIONAL.items() if key not in architecture.holds}
    needed |= {"windows": [None] * spec.layers, "attention_scale": spec.head_dim**-0.5, "attention_sinks": False}
    needed |= architecture.constants(spec)
    ours: dict[str, Any] = {
        "windows": windows,
        "attention_scale": spec.head_dim**-0.5 if spec.attention_scale is None else spec.attention_scale,
        **{
            key: getattr(spec.experts, key.partition(".")[2])
            for key in needed
            if key.startswith("experts.") and spec.experts
        },
    }
    if (scaling := spec.rope_scaling) is not None and scaling.kind != "dynamic":  # that is no scaling up to the context
        ours["rope_scaling.kind"] = scaling.kind
        needed["rope_scaling.kind"] = scaling.kind if scaling.kind in architecture.scalings else None
        if scaling.kind == "yarn":  # older versions of llama.cpp read no key for these
            usual = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True, "attention_factor": None}
            needed |= {f"rope_scaling.{key}": value for key, value in usual.items()}
            ours |= {f"rope_scaling.{key}": getattr(scaling, key) for key in usual}
    found = []
    for key, value in needed.items():
        given = ours[key] if key in ours else getattr(spec, key)
        close = isinstance(value, float) and isinstance(given, float) and abs(given - value) <= 1e-6 * value
        if given != value and not close:
            found.append(
                Message("gguf.obstacle", "{key} is {given} (only {value})", key=key, given=str(given), value=str(value))
            )
    return found


def plan_gguf_tensors(spec: ModelSpec) -> list[GgufTensor]:
    """Return all tensors of the file, in the export's order. Raises: InputError for a model that llama.cpp cannot compute.

    Layers for multi-token prediction are left out: llama.cpp computes the model without them.
    """
    import gguf

    spec = spec.without_multi_token
    check_model_is_convertible(spec)
    architecture = ARCHITECTURES[get_family(spec).name]
    names = gguf.get_tensor_name_map(find_gguf_architecture(spec), spec.layers)
    shapes = list_file_shapes(spec)
    sources: dict[str, list[str]] = {}
    for name in shapes:
        sources.setdefault(_EXPERT.sub(r"\1\2", name), []).append(name)
    found = []
    for together, members in sources.items():
        stacked = together not in shapes
        shape = (len(members), *shapes[members[0]]) if stacked else shapes[together]
        rotated = _ROTATED.search(together) if architecture.interleaved else None
        heads = None if rotated is None else {"q": spec.heads, "k": spec.kv_heads}[rotated[1]]
        key = together.replace("e_score_correction_bias", "e_score_correction.bias")
        theirs = names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, f"gguf has no name for {together} in {spec.family}"
        added = float(architecture.adds_one and together.endswith("norm.weight"))
        found.append(GgufTensor(theirs, shape, tuple(members), heads, added))
    if spec.tied and architecture.needs_output:
        embedding = "model.embed_tokens.weight"
        found.append(GgufTensor("output.weight", shapes[embedding], (embedding,)))
    if spec.rope_scaling is not None and spec.rope_scaling.kind == "llama3":
        factors = _divide_frequencies(spec)
        found.append(GgufTensor(ROPE_FACTORS, (len(factors),), (), values=factors))
    return found


def _divide_frequencies(spec: ModelSpec) -> tuple[float, ...]:
    """By what llama.cpp divides the frequency of each pair of dimensions."""
    plain, _ = compute_rope_frequencies(spec.model_copy(update={"rope_scaling": None}), "main")
    scaled, _ = compute_rope_frequencies(spec, "main")
    return tuple((plain / scaled).tolist())


def find_gguf_architecture(spec: ModelSpec) -> gguf.MODEL_ARCH:
    """Return the architecture that computes a model, as the package ``gguf`` names it."""
    import gguf

    return gguf.MODEL_ARCH[ARCHITECTURES[get_family(spec).name].name]
