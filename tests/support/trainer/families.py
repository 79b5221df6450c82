"""One small model of each family that the trainer knows, and what transformers calls it."""

from __future__ import annotations

from typing import Any

EXPERTS = {"count": 4, "per_token": 2, "d_ff": 48, "shared": 2, "dense_layers": 1, "bias_rate": 0.02}
ODD = {"model__rope_theta": 500.0, "model__norm_eps": 1e-5, "model__layers": 3}  # nothing that is anybody's default

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qk-norm": ("Qwen3ForCausalLM", {}),
    "plain": ("LlamaForCausalLM", {"model__qk_norm": False}),
    "nope": ("SmolLM3ForCausalLM", {"model__qk_norm": False, "model__nope_every": 2}),
    "experts": ("Glm4MoeForCausalLM", {"model__experts": EXPERTS}),
    "experts-plain": ("Glm4MoeForCausalLM", {"model__experts": EXPERTS | {"shared": 1}, "model__qk_norm": False}),
    "experts-one": ("Glm4MoeForCausalLM", {"model__experts": EXPERTS | {"per_token": 1, "dense_layers": 0}}),
    "experts-no-shared": ("Glm4MoeForCausalLM", {"model__experts": EXPERTS | {"shared": 0}}),
    "mup": ("Qwen3ForCausalLM", {"model__base_d_model": 8}),
}

# Models that a description of each further kind gives: what families of public models need beyond those above.
DESCRIBED: dict[str, dict[str, Any]] = {
    "llama": {
        "model__qk_norm": False,
        "model__tied": False,
        "model__qkv_bias": True,
        "model__attention_out_bias": True,
        "model__mlp_bias": True,
        "model__rope_scaling": {"kind": "llama3", "factor": 4.0, "original_context": 16},
    },
    "olmo2": {"model__head_dim": 8, "model__norms": "post", "model__qk_norm": "whole", "model__tied": False},
    "gemma2": {
        "model__norms": "sandwich",
        "model__norm_plus_one": True,
        "model__qk_norm": False,
        "model__windows": [9, None],
        "model__attention_softcap": 2.0,
        "model__logit_softcap": 3.0,
        "model__activation": "gelu_tanh",
        "model__embedding_scale": 32**0.5,
    },
    "qwen3-moe": {
        "model__tied": False,
        "model__experts": {
            "count": 4, "per_token": 2, "d_ff": 16, "shared": 0, "dense_layers": 0, "scores": "softmax", "balance": "loss", "loss_weight": 0.1,
        },
    },
    "exaone4": {"model__norms": "post", "model__windows": [9, None], "model__nope_every": 2, "model__tied": False},
    "nanochat": {
        "model__tied": False,
        "model__norm_weights": False,
        "model__embedding_norm": True,
        "model__gated": False,
        "model__activation": "relu2",
        "model__logit_softcap": 15.0,
    },
    "gpt-oss": {
        "model__qk_norm": False,
        "model__tied": False,
        "model__attention_sinks": True,
        "model__qkv_bias": True,
        "model__attention_out_bias": True,
        "model__windows": [9, None],
        "model__experts": {
            "count": 4, "per_token": 2, "d_ff": 16, "shared": 0, "dense_layers": 0, "scores": "softmax", "balance": "loss",
            "bias": True, "clamp": 7.0,
        },
    },
    "deepseek": {
        "model__qk_norm": False,
        "model__kv_heads": 4,
        "model__tied": False,
        "model__latent": {"q_rank": 24, "kv_rank": 16, "nope_head_dim": 8, "rope_head_dim": 8, "v_head_dim": 12},
        "model__experts": {"count": 8, "per_token": 2, "d_ff": 16, "shared": 1, "groups": 4, "groups_per_token": 2, "scale": 1.5},
    },
    "multi-token": {
        "model__experts": {"count": 4, "per_token": 2, "d_ff": 16, "shared": 1, "bias_rate": 0.02},
        "model__base_d_model": 16,
        "model__multi_token_layers": 2,
        "multi_token_weight": 0.3,
    },
}  # fmt: skip
