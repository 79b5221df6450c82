"""An export folder read as hostile input: its files, its config and its weights, each checked before anything is allocated.

Safetensors only, never a pickle, never remote code. Everything that is wrong raises ``ExportError`` with the file and the key.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import SafetensorError, safe_open

from factory.errors import InputError

ALLOWED_SUFFIXES = {".json", ".safetensors", ".jinja"}
# Keys that make transformers or vLLM run code from the folder or from elsewhere.
CODE_KEYS = ("auto_map", "custom_pipelines", "quantization_config", "trust_remote_code")
FLOATS = {"F32", "BF16", "F16"}


class ExportError(InputError):
    """The export is not a plain Qwen3ForCausalLM folder; nothing of it was run."""


@dataclass(frozen=True)
class ExportConfig:
    """What config.json may say, in this project's words."""

    vocab_size: int
    d_model: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    d_ff: int
    context: int
    rope_theta: float
    norm_eps: float
    tied_embeddings: bool

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that model.safetensors must hold, and no other."""
        d, k = self.d_model, self.head_dim
        block = {
            "input_layernorm": (d,),
            "post_attention_layernorm": (d,),
            "self_attn.q_proj": (self.heads * k, d),
            "self_attn.k_proj": (self.kv_heads * k, d),
            "self_attn.v_proj": (self.kv_heads * k, d),
            "self_attn.o_proj": (d, self.heads * k),
            "self_attn.q_norm": (k,),
            "self_attn.k_norm": (k,),
            "mlp.gate_proj": (self.d_ff, d),
            "mlp.up_proj": (self.d_ff, d),
            "mlp.down_proj": (d, self.d_ff),
        }
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, d),
            "model.norm.weight": (d,),
        }
        for layer in range(self.layers):
            shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in block.items()}
        if not self.tied_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, d)
        return shapes


# key of config.json → (field, lowest, highest)
_WHOLE = {
    "vocab_size": ("vocab_size", 4, 1 << 20),
    "hidden_size": ("d_model", 1, 1 << 16),
    "num_hidden_layers": ("layers", 1, 512),
    "num_attention_heads": ("heads", 1, 1024),
    "num_key_value_heads": ("kv_heads", 1, 1024),
    "head_dim": ("head_dim", 2, 1024),
    "intermediate_size": ("d_ff", 1, 1 << 18),
    "max_position_embeddings": ("context", 8, 1 << 22),
}
# Keys whose only allowed values are these; a missing key has the first one's meaning in transformers.
_FIXED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "use_sliding_window": (False,),
    "sliding_window": (None,),
    "rope_scaling": (None,),
    "hidden_act": ("silu",),
}


def read_config(folder: Path) -> ExportConfig:
    """Raises: ExportError for a file that has no place in an export, or a config.json of another kind of model."""
    if not folder.is_dir():
        raise ExportError(f"{folder}: no such export folder")
    for path in sorted(folder.iterdir()):
        if path.is_symlink() or not path.is_file():
            raise ExportError(f"{path}: an export holds plain files only")
        if path.suffix not in ALLOWED_SUFFIXES:
            raise ExportError(f"{path}: {path.suffix or 'such a'} file has no place in an export")
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        if (folder / name).exists():
            found = [key for key in CODE_KEYS if key in read_json(folder / name)]
            if found:
                raise ExportError(f"{folder / name}: {found[0]}: an export may not ask for code or quantisation")
    where = folder / "config.json"
    data = read_json(where)
    if data.get("model_type") != "qwen3" or data.get("architectures") != ["Qwen3ForCausalLM"]:
        raise ExportError(
            f"{where}: expected a Qwen3ForCausalLM of model_type qwen3, got {str(data.get('architectures'))[:80]}"
        )
    for key, allowed in _FIXED.items():
        if data.get(key, allowed[0]) not in allowed:
            raise ExportError(f"{where}: {key}: expected {allowed[0]!r}, got {str(data[key])[:80]}")
    kinds = data.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise ExportError(f"{where}: layer_types: only full_attention is known")
    fields: dict[str, Any] = {}
    for key, (field, lowest, highest) in _WHOLE.items():
        value = data.get(key)
        if type(value) is not int or not lowest <= value <= highest:
            raise ExportError(
                f"{where}: {key}: expected a whole number from {lowest} to {highest}, got {str(value)[:40]}"
            )
        fields[field] = value
    if fields["heads"] % fields["kv_heads"] or fields["head_dim"] % 2:
        raise ExportError(f"{where}: heads must be a multiple of key-value heads, head_dim must be even")
    tied = data.get("tie_word_embeddings")
    if type(tied) is not bool:
        raise ExportError(f"{where}: tie_word_embeddings: expected true or false, got {str(tied)[:40]}")
    rope = data.get("rope_parameters") or {}
    if (
        not isinstance(rope, dict)
        or rope.get("rope_type", "default") != "default"
        or set(rope) - {"rope_type", "rope_theta"}
    ):
        raise ExportError(f"{where}: rope_parameters: only plain RoPE is known, got {str(rope)[:80]}")
    theta = _positive(where, "rope_theta", rope.get("rope_theta", data.get("rope_theta")))
    if "rope_theta" in data and "rope_theta" in rope and data["rope_theta"] != rope["rope_theta"]:
        raise ExportError(f"{where}: rope_theta is given twice, {data['rope_theta']!r} and {rope['rope_theta']!r}")
    return ExportConfig(
        **fields,
        rope_theta=theta,
        norm_eps=_positive(where, "rms_norm_eps", data.get("rms_norm_eps")),
        tied_embeddings=tied,
    )


def read_weights(folder: Path, config: ExportConfig) -> dict[str, torch.Tensor]:
    """All weights as fp32. Raises: ExportError for missing, extra, misshapen or non-finite tensors, or more than memory holds."""
    path = folder / "model.safetensors"
    expected = config.shapes()
    needed = 4 * sum(math.prod(shape) for shape in expected.values())
    available = psutil.virtual_memory().available
    if needed > available // 2:
        raise ExportError(f"{path}: config.json asks for {needed >> 20} MiB of weights, {available >> 20} MiB are free")
    weights: dict[str, torch.Tensor] = {}
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            if names != set(expected):
                missing, extra = sorted(set(expected) - names), sorted(names - set(expected))
                words = [
                    f"{len(part)} {word} (first: {part[0][:80]})"
                    for word, part in (("missing", missing), ("extra", extra))
                    if part
                ]
                raise ExportError(f"{path}: tensors {' and '.join(words)}")
            for name, shape in expected.items():
                part = file.get_slice(name)
                if tuple(part.get_shape()) != shape or part.get_dtype() not in FLOATS:
                    raise ExportError(
                        f"{path}: {name}: expected floats of shape {shape}, got {part.get_dtype()} {tuple(part.get_shape())}"
                    )
                weights[name] = file.get_tensor(name).to(torch.float32)
    except (SafetensorError, OSError, ValueError) as error:
        raise ExportError(f"{path} cannot be read: {error}") from error
    broken = [name for name, weight in weights.items() if not torch.isfinite(weight).all()]
    if broken:
        raise ExportError(f"{path}: {len(broken)} tensors hold NaN or infinity (first: {broken[0]})")
    return weights


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of at most 1 MiB. Raises: ExportError."""
    try:
        if path.stat().st_size > 1 << 20:
            raise ExportError(f"{path}: more than 1 MiB")
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ExportError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(data, dict):
        raise ExportError(f"{path}: expected a JSON object")
    return data


def _positive(where: Path, key: str, value: Any) -> float:
    if type(value) not in (int, float) or not (0 < value < 1e12):
        raise ExportError(f"{where}: {key}: expected a positive number, got {str(value)[:40]}")
    return float(value)
