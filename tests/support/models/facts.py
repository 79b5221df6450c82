"""Small models, each with one fact of ``ModelSpec`` that the first has not, and random weights by their native names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from models.spec import ModelSpec
from models.tensors import list_tensor_shapes
from tests.support.models.small_models import CASES

CONTEXT = 64
PLAIN: dict[str, Any] = {
    "vocab_size": 96, "d_model": 32, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 8, "d_ff": 48, "context": CONTEXT,
}  # fmt: skip
LATENT = {"q_rank": 24, "kv_rank": 16, "nope_head_dim": 8, "rope_head_dim": 6, "v_head_dim": 10}
WITH_LATENT = {"latent": LATENT, "qk_norm": False, "kv_heads": 4, "head_dim": 14}
EXPERTS = {"count": 8, "per_token": 3, "d_ff": 16}
SCALED = {"factor": 4.0, "original_context": 16}

FACTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a head of its own": {"tied": False},
    "no qk-norm": {"qk_norm": False},
    "whole qk-norm": {"qk_norm": "whole"},
    "biases of attention": {"qkv_bias": True, "attention_out_bias": True},
    "biases of the MLP": {"mlp_bias": True},
    "norms after": {"norms": "post"},
    "norms before and after": {"norms": "sandwich"},
    "norms plus one": {"norm_plus_one": True},
    "norms without weights": {"norm_weights": False, "norms": "sandwich"},
    "a norm of the embedding": {"embedding_norm": True},
    "embedding scale": {"embedding_scale": 5.5},
    "logit soft-cap": {"logit_softcap": 1.5},
    "RoPE on a part": {"rope_share": 0.5},
    "linear RoPE": {"rope_scaling": {"kind": "linear", "factor": 4.0}},
    "dynamic RoPE": {"rope_scaling": {"kind": "dynamic", "factor": 4.0, "original_context": CONTEXT}},
    "YaRN": {"rope_scaling": {"kind": "yarn", **SCALED}},
    "YaRN on a part": {"rope_scaling": {"kind": "yarn", **SCALED}, "rope_share": 0.5},
    "Llama 3's RoPE": {"rope_scaling": {"kind": "llama3", **SCALED}},
    "NoPE": {"nope_every": 2},
    "ALiBi": {"position": "alibi"},
    "ALiBi of six heads": {"position": "alibi", "heads": 6},
    "windows": {"windows": [5, None]},
    "windows with their RoPE": {
        "windows": [5, 5, None],
        "window_rope_theta": 100.0,
        "rope_scaling": {"kind": "linear", "factor": 4.0},
    },
    "windows with ALiBi": {"windows": [5, None], "position": "alibi"},
    "attention scale": {"attention_scale": 1.0},
    "attention soft-cap": {"attention_softcap": 1.0},
    "sinks": {"attention_sinks": True},
    "sinks with soft-cap, windows and ALiBi": {
        "attention_sinks": True,
        "attention_softcap": 1.0,
        "windows": [5, None],
        "position": "alibi",
    },
    "GELU": {"activation": "gelu"},
    "approximate GELU": {"activation": "gelu_tanh"},
    "ReLU² without gate": {"activation": "relu2", "gated": False, "mlp_bias": True},
    "latent attention": WITH_LATENT,
    "latent attention with one query step": WITH_LATENT | {"latent": LATENT | {"q_rank": None}},
    "latent attention with sinks": WITH_LATENT | {"attention_sinks": True, "nope_every": 2},
    "experts": {"experts": EXPERTS},
    "softmax experts": {"experts": EXPERTS | {"scores": "softmax", "balance": "loss", "shared": 0}},
    "experts in groups": {"experts": EXPERTS | {"groups": 4, "groups_per_token": 2, "scale": 2.5, "shared": 2}},
    "experts with biases": {"experts": EXPERTS | {"shared": 0, "bias": True}},
    "clamped experts": {"experts": EXPERTS | {"shared": 0, "clamp": 0.5}},
    "clamped experts with biases": {"experts": EXPERTS | {"shared": 0, "clamp": 0.8, "clamp_alpha": 1.2, "bias": True}},
    "experts not normalised": {"experts": EXPERTS | {"normalise": False, "dense_layers": 0}},
}

# The small models of every family, as an export must say them: without layers for multi-token prediction, for which it has no tensors.
EXPORTED_CASES = [
    replace(case, keys={**case.keys, "num_nextn_predict_layers": 0})
    if case.family in ("glm4_moe", "deepseek_v3")
    else case
    for case in CASES
    if not case.multi_token_layers
]


def make_spec(fact: str) -> ModelSpec:
    """The description of the small model with a fact."""
    return ModelSpec.model_validate(PLAIN | FACTS[fact])


def make_native_weights(spec: ModelSpec, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights. No norm is one, and no bias is zero."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in list_tensor_shapes(spec).items():
        values = torch.randn(shape, generator=generator)
        norm = name.endswith("norm")
        size = 0.3 if len(shape) == 1 else 1.5 * shape[-1] ** -0.5
        found[name] = values * size + float(norm)
    return found
