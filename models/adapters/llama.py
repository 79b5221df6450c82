"""Llama 2 and 3 (arXiv 2307.09288, 2407.21783), and SmolLM2, which has the same class.

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
from models.spec import ModelSpec


def read(reader: ConfigReader) -> dict[str, Any]:
    require_silu(reader)
    require_no_window(reader)
    reader.only("pretraining_tp", 1)
    found = read_common(reader)
    require_dividing_heads(reader, found)
    bias = reader.truth("attention_bias", False)
    return found | {
        "tied": reader.truth("tie_word_embeddings", False),
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": reader.truth("mlp_bias", False),
    }


def write(spec: ModelSpec) -> dict[str, Any]:
    return write_common(spec) | {"attention_bias": spec.qkv_bias, "mlp_bias": spec.mlp_bias}


FAMILY = Family("llama", "LlamaForCausalLM", read, write)
