"""Seed-OSS: Llama's block, whose biases of attention are two keys.

A separate file, because each family has its own.
"""

from __future__ import annotations

from typing import Any

from models.adapters.config_reader import ConfigReader
from models.adapters.family import Family, read_common, require_no_window, require_silu, write_common
from models.spec import ModelSpec


def read(reader: ConfigReader) -> dict[str, Any]:
    require_silu(reader)
    require_no_window(reader)
    reader.only("pretraining_tp", 1)
    return read_common(reader, head_dim=None if reader.is_null("head_dim") else 128, kv_heads=8) | {
        "tied": reader.truth("tie_word_embeddings", False),
        "qkv_bias": reader.truth("attention_bias", True),
        "attention_out_bias": reader.truth("attention_out_bias", False),
        "mlp_bias": reader.truth("mlp_bias", False),
    }


def write(spec: ModelSpec) -> dict[str, Any]:
    return write_common(spec) | {
        "attention_bias": spec.qkv_bias,
        "attention_out_bias": spec.attention_out_bias,
        "mlp_bias": spec.mlp_bias,
    }


FAMILY = Family("seed_oss", "SeedOssForCausalLM", read, write)
