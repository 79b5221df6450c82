"""Mixtral (arXiv 2401.04088): Mistral's attention, and in every layer experts whose weights are a softmax over the chosen ones.

A separate file, because each family has its own.
"""

from __future__ import annotations

from typing import Any

from models.adapters.config_reader import ConfigReader
from models.adapters.family import NAMES, Family, read_common, read_window_everywhere, require_silu, write_common
from models.spec import ModelSpec

# a softmax over the chosen experts is that over all, divided by the sum of the chosen
OF_MIXTRAL = {"shared": 0, "dense_layers": 0, "scores": "softmax", "balance": "loss"}


def read(reader: ConfigReader) -> dict[str, Any]:
    require_silu(reader)
    reader.only("attention_bias", False)  # the class reads neither
    reader.only("use_sliding_window", False)
    reader.only("output_router_logits", False)
    found = read_common(reader, kv_heads=8, theta=1_000_000.0)
    return found | {
        "tied": reader.truth("tie_word_embeddings", False),
        "windows": read_window_everywhere(reader, reader.whole("sliding_window", 1, 1 << 24, None)),
        "experts": {
            **OF_MIXTRAL,
            "count": reader.whole("num_local_experts", 2, 4096, 8),
            "per_token": reader.whole("num_experts_per_tok", 1, 4096, 2),
            "d_ff": found["d_ff"],
        },
    }


def write(spec: ModelSpec) -> dict[str, Any]:
    found = write_common(spec) | {"sliding_window": spec.layer(0).window}
    for key in ("attention_bias", "use_sliding_window"):
        del found[key]
    if spec.experts is None:
        return found
    return found | {
        "intermediate_size": spec.experts.d_ff,
        "num_local_experts": spec.experts.count,
        "num_experts_per_tok": spec.experts.per_token,
        "output_router_logits": False,
        "router_aux_loss_coef": spec.experts.loss_weight,
    }


def as_stored(spec: ModelSpec) -> ModelSpec:
    """No layer is dense, so nothing has the width ``d_ff``. The files have one width, that of an expert."""
    if spec.experts is None or spec.experts.dense_layers:
        return spec
    return spec.model_copy(update={"d_ff": spec.experts.d_ff})


NAMES_OF_MIXTRAL = {
    **NAMES,
    "router": "block_sparse_moe.gate.weight",
    "experts_gate": "block_sparse_moe.experts.{}.w1.weight",
    "experts_up": "block_sparse_moe.experts.{}.w3.weight",
    "experts_down": "block_sparse_moe.experts.{}.w2.weight",
}
FAMILY = Family(
    "mixtral",
    "MixtralForCausalLM",
    read,
    write,
    names=lambda spec: NAMES_OF_MIXTRAL,
    as_stored=as_stored,
    idle=("router_aux_loss_coef", "router_jitter_noise"),
)
