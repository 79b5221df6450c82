"""gpt-oss (arXiv 2508.10925): attention sinks, a window in every other layer, and experts with biases whose SwiGLU is clamped. Files in bf16.

A separate file, because each family has its own.
"""

from __future__ import annotations

from typing import Any

from models.adapters.config_reader import ConfigReader
from models.adapters.family import (
    NAMES,
    Family,
    read_common,
    read_windows,
    require_silu,
    write_common,
    write_windows,
)
from models.adapters.mixtral import OF_MIXTRAL, as_stored
from models.adapters.tensor_mapping import Join
from models.spec import ModelSpec, RopeScaling

# what a file without RoPE's parameters means
USUAL_SCALING = RopeScaling(kind="yarn", factor=32.0, original_context=4096, truncate=False)


def read(reader: ConfigReader) -> dict[str, Any]:
    require_silu(reader)
    reader.only("output_router_logits", False)
    says_rope = reader.config.get("rope_parameters") is not None or reader.config.get("rope_scaling")
    found = read_common(reader, head_dim=None if reader.is_null("head_dim") else 64, kv_heads=8, theta=150_000.0)
    if not says_rope:
        found["rope_scaling"] = USUAL_SCALING.model_dump()
    bias = reader.truth("attention_bias", True)
    per_token = reader.whole("num_experts_per_tok", 1, 4096, 4)
    reader.only("experts_per_token", per_token)  # the published files say it twice
    return found | {
        "tied": reader.truth("tie_word_embeddings", False),
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "attention_sinks": True,
        "windows": read_windows(reader, found["layers"], lambda number: number % 2 == 0, usual=128),
        "experts": {
            **OF_MIXTRAL,
            "count": reader.whole("num_local_experts", 2, 4096, 128),
            "per_token": per_token,
            "d_ff": found["d_ff"],
            "bias": True,
            "clamp": reader.positive("swiglu_limit", 7.0),
            "clamp_alpha": reader.positive("swiglu_alpha", 1.702),
        },
    }


def write(spec: ModelSpec) -> dict[str, Any]:
    found = write_common(spec) | {"layer_types": ["full_attention"] * spec.layers} | write_windows(spec)
    del found["use_sliding_window"]
    if spec.experts is None:
        return found
    return found | {
        "attention_bias": spec.qkv_bias,
        "intermediate_size": spec.experts.d_ff,
        "num_local_experts": spec.experts.count,
        "num_experts_per_tok": spec.experts.per_token,
        "swiglu_limit": spec.experts.clamp,
        "swiglu_alpha": spec.experts.clamp_alpha,
        "output_router_logits": False,
        "router_aux_loss_coef": spec.experts.loss_weight,
    }


NAMES_OF_GPT_OSS = {
    **NAMES,
    "sinks": "self_attn.sinks",
    "router": "mlp.router.weight",
    "router_logits_bias": "mlp.router.bias",
}
FAMILY = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    read,
    write,
    names=lambda spec: NAMES_OF_GPT_OSS,
    as_stored=as_stored,
    joins=(
        Join("mlp.experts.gate_up_proj", ("experts_gate", "experts_up"), in_turn=True, transposed=True),
        Join("mlp.experts.gate_up_proj_bias", ("experts_gate_bias", "experts_up_bias"), in_turn=True),
        Join("mlp.experts.down_proj", ("experts_down",), transposed=True),
        Join("mlp.experts.down_proj_bias", ("experts_down_bias",)),
    ),
    idle=("router_aux_loss_coef", "initial_context_length"),
)
