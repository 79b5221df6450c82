"""Phi-3 and Phi-4 (arXiv 2404.14219, 2412.08905): Llama's block, with queries, keys and values in one matrix, and gate and up in another.

A separate file, because each family has its own.
"""

from __future__ import annotations

from typing import Any

from kernels.contract.message import Message
from models.adapters.config_reader import ConfigReader
from models.adapters.family import (
    Family,
    list_partial_rope_rows,
    read_common,
    read_window_everywhere,
    require_silu,
    write_common,
)
from models.adapters.tensor_mapping import Join
from models.spec import ModelSpec


def read(reader: ConfigReader) -> dict[str, Any]:
    require_silu(reader)
    reader.only("attention_bias", False)  # the class reads neither
    reader.only("use_sliding_window", False)
    found = read_common(reader, share=1.0)
    if scaling := found.get("rope_scaling"):
        raise reader.unexpected(
            "rope_scaling",
            Message("models.no_scaling", "null, because the class scales in a way that cannot be held"),
            scaling["kind"],
        )
    return found | {
        "tied": reader.truth("tie_word_embeddings", False),
        "windows": read_window_everywhere(reader, reader.whole("sliding_window", 1, 1 << 24, None)),
    }


def write(spec: ModelSpec) -> dict[str, Any]:
    found = write_common(spec) | {"sliding_window": spec.layer(0).window, "partial_rotary_factor": spec.rope_share}
    for key in ("attention_bias", "use_sliding_window"):
        del found[key]
    return found


def order_rows(spec: ModelSpec, key: str) -> tuple[int, ...] | None:
    heads = {"q": spec.heads, "k": spec.kv_heads}
    return list_partial_rope_rows(heads[key], spec.head_dim, spec.rope_dim) if key in heads else None


FAMILY = Family(
    "phi3",
    "Phi3ForCausalLM",
    read,
    write,
    order_rows=order_rows,
    joins=(Join("self_attn.qkv_proj.weight", ("q", "k", "v")), Join("mlp.gate_up_proj.weight", ("gate", "up"))),
    idle=("original_max_position_embeddings",),  # where its RoPE would be scaled
)
