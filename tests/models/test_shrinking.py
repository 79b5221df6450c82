"""A shrunken model has every fact of the real one, in smaller sizes."""

from __future__ import annotations

from typing import Any

import pytest

from models.adapters import find_family_for_export
from models.shrinking import count_layers_of_all_kinds, shrink_spec
from models.spec import ModelSpec
from models.tensors import list_block_shapes

LARGE: dict[str, Any] = {
    "vocab_size": 512, "d_model": 4096, "layers": 48, "heads": 32, "kv_heads": 8, "head_dim": 128, "d_ff": 16_384, "context": 8192,
}  # fmt: skip
EXPERTS = {"count": 128, "per_token": 6, "d_ff": 1536, "shared": 2, "dense_layers": 3}
LATENT = {"q_rank": 1536, "kv_rank": 512, "nope_head_dim": 128, "rope_head_dim": 64, "v_head_dim": 128}
FACTS = {
    "plain": {},
    "windows": {"windows": [1024] * 5 + [None], "window_rope_theta": 1e4, "rope_theta": 1e6, "norms": "sandwich", "norm_plus_one": True,
                "embedding_scale": 64.0, "attention_softcap": 50.0, "logit_softcap": 30.0, "activation": "gelu_tanh"},
    "no position in every fourth layer": {"nope_every": 4, "qk_norm": False, "windows": [512, None]},
    "biases and an untied head": {"tied": False, "qkv_bias": True, "attention_out_bias": True, "mlp_bias": True, "gated": False, "rope_share": 0.5},
    "post norms": {"norms": "post", "qk_norm": "whole",
                   "rope_scaling": {"kind": "yarn", "factor": 4.0, "original_context": 2048}},
    "experts in groups": {"experts": EXPERTS | {"groups": 8, "groups_per_token": 4, "scale": 2.5, "scores": "softmax"}},
    "norms without weights": {"norm_weights": False, "embedding_norm": True, "gated": False, "activation": "relu2"},
    "experts with biases": {"experts": EXPERTS | {"shared": 0, "bias": True, "clamp": 7.0}, "attention_sinks": True},
    "latent attention": {"latent": LATENT, "heads": 32, "kv_heads": 32, "head_dim": 192, "qk_norm": False, "experts": EXPERTS},
}  # fmt: skip
SIZES = {*LARGE, "windows", "embedding_scale", "latent", "experts"}


@pytest.mark.parametrize("name", FACTS)
@pytest.mark.parametrize("more", [{}, {"head_dim": 16, "d_model": 64}])
def test_a_shrunken_model_differs_in_sizes_alone_and_has_the_tensors_of_every_kind_of_layer(
    name: str, more: dict[str, int]
) -> None:
    large = ModelSpec.model_validate(LARGE | FACTS[name])
    small = shrink_spec(large, layers=2, context=256, kv_heads=2, experts=8, **more)
    assert small.parameters < large.parameters / 50
    before, after = large.model_dump(), small.model_dump()
    assert {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)} <= SIZES
    assert (small.heads // small.kv_heads, small.context, small.rope_dim % 2) == (large.heads // large.kv_heads, 256, 0)

    def kinds(spec: ModelSpec) -> set[Any]:
        layers = ((spec.layer(number), list_block_shapes(spec, number)) for number in range(spec.layers))
        return {(kind.window is None, kind.rope, kind.experts is None, tuple(names)) for kind, names in layers}

    assert kinds(small) == kinds(large)
    assert [w is None for w in small.windows or []] == [w is None for w in large.windows or []]
    if large.experts is not None:
        assert small.experts is not None
        same = {
            "per_token",
            "shared",
            "groups",
            "groups_per_token",
            "scale",
            "scores",
            "normalise",
            "balance",
            "bias",
            "clamp",
        }
        assert all(getattr(small.experts, key) == getattr(large.experts, key) for key in same)


def test_the_windows_of_a_shrunken_model_hide_positions_as_before() -> None:
    large = ModelSpec.model_validate(LARGE | FACTS["windows"])
    assert shrink_spec(large, context=256).layer(0).window == 1024 * 256 // 8192
    assert shrink_spec(large, context=16_384) == large, "nothing grows"


def test_a_scale_of_embeddings_that_is_the_root_of_the_width_stays_the_root_of_the_width() -> None:
    for scale, after in ((64.0, 16.0), (5.0, 5.0)):
        large = ModelSpec.model_validate(LARGE | {"embedding_scale": scale})
        assert shrink_spec(large, d_model=256).embedding_scale == after


def test_a_model_that_is_small_already_stays_as_it_is() -> None:
    for facts in FACTS.values():
        spec = ModelSpec.model_validate(LARGE | facts)
        small = shrink_spec(spec, layers=2, context=256, kv_heads=2, experts=8)
        assert shrink_spec(small, layers=2, context=256, kv_heads=2, experts=8) == small
        assert count_layers_of_all_kinds(small) <= small.layers


def test_the_files_of_the_real_models_family_can_hold_the_shrunken_one() -> None:
    for facts in ({"nope_every": 4, "qk_norm": False}, {"experts": EXPERTS}, {"tied": False}):
        large = ModelSpec.model_validate(LARGE | facts)
        small = shrink_spec(large, layers=2, context=256, kv_heads=2, experts=8)
        assert find_family_for_export(small).name == find_family_for_export(large).name
