"""OLMo 2 (arXiv 2501.00656): norms after attention and MLP instead of before, and of all queries and all keys of a token together.

A separate file, because each family has its own.
"""

from __future__ import annotations

from typing import Any

from models.adapters.config_reader import ConfigReader
from models.adapters.family import (
    NAMES,
    Family,
    read_common,
    require_dividing_heads,
    require_no_window,
    require_silu,
    write_common,
)
from models.spec import ModelSpec


def read(reader: ConfigReader) -> dict[str, Any]:
    require_no_window(reader)
    return read_block(reader)


def read_block(reader: ConfigReader, **of_rope: Any) -> dict[str, Any]:
    """What OLMo 2 and 3 say with the same keys."""
    require_silu(reader)
    reader.only("clip_qkv", None)
    found = read_common(reader, **of_rope)
    require_dividing_heads(reader, found, whole_heads=True)
    bias = reader.truth("attention_bias", False)
    return found | {
        "tied": reader.truth("tie_word_embeddings", False),
        "norms": "post",
        "qk_norm": "whole",
        "qkv_bias": bias,
        "attention_out_bias": bias,
    }


def write(spec: ModelSpec) -> dict[str, Any]:
    return write_common(spec) | {"attention_bias": spec.qkv_bias}


NAMES_OF_OLMO = {
    **NAMES,
    "attention_post_norm": "post_attention_layernorm.weight",
    "mlp_post_norm": "post_feedforward_layernorm.weight",
}
FAMILY = Family("olmo2", "Olmo2ForCausalLM", read, write, names=lambda spec: NAMES_OF_OLMO)
