from __future__ import annotations

from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml

from models.adapters import find_family_for_export
from tests.support.messages import codes, refused
from tests.support.paths import ROOT
from tests.support.trainer.families import DESCRIBED
from tests.support.trainer.segments import TINY, recipe_with
from trainer.contract.errors import RecipeError
from trainer.contract.recipe import LATER, Recipe


@pytest.mark.parametrize("path", sorted((ROOT / "policies" / "recipes").glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_recipes_load_and_survive_a_round_trip(path: Path) -> None:
    recipe = Recipe.load(path)
    assert recipe.name == path.stem
    assert Recipe.parse(recipe.model_dump()) == recipe


@pytest.mark.parametrize(
    ("change", "problem", "data"),
    [
        ({"model__heads": 3}, "models.heads", {"heads": 3, "kv_heads": 2}),
        ({"model__head_dim": 15}, "multiple of 2", {"key": "model.head_dim"}),
        ({"model__d_model": 0}, "greater than 0", {"key": "model.d_model"}),
        ({"model__layers": "two"}, "valid integer", {"key": "model.layers", "got": " (got 'two')"}),
        ({"model__contxt": 5}, "context", {"key": "model.contxt"}),
        ({"bach": {}}, "batch", {"key": "bach"}),
        ({"schedule__trunk_steps": {"first": 5}}, "", {"key": "schedule.trunk_steps.later"}),
        ({"schedule__warmup_steps": 21}, "recipe.warm_up_too_long", {"warmup": 21, "first": 20}),
        ({"mixture__weights": {"code": 0.0}}, "recipe.no_weight", {"key": "weights"}),
        ({"mixture__phases": [{"from_step": 1, "weight": {}}]}, "weights", {"key": "mixture.phases.0.weight"}),
        ({"precision": "fp16"}, "'fp32', 'bf16' or 'fp8'", {"key": "precision"}),
        (
            {"precision": "fp8", "model__context": 40},
            "recipe.fp8_size",
            {"key": "context", "size": 40},
        ),
        ({"precision": "fp8", "model__d_ff": 72}, "recipe.fp8_size", {"key": "d_ff", "size": 72}),
        ({"precision": "fp8", "model__head_dim": 12}, "recipe.fp8_size", {"key": "kv_heads · head_dim", "size": 24}),
        ({"precision": "fp8", "parallel__tensor": 4}, "recipe.fp8_size", {"key": "kv_heads · head_dim", "size": 32}),
        (
            {
                "precision": "fp8",
                "model__experts": {"count": 4, "per_token": 1, "d_ff": 8, "shared": 1},
            },
            "recipe.fp8_size",
            {"key": "experts.shared · experts.d_ff", "size": 8},
        ),
        ({"optimizer__lr": -1.0}, "greater than 0", {"key": "optimizer.lr"}),
        (
            {
                "model__qk_norm": False,
                "model__latent": {
                    "q_rank": None,
                    "kv_rank": 8,
                    "nope_head_dim": 4,
                    "rope_head_dim": 2,
                    "v_head_dim": 4,
                },
            },
            "models.latent",
            {"keys": 6},
        ),
        ({"model__experts": {"count": 4, "per_token": 1, "d_ff": 12}}, "multiple of 8", {"key": "model.experts.d_ff"}),
        (
            {"model__experts": {"count": 4, "per_token": 1, "d_ff": 8}, "model__d_model": 36},
            "models.experts_width",
            {"d_model": 36, "multiple": 8},
        ),
        ({"model__nope_every": 2}, "models.no_family", {"family": "Qwen3ForCausalLM"}),
        ({"model__position": "alibi"}, "models.no_family", {"family": "Qwen3ForCausalLM"}),
        (
            {"model__attention_sinks": True},
            "models.no_family",
            {"family": "Qwen3ForCausalLM"},
        ),  # of gpt-oss, with its experts
        ({"model__norm_weights": False, "model__norm_plus_one": True}, "models.norm_weights", {}),
        ({"model__experts": {"count": 4, "per_token": 2, "d_ff": 8, "clamp": 7.0}}, "models.shared_swiglu", {}),
        (
            {"model__experts": {"count": 4, "per_token": 5, "d_ff": 8}},
            "models.experts_per_token",
            {"per_token": 5, "count": 4},
        ),
        (
            {"model__experts": {"count": 4, "per_token": 2, "d_ff": 8, "dense_layers": 2}},
            "models.dense_layers",
            {"dense_layers": 2, "layers": 2},
        ),
        (
            {"batch__warmup": [{"until_step": 9, "sequences": 2}] * 2},
            "recipe.must_rise",
            {"key": "batch.warmup", "step": "until_step"},
        ),
        ({"batch__packing": "tetris"}, "'best-fit'", {"key": "batch.packing"}),
        ({"schedule__kind": "cosine"}, "recipe.only_with", {"key": "schedule.cosine_steps", "kind": "cosine"}),
        ({"schedule__cosine_steps": 9}, "recipe.only_with", {"key": "schedule.cosine_steps", "kind": "cosine"}),
        (
            {"schedule__kind": "cosine", "schedule__cosine_steps": 4},
            "recipe.cosine_too_short",
            {"cosine": 4},
        ),
        ({"schedule__kind": "multi-step"}, "recipe.only_with", {"key": "schedule.milestones", "kind": "multi-step"}),
        ({"stability__divergence": 0.5}, "greater than 1", {"key": "stability.divergence"}),
        ({"stability__read_every": 0}, "greater than or equal to 1", {"key": "stability.read_every"}),
        ({"stability__read_every": 101}, "less than or equal to 100", {"key": "stability.read_every"}),
        ({"cuda_graphs": "yes"}, "'auto', 'on' or 'off'", {"key": "cuda_graphs"}),
        (
            {"cuda_graphs": "on", "model__experts": {"count": 4, "per_token": 2, "d_ff": 8}},
            "recipe.graphs",
            {"key": "model.experts"},
        ),
        ({"cuda_graphs": "on", "parallel__recompute": "block"}, "recipe.graphs", {"key": "parallel.recompute"}),
        ({"parallel__tensr": 2}, "tensor", {"key": "parallel.tensr"}),
    ],
)
def test_a_wrong_or_impossible_value_is_refused_and_its_key_named(
    change: dict[str, Any], problem: str, data: dict[str, Any]
) -> None:
    """``problem``: the code of a message, or a part of pydantic's text or of the nearest key."""
    with pytest.raises(RecipeError) as found:
        recipe_with(**change)
    error = found.value
    if problem.startswith(("recipe.", "models.")):
        said = error.data["problem"]
        assert error.code == "strict.wrong_value" and said.code == problem
    else:
        said = error
        assert error.code.startswith("strict.") and problem in str(error)
    assert {name: said.data[name] for name in data} == data
    assert "\n" not in str(error)


@pytest.mark.parametrize(("sequences", "micro", "ranks"), [(8, None, 3), (8, 3, 1), (8, 8, 2)])
def test_a_batch_that_cannot_be_shared_is_refused(sequences: int, micro: int | None, ranks: int) -> None:
    recipe = recipe_with(batch__sequences=sequences, batch__micro_sequences=micro)
    with pytest.raises(RecipeError) as found:
        recipe.batch.refuse_uneven_split(ranks)
    assert found.value.code in ("recipe.batch_ranks", "recipe.micro_sequences")


def test_a_tensor_split_into_too_narrow_experts_is_refused() -> None:
    recipe = recipe_with(model__experts={"count": 4, "per_token": 1, "d_ff": 24}, parallel__tensor=2)
    with refused("recipe.tensor_experts", RecipeError, d_ff=24, multiple=8):
        recipe.parallel.data_ranks(2, recipe.model)


@pytest.mark.parametrize(
    ("changes", "ranks", "code", "data"),
    [
        ({"parallel__tensor": 2}, 3, "recipe.tensor_ranks", {"tensor": 2, "ranks": 3}),
        (DESCRIBED["gpt-oss"] | {"parallel__tensor": 2}, 2, "recipe.tensor_expert_bias", {"tensor": 2}),
        ({"parallel__tensor": 4}, 4, "recipe.tensor_size", {"tensor": 4, "key": "kv_heads", "size": 2}),
        ({"parallel__replicas": 2}, 3, "recipe.replicas", {"replicas": 2, "ranks": 3}),
    ],
)
def test_a_layout_that_does_not_fit_the_ranks_is_refused(
    changes: dict[str, Any], ranks: int, code: str, data: dict[str, Any]
) -> None:
    recipe = recipe_with(**changes)
    with refused(code, RecipeError, **data):
        recipe.parallel.data_ranks(ranks, recipe.model)


def test_a_warm_up_batch_that_ranks_cannot_share_evenly_is_refused() -> None:
    recipe = recipe_with(batch__warmup=[{"until_step": 4, "sequences": 3}])
    with refused("recipe.batch_ranks", RecipeError, key="batch.warmup.0.sequences", sequences=3, ranks=2):
        recipe.batch.refuse_uneven_split(2)


def test_widths_that_matrix_units_pad_are_reported_with_their_cost() -> None:
    assert recipe_with().model.list_warnings() == []
    odd = recipe_with(model__vocab_size=520, model__d_ff=65).model.list_warnings()
    assert codes(odd) == ["models.padded_size"] * 2
    assert [(one.data["key"], one.data["size"], one.data["multiple"], one.data["padded"]) for one in odd] == [
        ("model.vocab_size", 520, 64, 576),
        ("model.d_ff", 65, 16, 80),
    ]
    assert "9.7%" in odd[0] and "18.8%" in odd[1]


def test_the_token_count_of_steps_includes_the_batch_warm_up() -> None:
    recipe = recipe_with(
        batch__warmup=[{"until_step": 4, "sequences": 2}, {"until_step": 6, "sequences": 4}], batch__sequences=8
    )
    rows = [recipe.batch.count_sequences_at(step) for step in range(8)]
    assert rows == [2, 2, 2, 2, 4, 4, 8, 8]
    for first, last in ((0, 8), (3, 5), (5, 6), (7, 30), (4, 4)):
        expected = sum(recipe.batch.count_sequences_at(step) for step in range(first, last)) * recipe.model.context
        assert recipe.count_tokens_between(first, last) == expected


def test_the_error_for_a_file_that_is_not_a_recipe_names_the_file(tmp_path: Path) -> None:
    for name, content in (
        ("torn.yaml", b"a: [1,"),
        ("binary.yaml", b"\xff\xfe\x00"),
        ("list.yaml", b"- 1"),
        ("twice.yaml", b"a: 1\na: 2"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(RecipeError, match=name):
            Recipe.load(tmp_path / name)
    with refused("recipe.unreadable", RecipeError, file=str(tmp_path / "nothere.yaml")):
        Recipe.load(tmp_path / "nothere.yaml")


def test_yaml_numbers_in_scientific_notation_are_numbers(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(TINY.read_text().replace("lr: 3e-3", "lr: 25e-4"))
    assert Recipe.load(path).optimizer.lr == 0.0025


@pytest.mark.parametrize(
    ("path", "usual", "other"),
    [("accept_changes", [], ["heads"]), ("cuda_graphs", "auto", "off"), ("stability.read_every", 1, 4)],
)
def test_a_newer_key_is_written_only_if_it_differs_from_its_default(path: str, usual: object, other: object) -> None:
    """Older code can read a recipe without the key, and the recipe keeps its hash."""
    key, plain = path.replace(".", "__"), Recipe.load(TINY)
    assert path in LATER
    said, unsaid = recipe_with(**{key: other}), recipe_with(**{key: usual})
    within = lambda recipe: reduce(dict.get, path.split(".")[:-1], recipe.model_dump())  # type: ignore[arg-type]
    assert path.rpartition(".")[2] in within(said) and path.rpartition(".")[2] not in within(unsaid)
    assert unsaid == plain and unsaid.sha256 == plain.sha256 != said.sha256
    assert Recipe.parse(said.model_dump()) == said


@pytest.mark.parametrize(
    ("name", "class_name"),
    [("exaone4", "Exaone4ForCausalLM"), ("nanochat", "NanoChatForCausalLM"), ("gpt-oss", "GptOssForCausalLM")],
)
def test_a_recipe_can_have_each_fact_that_some_family_holds(name: str, class_name: str) -> None:
    """NoPE with QK-norm, an MLP without a gate, norms without weights, sinks, experts with biases."""
    assert find_family_for_export(recipe_with(**DESCRIBED[name]).model).class_name == class_name


@pytest.mark.parametrize(
    ("change", "code", "data"),
    [
        ({"model__context": 64, "model__max_positions": 32}, "recipe.context_beyond_model", {"context": 64, "allowed": 32}),
        ({"freeze": ["blocks.1-2"]}, "recipe.missing_layer", {}),
    ],
)  # fmt: skip
def test_a_file_of_a_recipe_cannot_ask_for_more_than_the_model_has(
    tmp_path: Path, change: dict[str, Any], code: str, data: dict[str, Any]
) -> None:
    """A recipe in a checkpoint can, because earlier factories trained with such recipes."""
    stored = recipe_with(**change)
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(stored.model_dump(mode="json")))
    with refused(code, RecipeError, file=str(file), **data):
        Recipe.load(file)
    longest = recipe_with(model__context=64, model__max_positions=64, freeze=["blocks.0-1"])
    file.write_text(yaml.safe_dump(longest.model_dump(mode="json")))
    assert Recipe.load(file) == longest
