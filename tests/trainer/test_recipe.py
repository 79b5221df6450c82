from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.conftest import ROOT, TINY, recipe_with
from trainer.errors import RecipeError
from trainer.recipe import Recipe


@pytest.mark.parametrize("path", sorted((ROOT / "policies" / "recipes").glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_recipes_load_and_survive_a_round_trip(path: Path) -> None:
    recipe = Recipe.load(path)
    assert recipe.name == path.stem
    assert Recipe.parse(recipe.model_dump()) == recipe


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model__heads": 3}, r"model\.heads \(3\) is no multiple of model\.kv_heads \(2\)"),
        ({"model__head_dim": 15}, r"'model\.head_dim'.*multiple of 2"),
        ({"model__d_model": 0}, r"'model\.d_model'.*greater than 0"),
        ({"model__layers": "two"}, r"'model\.layers'.*valid integer \(got 'two'\)"),
        ({"model__contxt": 5}, r"unknown key 'model\.contxt'; did you mean 'context'"),
        ({"bach": {}}, r"unknown key 'bach'; did you mean 'batch'"),
        ({"schedule__trunk_steps": {"first": 5}}, r"'schedule\.trunk_steps\.later' is missing"),
        ({"schedule__warmup_steps": 21}, r"schedule\.warmup_steps \(21\) is more than trunk_steps\.first \(20\)"),
        ({"mixture__weights": {"code": 0.0}}, r"mixture\.weights: no domain has a weight above zero"),
        ({"mixture__phases": [{"from_step": 1, "weight": {}}]}, r"phases\.0\.weight'; did you mean 'weights'"),
        ({"precision": "fp8"}, r"'precision'.*'fp32' or 'bf16'"),
        ({"optimizer__lr": -1.0}, r"'optimizer\.lr'.*greater than 0"),
        ({"model__qk_norm": False, "model__heads": 6}, r"model\.heads \(6\) does not divide model\.d_model \(32\)"),
        ({"model__experts": {"count": 4, "per_token": 1, "d_ff": 12}}, r"'model\.experts\.d_ff'.*multiple of 8"),
        ({"model__experts": {"count": 4, "per_token": 1, "d_ff": 8}, "model__d_model": 36}, r"d_model \(36\).* of 8"),
    ],
)
def test_what_is_wrong_or_impossible_is_refused_by_key(change: dict[str, Any], message: str) -> None:
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
    with pytest.raises(RecipeError, match=r"a rank's share of model\.experts\.d_ff \(24\) is no multiple of 8"):
        recipe.parallel.data_ranks(2, recipe.model)


def test_files_that_are_no_recipe_are_named(tmp_path: Path) -> None:
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
