"""``config.json`` of an export, read as hostile input: every key it may have, what each may say, and the tensors that follow.

The architectures are those of ``trainer.contract.checkpoint.architectures``. A missing key means what transformers assumes,
or is an error. A key that is not listed is refused: some make a server fetch or run code.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from factory.core.errors import InputError
from trainer.contract.checkpoint.architectures import ARCHITECTURES, Architecture

MOST_EXPERTS = 1 << 16  # over all layers; each is three tensors


class ExportError(InputError):
    """The export is not a plain folder of a known architecture; no code of it was run."""


@dataclass(frozen=True)
class ExpertsConfig:
    count: int
    per_token: int
    d_ff: int
    shared: int  # experts that every token goes to, stored as one of that many times the width
    dense_layers: int  # first layers without experts


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
    qk_norm: bool
    rope_layers: tuple[bool, ...]  # does a layer have RoPE?
    experts: ExpertsConfig | None = None

    def experts_at(self, layer: int) -> ExpertsConfig | None:
        return self.experts if self.experts is not None and layer >= self.experts.dense_layers else None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that model.safetensors must hold, and no other."""
        d, k = self.d_model, self.head_dim
        attention: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (d,),
            "post_attention_layernorm.weight": (d,),
            "self_attn.q_proj.weight": (self.heads * k, d),
            "self_attn.k_proj.weight": (self.kv_heads * k, d),
            "self_attn.v_proj.weight": (self.kv_heads * k, d),
            "self_attn.o_proj.weight": (d, self.heads * k),
        }
        if self.qk_norm:
            attention |= {"self_attn.q_norm.weight": (k,), "self_attn.k_norm.weight": (k,)}
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, d),
            "model.norm.weight": (d,),
        }
        for layer in range(self.layers):
            experts = self.experts_at(layer)
            parts = attention | (_mlp("mlp", d, self.d_ff) if experts is None else _experts(experts, d))
            shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}
        if not self.tied_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, d)
        return shapes


def _mlp(name: str, d: int, d_ff: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}.gate_proj.weight": (d_ff, d),
        f"{name}.up_proj.weight": (d_ff, d),
        f"{name}.down_proj.weight": (d, d_ff),
    }


def _experts(experts: ExpertsConfig, d: int) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {
        "mlp.gate.weight": (experts.count, d),
        "mlp.gate.e_score_correction_bias": (experts.count,),
        **_mlp("mlp.shared_experts", d, experts.shared * experts.d_ff),
    }
    for number in range(experts.count):
        found |= _mlp(f"mlp.experts.{number}", d, experts.d_ff)
    return found


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
_WHOLE_OF_EXPERTS = {
    "n_routed_experts": ("count", 2, 4096),
    "num_experts_per_tok": ("per_token", 1, 4096),
    "moe_intermediate_size": ("d_ff", 1, 1 << 18),
    "n_shared_experts": ("shared", 0, 64),
    "first_k_dense_replace": ("dense_layers", 0, 512),
}
# Keys whose only allowed values are these; a missing key has the first one's meaning in transformers.
_FIXED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "use_sliding_window": (False,),
    "sliding_window": (None,),
    "rope_scaling": (None,),
    "hidden_act": ("silu",),
}
# Keys that change nothing that is measured: names, versions, defaults of training and of a tokenizer.
_IDLE = {
    "architectures", "model_type", "attention_dropout", "bos_token_id", "dtype", "eos_token_id", "initializer_range",
    "max_window_layers", "no_rope_layer_interval", "pad_token_id", "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip
_READ = {"layer_types", "no_rope_layers", "rms_norm_eps", "rope_parameters", "rope_theta", "tie_word_embeddings"}


def parse_config(data: dict[str, Any], where: Path | str) -> ExportConfig:
    """Raises: ExportError naming ``where`` and the key."""
    kind = data.get("model_type")
    architecture = ARCHITECTURES.get(kind) if isinstance(kind, str) else None
    if architecture is None or data.get("architectures") != [architecture.class_name]:
        known = ", ".join(f"{known.class_name} ({name})" for name, known in ARCHITECTURES.items())
        found = f"{str(data.get('architectures'))[:80]} ({str(kind)[:40]})"
        raise ExportError(f"{where}: architectures: expected one of {known}, got {found}")
    whole = _WHOLE | (_WHOLE_OF_EXPERTS if architecture.has_experts else {})
    fixed = _FIXED | architecture.only
    for key, allowed in fixed.items():
        value = data.get(key, allowed[0])
        if value not in allowed or type(value) not in {type(other) for other in allowed}:
            raise ExportError(f"{where}: {key}: expected {allowed[0]!r}, got {str(value)[:80]}")
    known_keys = (
        _IDLE | _READ | whole.keys() | fixed.keys() | ({"use_qk_norm"} if architecture.qk_norm is None else set())
    )
    if strange := sorted(data.keys() - known_keys):
        raise ExportError(f"{where}: {strange[0][:80]}: no such key is known of {architecture.class_name}")
    for key in sorted(_IDLE & data.keys() - {"architectures"}):
        values = data[key] if isinstance(data[key], list) else [data[key]]
        if len(values) > 16 or any(isinstance(value, dict | list) or len(str(value)) > 80 for value in values):
            raise ExportError(f"{where}: {key}: expected a plain value, got {str(data[key])[:80]}")
    fields = _whole(where, data, _WHOLE)
    if fields["heads"] % fields["kv_heads"] or fields["head_dim"] % 2:
        raise ExportError(f"{where}: heads must be a multiple of key-value heads, head_dim must be even")
    experts = None
    if architecture.has_experts:
        experts = ExpertsConfig(**_whole(where, data, _WHOLE_OF_EXPERTS))
        if experts.per_token > experts.count:
            raise ExportError(
                f"{where}: num_experts_per_tok ({experts.per_token}) is more than {experts.count} experts"
            )
        if experts.dense_layers > fields["layers"] or fields["layers"] * experts.count > MOST_EXPERTS:
            raise ExportError(
                f"{where}: {experts.dense_layers} dense of {fields['layers']} layers, {experts.count} experts each: more "
                f"dense layers than layers, or more than {MOST_EXPERTS} experts in all"
            )
    return ExportConfig(
        **fields,
        rope_theta=_rope_theta(where, data, architecture),
        norm_eps=_positive(where, "rms_norm_eps", data.get("rms_norm_eps")),
        tied_embeddings=_truth(where, "tie_word_embeddings", data.get("tie_word_embeddings")),
        qk_norm=(
            _truth(where, "use_qk_norm", data.get("use_qk_norm"))
            if architecture.qk_norm is None
            else architecture.qk_norm
        ),
        rope_layers=_rope_layers(where, data, architecture, fields["layers"]),
        experts=experts,
    )


def _rope_theta(where: Path | str, data: dict[str, Any], architecture: Architecture) -> float:
    rope = data.get("rope_parameters") or {}
    allowed = {"rope_type", "rope_theta", "partial_rotary_factor"}
    if not isinstance(rope, dict) or rope.get("rope_type", "default") != "default" or rope.keys() - allowed:
        raise ExportError(f"{where}: rope_parameters: only plain RoPE is known, got {str(rope)[:80]}")
    share = rope.get("partial_rotary_factor", architecture.rotary_share)
    if type(share) not in (int, float) or share != 1.0:
        raise ExportError(
            f"{where}: rope_parameters: partial_rotary_factor: only RoPE of the whole head is known, got {str(share)[:40]}"
        )
    if "rope_theta" in data and "rope_theta" in rope and data["rope_theta"] != rope["rope_theta"]:
        raise ExportError(
            f"{where}: rope_theta is given twice, {str(data['rope_theta'])[:40]} and {str(rope['rope_theta'])[:40]}"
        )
    return _positive(where, "rope_theta", rope.get("rope_theta", data.get("rope_theta")))


def _rope_layers(where: Path | str, data: dict[str, Any], architecture: Architecture, layers: int) -> tuple[bool, ...]:
    kinds = data.get("layer_types")
    if kinds is not None and kinds != ["full_attention"] * layers:
        raise ExportError(f"{where}: layer_types: expected full_attention {layers} times, got {str(kinds)[:80]}")
    has_rope = data.get("no_rope_layers")
    if not architecture.has_nope:
        if has_rope is not None:
            raise ExportError(f"{where}: no_rope_layers: {architecture.class_name} has none")
        return (True,) * layers
    if (
        not isinstance(has_rope, list)
        or len(has_rope) != layers
        or any(type(value) is not int or value not in (0, 1) for value in has_rope)
    ):
        raise ExportError(f"{where}: no_rope_layers: expected {layers} of 0 and 1, got {str(has_rope)[:80]}")
    return tuple(bool(value) for value in has_rope)


def _whole(where: Path | str, data: dict[str, Any], keys: dict[str, tuple[str, int, int]]) -> dict[str, int]:
    fields: dict[str, int] = {}
    for key, (field, lowest, highest) in keys.items():
        value = data.get(key)
        if type(value) is not int or not lowest <= value <= highest:
            raise ExportError(
                f"{where}: {key}: expected a whole number from {lowest} to {highest}, got {str(value)[:40]}"
            )
        fields[field] = value
    return fields


def _truth(where: Path | str, key: str, value: Any) -> bool:
    if type(value) is not bool:
        raise ExportError(f"{where}: {key}: expected true or false, got {str(value)[:40]}")
    return value


def _positive(where: Path | str, key: str, value: Any) -> float:
    if type(value) not in (int, float) or not (0 < value < 1e12):
        raise ExportError(f"{where}: {key}: expected a positive number, got {str(value)[:40]}")
    return float(value)
