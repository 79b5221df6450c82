"""GLM-4.5 (arXiv 2508.06471): Llama's attention, with biases and RoPE on a part of each head, and DeepSeek-V3's experts.

A separate file, because each family has its own.
"""

from __future__ import annotations

from typing import Any

from models.adapters.config_reader import ConfigReader
from models.adapters.family import (
    Family,
    list_partial_rope_rows,
    read_common,
    require_no_window,
    require_silu,
    write_common,
)
from models.spec import ExpertsSpec, ModelSpec


def read(reader: ConfigReader) -> dict[str, Any]:
    require_silu(reader)
    require_no_window(reader)
    found = read_common(reader, kv_heads=8, share=0.5)
    return found | {
        "tied": reader.truth("tie_word_embeddings", False),
        "qk_norm": reader.truth("use_qk_norm", False),
        "qkv_bias": reader.truth("attention_bias", False),
        "experts": read_experts(reader),
        "multi_token_layers": read_multi_token_layers(reader),
    }


def read_experts(reader: ConfigReader) -> dict[str, Any]:
    """The experts as DeepSeek-V3 and GLM-4.5 name them."""
    reader.only("output_router_logits", False)
    return {
        "count": reader.whole("n_routed_experts", 2, 4096),
        "per_token": reader.whole("num_experts_per_tok", 1, 4096),
        "d_ff": reader.whole("moe_intermediate_size", 1, 1 << 18),
        "shared": reader.whole("n_shared_experts", 0, 64),
        "dense_layers": reader.whole("first_k_dense_replace", 0, 512),
        "groups": reader.whole("n_group", 1, 4096),
        "groups_per_token": reader.whole("topk_group", 1, 4096),
        "normalise": reader.truth("norm_topk_prob", True),
        "scale": reader.positive("routed_scaling_factor"),
    }


def read_multi_token_layers(reader: ConfigReader) -> int:
    """How many layers for multi-token prediction GLM-4.5 and DeepSeek-V3 have behind the others. A missing key is one."""
    return reader.whole("num_nextn_predict_layers", 0, 16, reader.whole("num_mtp_layers", 0, 16, 1))


def write(spec: ModelSpec) -> dict[str, Any]:
    experts = spec.experts
    return write_common(spec) | {
        "attention_bias": spec.qkv_bias,
        "use_qk_norm": spec.qk_norm,
        "num_nextn_predict_layers": spec.multi_token_layers,
        "partial_rotary_factor": spec.rope_share,
        "rope_parameters": write_common(spec)["rope_parameters"] | {"partial_rotary_factor": spec.rope_share},
        **(write_experts(experts) if experts else {}),
    }


def write_experts(experts: ExpertsSpec) -> dict[str, Any]:
    """The keys that ``read_experts`` reads."""
    return {
        "n_routed_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.d_ff,
        "n_shared_experts": experts.shared,
        "first_k_dense_replace": experts.dense_layers,
        "n_group": experts.groups,
        "topk_group": experts.groups_per_token,
        "norm_topk_prob": experts.normalise,
        "routed_scaling_factor": experts.scale,
    }


def as_stored(spec: ModelSpec) -> ModelSpec:
    """vLLM's class ties no embeddings and needs a shared expert: the head is stored as a copy, and a shared expert of zeros adds nothing."""
    experts = spec.experts
    if experts is not None:
        experts = experts.model_copy(update={"shared": max(1, experts.shared), "balance": "bias"})
    return spec.model_copy(update={"tied": False, "experts": experts})


def order_rows(spec: ModelSpec, key: str) -> tuple[int, ...] | None:
    heads = {
        "q": spec.heads,
        "q_bias": spec.heads,
        "k": spec.kv_heads,
        "k_bias": spec.kv_heads,
        "q_norm": 1,
        "k_norm": 1,
    }
    return list_partial_rope_rows(heads[key], spec.head_dim, spec.rope_dim) if key in heads else None


FAMILY = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    read,
    write,
    order_rows=order_rows,
    as_stored=as_stored,
)
