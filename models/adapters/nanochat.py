"""nanochat: norms without weights, also of the embedding, QK-norm after RoPE, and an MLP of ReLU² without a gate.

A separate file, because each family has its own. The class turns queries and keys first and then normalises them. The order does not matter: a turn
keeps the length of a head, so the native order computes the same.
"""

from __future__ import annotations

from typing import Any

from kernels.contract.message import Message
from models.adapters.config_reader import ConfigReader
from models.adapters.family import NAMES, Family, read_common, require_no_window, write_common
from models.adapters.gemma2 import read_softcap
from models.spec import ModelSpec


def read(reader: ConfigReader) -> dict[str, Any]:
    reader.only("hidden_act", "relu2")
    require_no_window(reader)
    found = read_common(reader)
    scaling = found.get("rope_scaling") or {}
    if scaling.get("kind") == "yarn" and scaling["factor"] > 1 and scaling["attention_factor"] != 1.0:
        # the norm after RoPE would remove the factor
        raise reader.unexpected(
            "attention_factor", Message("models.unit_factor", "1.0, with rope_type yarn"), scaling["attention_factor"]
        )
    bias = reader.truth("attention_bias", False)
    return found | {
        "tied": reader.truth("tie_word_embeddings", False),
        "qk_norm": True,
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "activation": "relu2",
        "gated": False,
        "norm_weights": False,
        "embedding_norm": True,
        "logit_softcap": read_softcap(reader, "final_logit_softcapping", 15.0),
    }


def write(spec: ModelSpec) -> dict[str, Any]:
    found = write_common(spec) | {
        "hidden_act": "relu2",
        "attention_bias": spec.qkv_bias,
        "final_logit_softcapping": spec.logit_softcap,
    }
    del found["use_sliding_window"]
    return found


def order_rows(spec: ModelSpec, key: str) -> tuple[int, ...] | None:
    """The class turns the other way: with the halves of a head exchanged, that is the native turn."""
    heads = {"q": spec.heads, "q_bias": spec.heads, "k": spec.kv_heads, "k_bias": spec.kv_heads}.get(key)
    if heads is None:
        return None
    half = spec.head_dim // 2
    return tuple(
        head * spec.head_dim + (row + half) % spec.head_dim for head in range(heads) for row in range(spec.head_dim)
    )


NAMES_OF_NANOCHAT = {**NAMES, "up": "mlp.fc1.weight", "down": "mlp.fc2.weight"}
FAMILY = Family(
    "nanochat", "NanoChatForCausalLM", read, write, names=lambda spec: NAMES_OF_NANOCHAT, order_rows=order_rows
)
