"""GPU hours of published runs, by their models' config.json, against the plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from models.adapters import FAMILIES
from tests.support.messages import refused
from tests.support.trainer.public_configs import CONFIGS
from tests.support.trainer.published import MODELS
from tests.support.trainer.published_runs import HELD_OUT, QWEN3_30B, RUNS, Run
from trainer.contract.errors import RecipeError
from trainer.contract.plan.gpus import GPUS
from trainer.contract.plan.hf_config import read_config, read_public_model
from trainer.contract.plan.run_plan import SPREAD, PlanRequest, plan_run


def planned(run: Run, name: str) -> float:
    model = read_public_model(run.config, name, run.context).spec
    return plan_run(
        PlanRequest(model, run.tokens, run.gpus, GPUS["h100"], expert=run.expert, fp8=run.fp8)
    ).effort.gpu_hours


@pytest.mark.parametrize("name", RUNS | HELD_OUT)
def test_a_config_gives_the_published_number_of_parameters(name: str) -> None:
    run = (RUNS | HELD_OUT)[name]
    spec = read_public_model(run.config, name).spec.without_multi_token  # as the numbers are published
    assert spec.parameters == pytest.approx(run.parameters, rel=0.005)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_public_config_gives_the_parameters_of_the_models_files(name: str) -> None:
    published = next(one for one in MODELS if one.name in (name, name.replace("SmolLM2-", "SmolLM2 ")))
    found = read_public_model(CONFIGS[name], name).spec.without_multi_token
    assert found.parameters == pytest.approx(published.parameters, rel=published.digits, abs=0)
    for key in ("activation", "gated", "latent", "norms", "qk_norm", "qkv_bias", "tied"):
        assert getattr(found, key) == getattr(published.model, key), key
    assert [found.layer(n) for n in range(4)] == [
        replace(published.model.layer(n), experts=found.layer(n).experts) for n in range(4)
    ]


@pytest.mark.parametrize(("kind", "said", "tied"), [
    ("newer", None, False), ("gemma", None, True), ("starcoder2", None, True), ("gemma", False, False), ("newer", True, True),
])  # fmt: skip
def test_a_config_without_tie_word_embeddings_has_the_default_of_its_class(
    kind: str, said: bool | None, tied: bool
) -> None:
    shape = {"vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {**shape, "intermediate_size": 128, "model_type": kind, "tie_word_embeddings": said}
    both = {on: read_public_model(config | {"tie_word_embeddings": on}, "x").spec.parameters for on in (True, False)}
    assert both[False] - both[True] == 1000 * 64
    assert read_public_model(config, "x").spec.parameters == both[tied]


@pytest.mark.parametrize("name", RUNS)
def test_published_gpu_hours_lie_within_35_per_cent(name: str) -> None:
    assert planned(RUNS[name], name) == pytest.approx(RUNS[name].hours, rel=0.35)


@pytest.mark.parametrize("name", RUNS | HELD_OUT)
def test_published_gpu_hours_lie_within_the_stated_spread(name: str) -> None:
    run = (RUNS | HELD_OUT)[name]
    assert 1 / SPREAD < planned(run, name) / run.hours < SPREAD


# -- reading a config.json -----------------------------------------------------------------------------------------------
def test_read_config_takes_a_folder_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(QWEN3_30B | {"architectures": ["Qwen3MoeForCausalLM"], "rope_scaling": None})
    )
    of_folder, of_file = read_config(tmp_path).spec, read_config(tmp_path / "config.json").spec
    assert of_folder == of_file and of_folder.context == 4096 and read_config(tmp_path, 8192).spec.context == 8192
    assert of_folder.experts is not None and of_folder.matmul_parameter_count == pytest.approx(3.04e9, rel=0.01)


@pytest.mark.parametrize(
    ("change", "code", "data"),
    [
        ({"hidden_size": None}, "plan.not_a_decoder", {"key": "hidden_size"}),
        ({"mamba_d_state": 16, "model_type": "jamba"}, "plan.other_blocks", {"kind": "jamba", "key": "mamba_d_state"}),
        ({"n_group": "x", "topk_group": 4}, "plan.not_a_whole_number", {"key": "n_group", "value": "x"}),
        ({"mlp_only_layers": 3}, "plan.not_a_list", {"value": 3}),
        ({"num_hidden_layers": "many"}, "plan.not_a_whole_number", {"key": "num_hidden_layers", "value": "many"}),
        (
            {"num_experts": 4, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
            "strict.wrong_value",
            {},
        ),
    ],
)
def test_a_config_of_another_kind_of_model_is_refused_by_key(
    change: dict[str, Any], code: str, data: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B | {"model_type": "newer_moe"} | change))
    with refused(code, RecipeError, **data):
        read_config(tmp_path)


def test_a_config_of_a_known_family_is_read_as_strictly_as_for_an_import() -> None:
    strict, guessed = (read_public_model(QWEN3_30B | more, "x") for more in ({}, {"model_type": "newer_moe"}))
    assert strict.family is FAMILIES["qwen3_moe"] and guessed.family is None
    assert strict.spec.experts is not None and strict.spec.experts.scores == "softmax" and strict.spec.qk_norm
    assert guessed.spec.experts is not None and guessed.spec.experts.scores == "sigmoid", "no key says it"
    assert strict.longest_context == guessed.longest_context == 131_072 and strict.spec.context == 4096
    with refused("models.unknown_key", RecipeError, key="clip_qkv", value="8.0"):
        read_public_model(QWEN3_30B | {"clip_qkv": 8.0}, "x")
    with refused("models.missing_key", RecipeError, key="hidden_size"):
        read_public_model(QWEN3_30B | {"hidden_size": None}, "x")


def test_the_part_for_text_of_a_model_that_reads_images_is_planned_by_key_names() -> None:
    """Gemma 3 4B: google/gemma-3-4b-pt has these keys below text_config; 3.88 B parameters are for text (arXiv 2503.19786 Table 1)."""
    text = {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262_208, "sliding_window": 1024, "tie_word_embeddings": True,
    }  # fmt: skip
    found = read_public_model(
        {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 1152}}, "x"
    )
    assert found.family is None and found.spec.parameters == pytest.approx(3.88e9, rel=1e-3)


@pytest.mark.parametrize("text", ["{", "[]", '{"hidden_size": NaN}', "[" * 9000])
def test_a_file_that_is_not_a_mapping_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(RecipeError, match="config.json"):
        read_config(tmp_path)
