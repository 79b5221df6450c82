"""DeepSeek-V3 (arXiv 2412.19437): multi-head latent attention whose RoPE turns neighbouring dimensions, and experts that a biased sigmoid chooses.

A separate file, because each family has its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from models.adapters.config_reader import ConfigReader
from models.adapters.family import (
    NAMES,
    Family,
    find_mscale,
    read_common,
    require_no_window,
    require_silu,
    write_common,
)
from models.adapters.glm4_moe import as_stored, read_experts, read_multi_token_layers, write_experts
from models.spec import ModelSpec, RopeScaling

EPS = 1e-6  # of the norms of compressed queries, keys and values, whatever the file says


def read(reader: ConfigReader) -> dict[str, Any]:
    require_silu(reader)
    require_no_window(reader)
    reader.only("attention_bias", False)
    reader.only("rope_interleave", True)
    reader.only("rms_norm_eps", EPS)
    reader.only("pretraining_tp", 1)
    reader.only("scoring_func", "sigmoid")
    reader.only("topk_method", "noaux_tc")
    reader.only("moe_layer_freq", 1)
    latent = {
        "q_rank": reader.whole("q_lora_rank", 1, 1 << 16, None if reader.is_null("q_lora_rank") else 1536),
        "kv_rank": reader.whole("kv_lora_rank", 1, 1 << 16),
        "nope_head_dim": reader.whole("qk_nope_head_dim", 1, 1024),
        "rope_head_dim": reader.whole("qk_rope_head_dim", 2, 1024),
        "v_head_dim": reader.whole("v_head_dim", 1, 1024),
    }
    head_dim = latent["nope_head_dim"] + latent["rope_head_dim"]
    # transformers 5 writes both keys. They follow from the others
    reader.only("head_dim", latent["rope_head_dim"])
    reader.only("qk_head_dim", head_dim)
    found = read_common(reader)
    # after read_common, which checks that this is a mapping of numbers
    reader.only("num_key_value_heads", found["heads"])
    mscale = (reader.take("rope_parameters", None) or reader.take("rope_scaling", None) or {}).get("mscale_all_dim")
    if found.get("rope_scaling") and mscale:
        found["attention_scale"] = _scale(head_dim, found["rope_scaling"]["factor"], mscale)
    return found | {
        "tied": reader.truth("tie_word_embeddings", False),
        "head_dim": head_dim,
        "latent": latent,
        "experts": read_experts(reader),
        "multi_token_layers": read_multi_token_layers(reader),
    }


def _scale(head_dim: int, factor: float, mscale: float) -> float:
    """The scale of attention's scores, which grows with YaRN's factor (DeepSeek-V3's own code, and transformers)."""
    more = find_mscale(factor, mscale)
    return float(head_dim**-0.5 * more * more)


def write(spec: ModelSpec) -> dict[str, Any]:
    latent, experts = spec.latent, spec.experts
    found = write_common(spec) | {"rope_interleave": True}
    if latent is None or experts is None:
        return found
    parameters = found["rope_parameters"]
    if spec.rope_scaling is not None and spec.attention_scale is not None:
        mscale = _find_mscale_of(spec.attention_scale, spec.head_dim, spec.rope_scaling)
        parameters = parameters | {"mscale_all_dim": mscale}
        if spec.rope_scaling.attention_factor == 1.0:  # as DeepSeek's files and vLLM's class say it
            del parameters["attention_factor"]
            parameters["mscale"] = mscale
    return (
        found
        | write_experts(experts)
        | {
            "rope_parameters": parameters,
            "head_dim": latent.rope_head_dim,
            "q_lora_rank": latent.q_rank,
            "kv_lora_rank": latent.kv_rank,
            "qk_nope_head_dim": latent.nope_head_dim,
            "qk_rope_head_dim": latent.rope_head_dim,
            "v_head_dim": latent.v_head_dim,
            "num_nextn_predict_layers": spec.multi_token_layers,
            # transformers' class routes in no other way; vLLM's reads how, and else takes softmax without a bias
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
        }
    )


def _find_mscale_of(scale: float, head_dim: int, scaling: RopeScaling) -> float:
    """The ``mscale_all_dim`` that gives this scale of the scores: the roundest number that gives it to the bit, else the nearest."""
    if scaling.factor <= 1:
        return 1.0
    near = (math.sqrt(scale * math.sqrt(head_dim)) - 1.0) / (0.1 * math.log(scaling.factor))
    rounded = (round(near, digits) for digits in range(1, 16))
    return next((one for one in rounded if one > 0 and _scale(head_dim, scaling.factor, one) == scale), max(near, 0.0))


def order_rows(spec: ModelSpec, key: str) -> tuple[int, ...] | None:
    """The files turn dimension 2i of a head's last part with 2i + 1; natively i turns with i + half."""
    latent = spec.latent
    assert latent is not None
    turning = latent.rope_head_dim
    apart = (*range(0, turning, 2), *range(1, turning, 2))
    heads, start, size = {
        "q": (spec.heads, latent.nope_head_dim, spec.head_dim),
        "kv_down": (1, latent.kv_rank, latent.kv_rank + turning),
    }.get(key, (0, 0, 0))
    if not heads:
        return None
    one_head = (*range(start), *(start + row for row in apart))
    return tuple(head * size + row for head in range(heads) for row in one_head)


def names(spec: ModelSpec) -> Mapping[str, str]:
    compressed = spec.latent is not None and spec.latent.q_rank is not None
    return {
        **NAMES,
        "q_down": "self_attn.q_a_proj.weight",
        "q_down_norm": "self_attn.q_a_layernorm.weight",
        "q": "self_attn.q_b_proj.weight" if compressed else "self_attn.q_proj.weight",
        "kv_down": "self_attn.kv_a_proj_with_mqa.weight",
        "kv_down_norm": "self_attn.kv_a_layernorm.weight",
        "kv_up": "self_attn.kv_b_proj.weight",
    }


FAMILY = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    read,
    write,
    names=names,
    order_rows=order_rows,
    as_stored=as_stored,
    idle=("aux_loss_alpha", "seq_aux", "ep_size"),
)
