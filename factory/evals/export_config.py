"""Parses ``config.json`` of an export as hostile input: its allowed keys, their values, and the tensors that they require.

The architectures are those of ``trainer.contract.checkpoint.architectures``. A missing key has the default of transformers or is an error. An unknown
key is refused, because some keys make a server fetch or run code.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from factory.core.errors import InputError
from trainer.contract.checkpoint.architectures import ARCHITECTURES, Architecture

MOST_EXPERTS = 1 << 16  # in all layers; each expert has three tensors


class ExportError(InputError):
    """The export is not a plain folder of a known architecture. No code of the export was run."""


@dataclass(frozen=True)
class ExpertsConfig:
    count: int
    per_token: int
    d_ff: int
    shared: int  # experts for every token; stored as one expert of ``shared`` times the width
    dense_layers: int  # leading layers without experts


@dataclass(frozen=True)
class ExportConfig:
    """The values of config.json, with this project's names."""

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
    rope_layers: tuple[bool, ...]  # for each layer: does it have RoPE?
    experts: ExpertsConfig | None = None

    def get_experts_of_layer(self, layer: int) -> ExpertsConfig | None:
        return self.experts if self.experts is not None and layer >= self.experts.dense_layers else None

    def list_tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of exactly the tensors that model.safetensors must hold."""
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
            experts = self.get_experts_of_layer(layer)
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
# The only allowed values of these keys. In transformers, a missing key means the first value.
_FIXED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "use_sliding_window": (False,),
    "sliding_window": (None,),
    "rope_scaling": (None,),
    "hidden_act": ("silu",),
}
# Keys that do not change any measurement: names, versions, defaults of training and of a tokenizer.
_IDLE = {
    "architectures", "model_type", "attention_dropout", "bos_token_id", "dtype", "eos_token_id", "initializer_range",
    "max_window_layers", "no_rope_layer_interval", "pad_token_id", "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip
_READ = {"layer_types", "no_rope_layers", "rms_norm_eps", "rope_parameters", "rope_theta", "tie_word_embeddings"}


def parse_config(data: dict[str, Any], where: Path | str) -> ExportConfig:
    """Check and parse config.json. Raises: ExportError naming ``where`` and the key."""
    kind = data.get("model_type")
    architecture = ARCHITECTURES.get(kind) if isinstance(kind, str) else None
    if architecture is None or data.get("architectures") != [architecture.class_name]:
        raise ExportError(
            "export_config.unknown_architecture", "{file}: architectures {given} with model_type {kind} are not supported. "
                                                  "Supported: {known}",
            file=where, given=str(data.get("architectures"))[:80], kind=str(kind)[:40],
            known=[f"{one.class_name} ({name})" for name, one in ARCHITECTURES.items()],
        )  # fmt: skip
    whole = _WHOLE | (_WHOLE_OF_EXPERTS if architecture.has_experts else {})
    fixed = _FIXED | architecture.only
    for key, allowed in fixed.items():
        value = data.get(key, allowed[0])
        if value not in allowed or type(value) not in {type(other) for other in allowed}:
            raise _unexpected(where, key, repr(allowed[0]), value)
    known_keys = (
        _IDLE | _READ | whole.keys() | fixed.keys() | ({"use_qk_norm"} if architecture.qk_norm is None else set())
    )
    if strange := sorted(data.keys() - known_keys):
        raise ExportError(
            "export_config.unknown_key", "{file}: {architecture} has no key {key}",
            file=where, architecture=architecture.class_name, key=strange[0][:80],
        )  # fmt: skip
    for key in sorted(_IDLE & data.keys() - {"architectures"}):
        values = data[key] if isinstance(data[key], list) else [data[key]]
        if len(values) > 16 or any(isinstance(value, dict | list) or len(str(value)) > 80 for value in values):
            raise _unexpected(where, key, "a short plain value", data[key])
    fields = _whole(where, data, _WHOLE)
    if fields["heads"] % fields["kv_heads"]:
        raise ExportError(
            "export_config.heads", "{file}: the number of attention heads ({heads}) is not a multiple of the number of key-value heads "
                                   "({kv_heads})",
            file=where, heads=fields["heads"], kv_heads=fields["kv_heads"],
        )  # fmt: skip
    if fields["head_dim"] % 2:
        raise _unexpected(where, "head_dim", "an even number", fields["head_dim"])
    experts = None
    if architecture.has_experts:
        experts = ExpertsConfig(**_whole(where, data, _WHOLE_OF_EXPERTS))
        if experts.per_token > experts.count:
            raise _unexpected(where, "num_experts_per_tok", f"<= {experts.count} (n_routed_experts)", experts.per_token)
        if experts.dense_layers > fields["layers"]:
            raise _unexpected(
                where, "first_k_dense_replace", f"<= {fields['layers']} (num_hidden_layers)", experts.dense_layers
            )
        if fields["layers"] * experts.count > MOST_EXPERTS:
            raise ExportError(
                "export_config.too_many_experts", "{file}: {layers:,} layers with {experts:,} experts each have {total:,} experts in "
                                                  "total. At most {limit:,} are allowed",
                file=where, layers=fields["layers"], experts=experts.count, total=fields["layers"] * experts.count, limit=MOST_EXPERTS,
            )  # fmt: skip
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


def _unexpected(where: Path | str, key: str, expected: str, given: Any) -> ExportError:
    return ExportError(
        "export_config.other_value", "{file}: key {key}: expected {expected}, got {given}",
        file=where, key=key, expected=expected, given=str(given)[:80],
    )  # fmt: skip


def _rope_theta(where: Path | str, data: dict[str, Any], architecture: Architecture) -> float:
    rope = data.get("rope_parameters") or {}
    allowed = {"rope_type", "rope_theta", "partial_rotary_factor"}
    if not isinstance(rope, dict) or rope.get("rope_type", "default") != "default" or rope.keys() - allowed:
        raise _unexpected(where, "rope_parameters", "RoPE of type 'default'", rope)
    share = rope.get("partial_rotary_factor", architecture.rotary_share)
    if type(share) not in (int, float) or share != 1.0:
        raise _unexpected(where, "rope_parameters.partial_rotary_factor", "1.0 (whole heads)", share)
    if "rope_theta" in data and "rope_theta" in rope and data["rope_theta"] != rope["rope_theta"]:
        raise ExportError(
            "export_config.two_rope_thetas", "{file}: rope_theta has two values: {values}",
            file=where, values=[str(one["rope_theta"])[:40] for one in (data, rope)],
        )  # fmt: skip
    return _positive(where, "rope_theta", rope.get("rope_theta", data.get("rope_theta")))


def _rope_layers(where: Path | str, data: dict[str, Any], architecture: Architecture, layers: int) -> tuple[bool, ...]:
    kinds = data.get("layer_types")
    if kinds is not None and kinds != ["full_attention"] * layers:
        raise _unexpected(where, "layer_types", f"{layers} times full_attention", kinds)
    has_rope = data.get("no_rope_layers")
    if not architecture.has_nope:
        if has_rope is not None:
            raise _unexpected(where, "no_rope_layers", f"no value for {architecture.class_name}", has_rope)
        return (True,) * layers
    if (
        not isinstance(has_rope, list)
        or len(has_rope) != layers
        or any(type(value) is not int or value not in (0, 1) for value in has_rope)
    ):
        raise _unexpected(where, "no_rope_layers", f"{layers} numbers, each 0 or 1", has_rope)
    return tuple(bool(value) for value in has_rope)


def _whole(where: Path | str, data: dict[str, Any], keys: dict[str, tuple[str, int, int]]) -> dict[str, int]:
    fields: dict[str, int] = {}
    for key, (field, lowest, highest) in keys.items():
        value = data.get(key)
        if type(value) is not int or not lowest <= value <= highest:
            raise _unexpected(where, key, f"integer from {lowest} to {highest}", value)
        fields[field] = value
    return fields


def _truth(where: Path | str, key: str, value: Any) -> bool:
    if type(value) is not bool:
        raise _unexpected(where, key, "true or false", value)
    return value


def _positive(where: Path | str, key: str, value: Any) -> float:
    if type(value) not in (int, float) or not (0 < value < 1e12):
        raise _unexpected(where, key, "a positive number", value)
    return float(value)
