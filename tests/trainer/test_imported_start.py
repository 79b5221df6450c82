"""A first segment that starts from a checkpoint with weights only."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels.contract.registry import load_choice
from models.tensors import list_tensor_shapes
from tests.support.messages import refused
from tests.support.trainer.segment_runs import assert_same_run
from tests.support.trainer.segments import TINY, MakeShard, plan_of, recipe_with, train_here, write_spec
from trainer.contract.checkpoint import format as checkpoints
from trainer.contract.recipe import Recipe
from trainer.model.transformer import Decoder


def write_initial_weights(folder: Path, recipe: Recipe) -> Path:
    """An imported checkpoint with the weights with which a run of the recipe begins."""
    from kernels.contract.registry import bind_ops

    kernels = Path(__file__).parents[2] / "policies" / "kernels.yaml"
    model = Decoder(recipe.model, bind_ops(load_choice(kernels, "cpu"), torch.device("cpu"), torch.float32, False))
    model.initialise(recipe.seed)
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    shapes = list_tensor_shapes(recipe.model)
    state = {"recipe": recipe.model_dump()}
    return checkpoints.write_imported_checkpoint(folder, shapes, ((name, named[name]) for name in shapes), state)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_segment_from_imported_weights_is_to_the_bit_one_that_began_with_these_weights(
    optimizer: str, tmp_path: Path, make_shard: MakeShard
) -> None:
    """Moments, sampler, random state, counters and hooks therefore are those of a first step."""
    recipe, plan = recipe_with(optimizer__name=optimizer), plan_of(make_shard())
    start = write_initial_weights(tmp_path / "imported", recipe)
    fresh = write_spec(tmp_path / "fresh", plan, recipe, last_step=6)
    ours = write_spec(tmp_path / "ours", plan, recipe, last_step=6, initial_checkpoint=str(start))
    for folder in (fresh, ours):
        assert train_here(folder) == (0, "")
    assert_same_run(ours, fresh)


def test_weights_of_another_function_do_not_start_a_segment(tmp_path: Path, make_shard: MakeShard) -> None:
    recipe = Recipe.load(TINY)
    start = write_initial_weights(tmp_path / "imported", recipe)
    other = recipe_with(model__rope_theta=2 * recipe.model.rope_theta)
    folder = write_spec(tmp_path / "s", plan_of(make_shard()), other, initial_checkpoint=str(start))
    code, said = train_here(folder)
    assert code == 2 and "trainer.other_function" in said


def test_a_checkpoint_of_other_tensors_than_announced_leaves_nothing(tmp_path: Path) -> None:
    weights = torch.ones(2, 3)
    for found in ([("b", weights)], [("a", weights.T)], [], [("a", weights), ("c", weights)]):
        with pytest.raises((AssertionError, RuntimeError, ValueError)):
            checkpoints.write_imported_checkpoint(tmp_path, {"a": (2, 3)}, iter(found), {})
        assert not list(tmp_path.iterdir())


def test_an_imported_checkpoint_verifies_and_holds_fp32_weights_alone(tmp_path: Path) -> None:
    weights = torch.randn(4, 3).to(torch.bfloat16)
    path = checkpoints.write_imported_checkpoint(tmp_path, {"a": (4, 3)}, [("a", weights)], {"recipe": {}})
    loaded = checkpoints.load_checkpoint(path)
    assert loaded.step == 0 and not loaded.optimizer and loaded.state["kind"] == checkpoints.IMPORT
    assert loaded.model["a"].dtype == torch.float32 and torch.equal(loaded.model["a"], weights.float())
    (path / "model.safetensors").write_bytes(b"0" * (path / "model.safetensors").stat().st_size)
    with refused("trainer.hash_mismatch"):
        checkpoints.load_checkpoint(path)
