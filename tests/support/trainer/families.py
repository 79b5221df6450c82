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
