from __future__ import annotations

from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT
from tests.support.trainer.segments import TINY, recipe_with
from trainer.contract.errors import RecipeError
from trainer.contract.recipe import LATER, Recipe


@pytest.mark.parametrize("path", sorted((ROOT / "policies" / "recipes").glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_recipes_load_and_survive_a_round_trip(path: Path) -> None:
    recipe = Recipe.load(path)
    assert recipe.name == path.stem
    assert Recipe.parse(recipe.model_dump()) == recipe


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model__heads": 3}, r"model\.heads \(3\) is not a multiple of model\.kv_heads \(2\)"),
        ({"model__head_dim": 15}, r"'model\.head_dim'.*multiple of 2"),
        ({"model__d_model": 0}, r"'model\.d_model'.*greater than 0"),
        ({"model__layers": "two"}, r"'model\.layers'.*valid integer \(got 'two'\)"),
        ({"model__contxt": 5}, r"unknown key 'model\.contxt'; did you mean 'context'"),
        ({"bach": {}}, r"unknown key 'bach'; did you mean 'batch'"),
        ({"schedule__trunk_steps": {"first": 5}}, r"'schedule\.trunk_steps\.later' is missing"),
        ({"schedule__warmup_steps": 21}, r"schedule\.warmup_steps \(21\) is more than trunk_steps\.first \(20\)"),
        ({"mixture__weights": {"code": 0.0}}, r"mixture\.weights: no domain has a weight above zero"),
        ({"mixture__phases": [{"from_step": 1, "weight": {}}]}, r"phases\.0\.weight'; did you mean 'weights'"),
        ({"precision": "fp16"}, r"'precision'.*'fp32', 'bf16' or 'fp8'"),
        (
            {"precision": "fp8", "model__context": 40},
            r"precision: fp8 needs .* of 16.*model\.context \(40\).*write bf16",
        ),
        ({"precision": "fp8", "model__d_ff": 72}, r"precision: fp8 .*model\.d_ff \(72\)"),
        ({"precision": "fp8", "model__head_dim": 12}, r"precision: fp8 .*model\.kv_heads · head_dim \(24\)"),
        ({"precision": "fp8", "parallel__tensor": 4}, r"kv_heads · head_dim \(32\) split over parallel\.tensor \(4\)"),
        (
            {
                "precision": "fp8",
                "model__experts": {"count": 4, "per_token": 1, "d_ff": 8, "shared": 1},
            },
            r"precision: fp8 .*experts\.shared · experts\.d_ff \(8\)",
        ),
        ({"optimizer__lr": -1.0}, r"'optimizer\.lr'.*greater than 0"),
        ({"model__qk_norm": False, "model__heads": 6}, r"model\.heads \(6\) does not divide model\.d_model \(32\)"),
        ({"model__experts": {"count": 4, "per_token": 1, "d_ff": 12}}, r"'model\.experts\.d_ff'.*multiple of 8"),
        ({"model__experts": {"count": 4, "per_token": 1, "d_ff": 8}, "model__d_model": 36}, r"d_model \(36\).* of 8"),
        ({"model__nope_every": 4}, r"model\.nope_every.*set model\.qk_norm: false"),
        ({"model__experts": {"count": 4, "per_token": 5, "d_ff": 8}}, r"experts\.per_token \(5\) is more than .*count"),
        (
            {"model__experts": {"count": 4, "per_token": 2, "d_ff": 8, "dense_layers": 2}},
            r"dense_layers \(2\): none of the 2 layers",
        ),
        ({"batch__warmup": [{"until_step": 9, "sequences": 2}] * 2}, r"batch\.warmup: until_step must rise"),
        ({"batch__packing": "tetris"}, r"'batch\.packing'.*'best-fit'"),
        ({"schedule__kind": "cosine"}, r"schedule\.cosine_steps is required with kind cosine"),
        ({"schedule__cosine_steps": 9}, r"schedule\.cosine_steps is required with kind cosine"),
        (
            {"schedule__kind": "cosine", "schedule__cosine_steps": 4},
            r"cosine_steps \(4\) is not more than warmup_steps",
        ),
        ({"schedule__kind": "multi-step"}, r"schedule\.milestones is required with kind multi-step"),
        ({"stability__divergence": 0.5}, r"'stability\.divergence'.*greater than 1"),
        ({"stability__read_every": 0}, r"'stability\.read_every'.*greater than or equal to 1"),
        ({"stability__read_every": 101}, r"'stability\.read_every'.*less than or equal to 100"),
        ({"cuda_graphs": "yes"}, r"'cuda_graphs'.*'auto', 'on' or 'off'"),
        (
            {"cuda_graphs": "on", "model__experts": {"count": 4, "per_token": 2, "d_ff": 8}},
            r"cuda_graphs: on is not possible with model\.experts; set cuda_graphs: auto or off",
        ),
        ({"cuda_graphs": "on", "parallel__recompute": "block"}, r"cuda_graphs: on .* parallel\.recompute"),
        ({"parallel__tensr": 2}, r"unknown key 'parallel\.tensr'; did you mean 'tensor'"),
    ],
)
def test_wrong_or_impossible_values_are_refused_by_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message) as refused:
        recipe_with(**change)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("sequences", "micro", "ranks"), [(8, None, 3), (8, 3, 1), (8, 8, 2)])
def test_a_batch_that_cannot_be_shared_is_refused(sequences: int, micro: int | None, ranks: int) -> None:
    recipe = recipe_with(batch__sequences=sequences, batch__micro_sequences=micro)
    with pytest.raises(RecipeError, match=r"batch\."):
        recipe.batch.check_ranks(ranks)


def test_tensor_ranks_that_split_an_expert_too_thin_are_refused() -> None:
    recipe = recipe_with(model__experts={"count": 4, "per_token": 1, "d_ff": 24}, parallel__tensor=2)
    with pytest.raises(RecipeError, match=r"a rank's share of model\.experts\.d_ff \(24\) is not a multiple of 8"):
        recipe.parallel.data_ranks(2, recipe.model)


@pytest.mark.parametrize(
    ("changes", "ranks", "message"),
    [
        ({"parallel__tensor": 2}, 3, r"parallel\.tensor \(2\) does not divide the 3 ranks"),
        ({"parallel__tensor": 4}, 4, r"parallel\.tensor \(4\) does not divide model\.kv_heads \(2\)"),
        ({"parallel__replicas": 2}, 3, r"parallel\.replicas \(2\) does not divide the 3 ranks"),
    ],
)
def test_a_layout_that_does_not_fit_the_ranks_is_refused(changes: dict[str, Any], ranks: int, message: str) -> None:
    recipe = recipe_with(**changes)
    with pytest.raises(RecipeError, match=message):
        recipe.parallel.data_ranks(ranks, recipe.model)


def test_a_batch_of_the_warm_up_must_divide_too() -> None:
    recipe = recipe_with(batch__warmup=[{"until_step": 4, "sequences": 3}])
    with pytest.raises(
        RecipeError, match=r"batch\.warmup\.0\.sequences \(3\) is not a multiple of the number of ranks \(2\)"
    ):
        recipe.batch.check_ranks(2)


def test_widths_that_matrix_units_pad_are_reported_with_their_cost() -> None:
    assert recipe_with().model.warnings() == []
    odd = recipe_with(model__vocab_size=520, model__d_ff=65).model.warnings()
    assert odd[0].startswith("model.vocab_size (520) is not a multiple of 64: matrix units compute 576, 9.7%")
    assert odd[1].startswith("model.d_ff (65) is not a multiple of 16: matrix units compute 80, 18.8%")


def test_tokens_of_steps_follow_the_batch_s_warm_up() -> None:
    recipe = recipe_with(
        batch__warmup=[{"until_step": 4, "sequences": 2}, {"until_step": 6, "sequences": 4}], batch__sequences=8
    )
    rows = [recipe.batch.sequences_at(step) for step in range(8)]
    assert rows == [2, 2, 2, 2, 4, 4, 8, 8]
    for first, last in ((0, 8), (3, 5), (5, 6), (7, 30), (4, 4)):
        expected = sum(recipe.batch.sequences_at(step) for step in range(first, last)) * recipe.model.context
        assert recipe.tokens_between(first, last) == expected


def test_files_that_are_not_recipes_are_named(tmp_path: Path) -> None:
    for name, content in (
        ("torn.yaml", b"a: [1,"),
        ("binary.yaml", b"\xff\xfe\x00"),
        ("list.yaml", b"- 1"),
        ("twice.yaml", b"a: 1\na: 2"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(RecipeError, match=name):
            Recipe.load(tmp_path / name)
    with pytest.raises(RecipeError, match="nothere"):
        Recipe.load(tmp_path / "nothere.yaml")


def test_yaml_numbers_in_scientific_notation_are_numbers(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(TINY.read_text().replace("lr: 3e-3", "lr: 25e-4"))
    assert Recipe.load(path).optimizer.lr == 0.0025


@pytest.mark.parametrize(
    ("path", "usual", "other"),
    [("accept_changes", [], ["heads"]), ("cuda_graphs", "auto", "off"), ("stability.read_every", 1, 4)],
)
def test_a_later_key_is_written_where_it_says_something(path: str, usual: object, other: object) -> None:
    """Code that does not know it reads a recipe without it, whose hash is what it was."""
    key, plain = path.replace(".", "__"), Recipe.load(TINY)
    assert path in LATER
    said, unsaid = recipe_with(**{key: other}), recipe_with(**{key: usual})
    within = lambda recipe: reduce(dict.get, path.split(".")[:-1], recipe.model_dump())  # type: ignore[arg-type]
    assert path.rpartition(".")[2] in within(said) and path.rpartition(".")[2] not in within(unsaid)
    assert unsaid == plain and unsaid.sha256 == plain.sha256 != said.sha256
    assert Recipe.parse(said.model_dump()) == said
