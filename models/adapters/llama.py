"""Llama 2 and 3 (arXiv 2307.09288, 2407.21783), and SmolLM2, which has the same class.

A separate file, because each family has its own.
"""

from __future__ import annotations

from typing import Any

from kernels.contract.message import Message
from models.adapters.config_reader import ConfigReader
from models.adapters.family import Family, read_common, write_common
from models.spec import ModelSpec


def read(reader: ConfigReader) -> dict[str, Any]:
    reader.only("hidden_act", "silu")
    reader.only("pretraining_tp", 1)
    reader.only("use_sliding_window", False)
    reader.only("sliding_window", None)
    bias = reader.truth("attention_bias", False)
    found = read_common(reader)
    if found["d_model"] % found["heads"]:
        dividing = Message(
            "models.dividing_heads", "a number that divides hidden_size ({width})", width=found["d_model"]
        )
        raise reader.unexpected("num_attention_heads", dividing, found["heads"])
    return found | {
        "tied": reader.truth("tie_word_embeddings", False),
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": reader.truth("mlp_bias", False),
    }


def write(spec: ModelSpec) -> dict[str, Any]:
    return write_common(spec) | {"attention_bias": spec.qkv_bias, "mlp_bias": spec.mlp_bias}


FAMILY = Family("llama", "LlamaForCausalLM", read, write)
