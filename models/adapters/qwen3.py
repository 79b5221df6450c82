"""Qwen3 (arXiv 2505.09388): Llama's block with a norm of each head's queries and keys.

A separate file, because each family has its own.
"""

from __future__ import annotations

from typing import Any

from models.adapters.config_reader import ConfigReader
from models.adapters.family import Family, read_common, require_silu, write_common, write_windows
from models.adapters.qwen2 import read_upper_windows
from models.spec import ModelSpec


def read(reader: ConfigReader) -> dict[str, Any]:
    require_silu(reader)
    found = read_common(reader, kv_heads=32, head_dim=128)
    bias = reader.truth("attention_bias", False)
    return found | {
        "tied": reader.truth("tie_word_embeddings", False),
        "qk_norm": True,
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "windows": read_upper_windows(reader, found["layers"]),
    }


def write(spec: ModelSpec) -> dict[str, Any]:
    return write_common(spec) | {"attention_bias": spec.qkv_bias} | write_windows(spec)


FAMILY = Family("qwen3", "Qwen3ForCausalLM", read, write)
