"""Gemma 2 (arXiv 2408.00118): norms before and after each half that multiply by 1 + weight, GELU gates, soft-caps, and a window in every other
layer."""

from __future__ import annotations

from typing import Any

from models.adapters.config_reader import ConfigReader
from models.adapters.family import (
    NAMES,
    Family,
    read_common,
    read_windows,
    require_dividing_heads,
    write_common,
    write_windows,
)
from models.spec import ModelSpec

GELU = "gelu_pytorch_tanh"
NAMES_OF_GEMMA = {
    **NAMES,
    "attention_post_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "mlp_post_norm": "post_feedforward_layernorm.weight",
}


def read(reader: ConfigReader) -> dict[str, Any]:
    found = read_block(reader)
    return found | {
        "attention_softcap": read_softcap(reader, "attn_logit_softcapping", 50.0),
        "logit_softcap": read_softcap(reader, "final_logit_softcapping", 30.0),
        "windows": read_windows(reader, found["layers"], lambda number: number % 2 == 0, usual=4096),
    }


def read_block(reader: ConfigReader, **of_rope: Any) -> dict[str, Any]:
    """What Gemma 2 and 3 say with the same keys."""
    # hidden_activation decides. Gemma 2's files also say hidden_act, which the class does not read
    reader.only("hidden_activation", GELU)
    reader.only("hidden_act", GELU)
    reader.only("tie_word_embeddings", True)  # vLLM's classes of Gemma tie their embeddings
    reader.only("use_bidirectional_attention", False)
    found = read_common(reader, kv_heads=4, head_dim=256, **of_rope)
    require_dividing_heads(reader, found)
    bias = reader.truth("attention_bias", False)
    return found | {
        "activation": "gelu_tanh",
        "tied": True,
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "norms": "sandwich",
        "norm_plus_one": True,
        "embedding_scale": found["d_model"] ** 0.5,
        "attention_scale": reader.whole("query_pre_attn_scalar", 1, 1 << 16, 256) ** -0.5,
    }


def read_softcap(reader: ConfigReader, key: str, usual: float) -> float | None:
    """null is no soft-cap, but a missing key is one of ``usual``."""
    return reader.positive(key, None if reader.is_null(key) else usual)


def write(spec: ModelSpec) -> dict[str, Any]:
    return write_block(spec) | {
        "attn_logit_softcapping": spec.attention_softcap,
        "final_logit_softcapping": spec.logit_softcap,
    }


def write_block(spec: ModelSpec) -> dict[str, Any]:
    """The keys that ``read_block`` and ``read_windows`` read."""
    found = write_common(spec)
    del found["use_sliding_window"]
    windows = {"layer_types": ["full_attention"] * spec.layers} | write_windows(spec)
    windows.pop("use_sliding_window", None)
    scale = spec.head_dim**-0.5 if spec.attention_scale is None else spec.attention_scale
    return (
        found
        | windows
        | {
            "hidden_act": GELU,
            "hidden_activation": GELU,
            "attention_bias": spec.qkv_bias,
            "query_pre_attn_scalar": max(1, round(scale**-2)),
        }
    )


FAMILY = Family("gemma2", "Gemma2ForCausalLM", read, write, names=lambda spec: NAMES_OF_GEMMA)
