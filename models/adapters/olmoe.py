"""OLMoE (arXiv 2409.02060): Llama's block with a norm of all queries and all keys of a token together, and experts in every layer.

A separate file, because each family has its own.
"""

from __future__ import annotations

from typing import Any

from models.adapters.config_reader import ConfigReader
from models.adapters.family import (
    Family,
    read_common,
    require_dividing_heads,
    require_no_window,
    require_silu,
    write_common,
)
from models.adapters.mixtral import OF_MIXTRAL, as_stored
from models.spec import ModelSpec


def read(reader: ConfigReader) -> dict[str, Any]:
    require_silu(reader)
    require_no_window(reader)
    reader.only("clip_qkv", None)
    reader.only("output_router_logits", False)
    found = read_common(reader)
    require_dividing_heads(reader, found, whole_heads=True)
    bias = reader.truth("attention_bias", False)
    return found | {
        "tied": reader.truth("tie_word_embeddings", False),
        "qk_norm": "whole",
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "experts": {
            **OF_MIXTRAL,
            "count": reader.whole("num_experts", 2, 4096, 64),
            "per_token": reader.whole("num_experts_per_tok", 1, 4096, 8),
            "d_ff": found["d_ff"],
            "normalise": reader.truth("norm_topk_prob", False),
        },
    }


def write(spec: ModelSpec) -> dict[str, Any]:
    found = write_common(spec) | {"attention_bias": spec.qkv_bias}
    if spec.experts is None:
        return found
    return found | {
        "intermediate_size": spec.experts.d_ff,
        "num_experts": spec.experts.count,
        "num_experts_per_tok": spec.experts.per_token,
        "norm_topk_prob": spec.experts.normalise,
        "output_router_logits": False,
        "router_aux_loss_coef": spec.experts.loss_weight,
    }


FAMILY = Family("olmoe", "OlmoeForCausalLM", read, write, as_stored=as_stored, idle=("router_aux_loss_coef",))
