"""Qwen3 (arXiv 2505.09388): Llama's block with a norm of each head's queries and keys.

A separate file, because each family has its own.
"""

from __future__ import annotations

from typing import Any

from models.adapters.config_reader import ConfigReader
from models.adapters.family import Family, read_common, read_layer_kinds, write_common
from models.spec import ModelSpec


def read(reader: ConfigReader) -> dict[str, Any]:
    reader.only("hidden_act", "silu")
    bias = reader.truth("attention_bias", False)
    found = read_common(reader)
    return found | {
        "tied": reader.truth("tie_word_embeddings", False),
        "qk_norm": True,
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "windows": read_layer_kinds(reader, found["layers"]),
    }


def write(spec: ModelSpec) -> dict[str, Any]:
    return write_common(spec) | {"attention_bias": spec.qkv_bias}


FAMILY = Family("qwen3", "Qwen3ForCausalLM", read, write, idle=("max_window_layers",))
