"""Qwen3-MoE (arXiv 2505.09388): Qwen3's attention, and experts whose weights are a softmax over all of them.

A separate file, because each family has its own.
"""

from __future__ import annotations

from typing import Any

from kernels.contract.message import Message
from models.adapters.config_reader import ConfigReader
from models.adapters.family import Family, read_common, read_window_everywhere, require_silu, write_common
from models.spec import ModelSpec


def read(reader: ConfigReader) -> dict[str, Any]:
    require_silu(reader)
    reader.only("output_router_logits", False)
    reader.only("decoder_sparse_step", 1)
    reader.only("shared_expert_intermediate_size", 0)
    reader.only("qkv_bias", False)  # this key and the next stand in Qwen3-Coder's files. The class reads neither
    reader.only("use_qk_norm", True)
    found = read_common(reader, kv_heads=4)
    bias = reader.truth("attention_bias", False)
    used = reader.truth("use_sliding_window", False)
    window = reader.whole("sliding_window", 1, 1 << 24, None if reader.is_null("sliding_window") else 4096)
    return found | {
        "tied": reader.truth("tie_word_embeddings", False),
        "qk_norm": True,
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "windows": read_window_everywhere(reader, window if used else None),
        "experts": {
            "count": _count(reader),
            "per_token": reader.whole("num_experts_per_tok", 1, 4096),
            "d_ff": reader.whole("moe_intermediate_size", 1, 1 << 18),
            "shared": 0,
            "dense_layers": _dense_layers(reader, found["layers"]),
            "scores": "softmax",
            "normalise": reader.truth("norm_topk_prob", False),
            "balance": "loss",
        },
    }


def _count(reader: ConfigReader) -> int:
    """The number of experts: ``num_experts``, which transformers 5 writes as ``num_local_experts``."""
    count = reader.whole("num_experts", 2, 4096, None)
    local = reader.whole("num_local_experts", 2, 4096, None)
    if count is not None and local is not None and count != local:
        raise reader.unexpected("num_local_experts", str(count), local)
    return count or local or reader.whole("num_experts", 2, 4096)


def _dense_layers(reader: ConfigReader, layers: int) -> int:
    dense = reader.take("mlp_only_layers", [])
    if not isinstance(dense, list) or sorted(map(str, dense)) != sorted(map(str, range(len(dense)))):
        first = Message("models.first_layers", "a list of the first layers' numbers: [], [0], [0, 1] …")
        raise reader.unexpected("mlp_only_layers", first, dense)
    return len(dense)


def write(spec: ModelSpec) -> dict[str, Any]:
    experts = spec.experts
    found = write_common(spec) | {"attention_bias": spec.qkv_bias, "sliding_window": None}
    if window := spec.layer(0).window:
        found |= {"use_sliding_window": True, "sliding_window": window}
    if experts is None:
        return found
    return found | {
        "num_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.d_ff,
        "mlp_only_layers": list(range(experts.dense_layers)),
        "decoder_sparse_step": 1,
        "norm_topk_prob": experts.normalise,
        "output_router_logits": False,
        "router_aux_loss_coef": experts.loss_weight,
    }


FAMILY = Family("qwen3_moe", "Qwen3MoeForCausalLM", read, write, idle=("max_window_layers", "router_aux_loss_coef"))
