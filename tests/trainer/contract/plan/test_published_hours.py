"""GPU hours of published runs, by their models' config.json, against the plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.messages import refused
from tests.support.trainer.published_runs import HELD_OUT, QWEN3_30B, RUNS, Run
from trainer.contract.errors import RecipeError
from trainer.contract.plan.gpus import GPUS
from trainer.contract.plan.hf_config import read_config, read_shape_of_config
from trainer.contract.plan.run_plan import SPREAD, PlanRequest, plan_run


def planned(run: Run, name: str) -> float:
    model = read_shape_of_config(run.config, name, run.context)
    return plan_run(
        PlanRequest(model, run.tokens, run.gpus, GPUS["h100"], expert=run.expert, fp8=run.fp8)
    ).effort.gpu_hours


@pytest.mark.parametrize("name", RUNS | HELD_OUT)
def test_a_config_gives_the_published_number_of_parameters(name: str) -> None:
    run = (RUNS | HELD_OUT)[name]
    assert read_shape_of_config(run.config, name).parameters == pytest.approx(run.parameters, rel=0.005)


@pytest.mark.parametrize(("kind", "said", "tied"), [
    ("llama", None, False), ("gemma2", None, True), ("smollm3", None, True), ("gemma2", False, False), ("llama", True, True),
])  # fmt: skip
def test_a_config_without_tie_word_embeddings_has_the_default_of_its_class(
    kind: str, said: bool | None, tied: bool
) -> None:
    shape = {"vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {**shape, "intermediate_size": 128, "model_type": kind, "tie_word_embeddings": said}
    both = {on: read_shape_of_config(config | {"tie_word_embeddings": on}, "x").parameters for on in (True, False)}
    assert both[False] - both[True] == 1000 * 64
    assert read_shape_of_config(config, "x").parameters == both[tied]


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
    of_folder, of_file = read_config(tmp_path), read_config(tmp_path / "config.json")
    assert of_folder == of_file and of_folder.context == 4096 and read_config(tmp_path, 8192).context == 8192
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
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B | change))
    with refused(code, RecipeError, **data):
        read_config(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"hidden_size": NaN}', "[" * 9000])
def test_a_file_that_is_not_a_mapping_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(RecipeError, match="config.json"):
        read_config(tmp_path)
