"""If a family says that its files can hold a description, transformers' class of its config.json has exactly the tensors of its mappings."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.adapters import FAMILIES
from models.adapters.config_reader import ModelFilesError
from models.spec import ModelSpec
from tests.support.models.files import list_file_tensors

SCALINGS = (
    {"kind": "linear", "factor": 2.0},
    {"kind": "dynamic", "factor": 2.0, "original_context": 64},
    {"kind": "yarn", "factor": 4.0, "original_context": 16, "attention_factor": 1.0},
    {"kind": "yarn", "factor": 4.0, "original_context": 16, "truncate": False, "beta_fast": 16.0},
    {"kind": "llama3", "factor": 8.0, "original_context": 32},
)
LATENT = {"q_rank": 24, "kv_rank": 16, "nope_head_dim": 8, "rope_head_dim": 8, "v_head_dim": 8}
OF_QWEN = {"scores": "softmax", "balance": "loss", "shared": 0}
EXPERTS = st.fixed_dictionaries(
    {
        "count": st.sampled_from([4, 8]),
        "per_token": st.sampled_from([1, 2]),
        "d_ff": st.just(16),
        "shared": st.sampled_from([0, 1, 2]),
        "dense_layers": st.sampled_from([0, 1]),
        "normalise": st.booleans(),
    }
)
GEMMA = {
    "norms": "sandwich",
    "norm_plus_one": True,
    "activation": "gelu_tanh",
    "embedding_scale": 32**0.5,
    "windows": [8, None],
}
# Facts that go together in each family.
STYLES: dict[str, dict[str, Any]] = {
    "llama": {"qk_norm": False},
    "qwen2": {"qk_norm": False, "qkv_bias": True, "head_dim": 8},
    "qwen3": {},
    "qwen3_moe": {"qk_norm": True},
    "smollm3": {"qk_norm": False, "nope_every": 2},
    "olmo2": {"qk_norm": "whole", "norms": "post", "head_dim": 8},
    "mistral": {"qk_norm": False, "windows": [8]},
    "gemma2": GEMMA | {"qk_norm": False, "attention_softcap": 50.0, "tied": True},
    "gemma3_text": GEMMA | {"window_rope_theta": 1e3, "tied": True},
    "glm4_moe": {"rope_share": 0.5},
    "deepseek_v3": {"qk_norm": False, "latent": LATENT, "head_dim": 16, "kv_heads": 4},
    "olmo3": {"qk_norm": "whole", "norms": "post", "head_dim": 8, "windows": [8, None], "window_rope_theta": 5e5},
    "exaone4": {"norms": "post", "windows": [8, None], "nope_every": 2},
    "seed_oss": {"qk_norm": False, "attention_out_bias": True},
    "mixtral": {"qk_norm": False},
    "olmoe": {"qk_norm": "whole", "head_dim": 8},
    "nanochat": {"norm_weights": False, "embedding_norm": True, "gated": False, "activation": "relu2"},
    "phi3": {"qk_norm": False, "rope_share": 0.5},
    "gpt_oss": {
        "qk_norm": False,
        "attention_sinks": True,
        "qkv_bias": True,
        "attention_out_bias": True,
        "windows": [8, None],
    },
}
OF_MIXTRAL = OF_QWEN | {"dense_layers": 0}
# of experts, what goes together in each family
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": OF_QWEN,
    "glm4_moe": {"groups": 2, "groups_per_token": 1},
    "deepseek_v3": {"groups": 2, "groups_per_token": 1},
    "mixtral": OF_MIXTRAL | {"normalise": True},
    "olmoe": OF_MIXTRAL,
    "gpt_oss": OF_MIXTRAL | {"normalise": True, "bias": True, "clamp": 7.0},
}
# Facts of which a description changes at most two: with all at random no family could hold it.
CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "rope_scaling": st.sampled_from(SCALINGS),
        "attention_scale": st.sampled_from([0.5, 16**-0.5, 12**-0.5]),
        "windows": st.sampled_from([None, [8], [8, None], [8, 9]]),
        "qk_norm": st.sampled_from([True, False, "whole"]),
        "norms": st.sampled_from(["pre", "post", "sandwich"]),
        "rope_share": st.sampled_from([0.5, 1.0]),
        **{key: st.just(30.0) for key in ("logit_softcap", "attention_softcap")},
        **{key: st.booleans() for key in ("tied", "qkv_bias", "mlp_bias", "attention_out_bias", "attention_sinks", "gated", "norm_plus_one")},
    },
).filter(lambda changes: len(changes) <= 2)  # fmt: skip


@st.composite
def specs(draw: st.DrawFn, family: str) -> ModelSpec | None:
    """A description in the style of a family, with at most two facts changed; None if it is impossible."""
    keys: dict[str, Any] = {
        "vocab_size": 64,
        "d_model": 32,
        "layers": draw(st.sampled_from([2, 3])),
        "heads": 4,
        "kv_heads": draw(st.sampled_from([1, 2, 4])),
        "head_dim": draw(st.sampled_from([8, 16])),
        "d_ff": 48,
        "context": 64,
        "tied": draw(st.booleans()),
        "rope_theta": draw(st.sampled_from([1e4, 5e5])),
    }
    if family in MIXTURES:
        keys["experts"] = draw(EXPERTS) | MIXTURES[family]
    changes = draw(st.one_of(st.just({}), CHANGES))
    try:
        return ModelSpec.model_validate(keys | STYLES[family] | changes)
    except ValueError:
        return None


held: Counter[str] = Counter()


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_family_holds_has_the_tensors_of_transformers(family: str) -> None:
    import transformers

    transformers.logging.set_verbosity_error()

    @settings(max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(specs(family))
    def check(spec: ModelSpec | None) -> None:
        if spec is None:
            return
        one = FAMILIES[family]
        if one.find_differences(spec):
            return
        held[family] += 1
        stored = one.as_stored(spec)
        config = transformers.AutoConfig.for_model(family, **one.write(stored), pad_token_id=None)
        with torch.device("meta"):
            model = getattr(transformers, one.class_name)(config)
        found = {name: tuple(tensor.shape) for name, tensor in list_file_tensors(model, model.state_dict()).items()}
        if stored.tied:
            del found["lm_head.weight"]
        assert found == {name: mapping.shape for mapping in one.list_mappings(stored) for name in mapping.theirs}

    check()
    assert held[family] >= 15, "a family that holds hardly anything proves nothing"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_description_with_another_fact_is_not_held_as_if_it_were_the_same(family: str) -> None:
    """``find_differences`` is the only judge of what is exported: a fact that ``write`` drops must show."""
    base: dict[str, Any] = {
        "vocab_size": 64,
        "d_model": 32,
        "layers": 4,
        "heads": 4,
        "kv_heads": 4,
        "head_dim": 8,
        "d_ff": 48,
        "context": 64,
    }
    if family in MIXTURES:
        base["experts"] = {"count": 4, "per_token": 2, "d_ff": 16} | MIXTURES[family]
    spec = ModelSpec.model_validate(base | STYLES[family])
    one = FAMILIES[family]
    assert one.find_differences(spec) == {}
    for change in (
        {"attention_sinks": not spec.attention_sinks},
        {"gated": not spec.gated},
        {"position": "alibi", "nope_every": None, "latent": None, "window_rope_theta": None},
        {"activation": "relu2" if spec.activation != "relu2" else "gelu"},
        {"norm_weights": not spec.norm_weights},
        {"embedding_norm": not spec.embedding_norm},
        {"windows": [7, 9]},
        {"norm_plus_one": not spec.norm_plus_one},
        {"norms": "pre" if spec.norms != "pre" else "post"},
        {"embedding_scale": 3.0},
        {"qk_norm": "whole" if spec.qk_norm != "whole" else False},
    ):
        assert one.find_differences(spec.model_copy(update=change)), change


def test_a_family_that_is_not_known_is_refused() -> None:
    from models.adapters import find_family_for_export

    spec = ModelSpec(vocab_size=64, d_model=32, layers=2, heads=4, kv_heads=2, head_dim=8, d_ff=48, context=64)
    with pytest.raises(ModelFilesError) as raised:
        find_family_for_export(spec.model_copy(update={"family": "bloom"}))
    assert raised.value.code == "models.no_such_family"
    with pytest.raises(ModelFilesError) as raised:
        find_family_for_export(spec.model_copy(update={"attention_sinks": True}))
    assert raised.value.code == "models.no_family"
