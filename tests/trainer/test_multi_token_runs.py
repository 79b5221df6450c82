"""Segments of models with layers for multi-token prediction: what is trained, what stays to the bit, what is measured, and what is exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from models.tensors import is_multi_token
from tests.support.messages import codes, tree
from tests.support.trainer.families import DESCRIBED
from tests.support.trainer.segments import MakeShard, plan_of, recipe_with, train_here, write_spec
from tests.support.trainer.small_models import run_of
from trainer.batch import make_batch
from trainer.contract.checkpoint.export import export_checkpoint
from trainer.contract.checkpoint.format import load_checkpoint
from trainer.contract.data.data_plan import DataPlan
from trainer.contract.errors import RecipeError
from trainer.contract.json_lines import read_json_lines
from trainer.contract.recipe import Recipe
from trainer.run import make_multi_token_fields

TRAINED = DESCRIBED["multi-token"]
CARRIED = TRAINED | {"multi_token_weight": 0.0}
WITHOUT = {key: value for key, value in CARRIED.items() if key != "model__multi_token_layers"}


@pytest.fixture
def plan(make_shard: MakeShard) -> DataPlan:
    return plan_of(make_shard())


def train(folder: Path, plan: DataPlan, recipe: Recipe, first: int, last: int, start: Path | None) -> Path:
    """Train a segment; returns its last checkpoint."""
    write_spec(folder, plan, recipe, first_step=first, last_step=last, initial_checkpoint=start and str(start))
    code, errors = train_here(folder)
    assert code == 0, errors
    return Path(json.loads((folder / "result.json").read_text())["checkpoint"])


def measure(folder: Path, key: str) -> list[float]:
    return [line[key] for line in read_json_lines(folder / "metrics.jsonl")]


def select(tensors: dict[str, Tensor], multi_token: bool) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if is_multi_token(name) == multi_token}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_layers_without_a_weight_are_carried_along_and_change_nothing(tmp_path: Path, plan: DataPlan) -> None:
    start = load_checkpoint(train(tmp_path / "first", plan, recipe_with(**CARRIED), 0, 1, None))
    carried = load_checkpoint(train(tmp_path / "carried", plan, recipe_with(**CARRIED), 0, 8, None))
    without = load_checkpoint(train(tmp_path / "without", plan, recipe_with(**WITHOUT), 0, 8, None))
    assert_same(select(carried.model, True), select(start.model, True))
    assert_same(select(carried.model, False), without.model)
    assert_same(carried.optimizer, without.optimizer)
    before, after = (read_json_lines(tmp_path / name / "metrics.jsonl") for name in ("without", "carried"))
    times = ("time", "tokens_per_s", "flops_per_s", "data_wait_s", "first_step_s", "memory")
    for one, other in zip(before, after, strict=True):
        assert {k: v for k, v in one.items() if k not in times} == {k: v for k, v in other.items() if k not in times}


def test_the_reported_loss_is_the_main_one_and_the_layers_loss_falls(tmp_path: Path, make_shard: MakeShard) -> None:
    run = run_of(tmp_path, make_shard, **TRAINED)
    batch = make_batch(run.order)
    part = batch.split_into_micro_batches(None)[0]
    domains = part.pop("domains_BT")
    experts = run.recipe.model.experts
    assert experts is not None and domains.shape == part["tokens_BT"].shape
    share = experts.z_loss / (len(batch.rows) * run.recipe.model.context)
    with torch.no_grad():
        plain, nll_BT, _ = run.model.loss(**part, z_loss=run.recipe.stability.z_loss)
        routed, _, _ = run.model.loss(
            **part, z_loss=run.recipe.stability.z_loss, router_z_share=share, objective=run.objective
        )
        added = float(run.sums.multi_token[0])
        run.sums.all.zero_()
    record = run.train_step(batch)
    mean = float((nll_BT * part["weights_BT"]).sum())
    assert record["loss"] == pytest.approx(mean, rel=1e-5)
    # what is left of the total: the head's and the routers' z-loss
    assert record["z_loss"] == pytest.approx(float(routed) - added - mean, rel=1e-2, abs=1e-5)
    assert record["z_loss"] < added and float(plain) > mean
    losses = [record["multi_token_loss"]]
    while len(losses) < 60:
        losses.append(run.train_step(make_batch(run.order))["multi_token_loss"])
    assert sum(losses[-8:]) / 8 < losses[0] - 0.3
    layers = {name for name in record if name.startswith(("multi_token_loss/", "router_balance/multi_token"))}
    assert layers == {f"multi_token_loss/{k}" for k in (1, 2)} | {f"router_balance/multi_token.{n}" for n in (0, 1)}


def test_a_layer_without_targets_has_no_loss() -> None:
    assert make_multi_token_fields([0.0, 0.0, 0.0]) == {} and make_multi_token_fields([]) == {}
    assert make_multi_token_fields([0.1, 4.0, 0.0, 2.0, 0.0]) == {"multi_token_loss": 2.0, "multi_token_loss/1": 2.0}


def test_training_of_the_layers_can_begin_and_end_between_segments(tmp_path: Path, plan: DataPlan) -> None:
    base = train(tmp_path / "base", plan, recipe_with(**CARRIED), 0, 6, None)
    begun = train(tmp_path / "begun", plan, recipe_with(**TRAINED), 6, 12, base)
    ended = train(tmp_path / "ended", plan, recipe_with(**CARRIED), 12, 16, begun)
    held = [select(load_checkpoint(path).model, True) for path in (base, begun, ended)]
    assert_same(held[1], held[2])
    changed = {name for name in held[0] if not torch.equal(held[0][name], held[1][name])}
    assert changed == set(held[0]), "all of them, the routers' biases too"
    assert measure(tmp_path / "begun", "multi_token_loss")
    moments = {name.partition(".")[2] for name in load_checkpoint(begun).optimizer if name.startswith("exp_avg.")}
    assert moments >= {name for name in held[0] if not name.endswith("router_bias")}


@pytest.mark.parametrize("weight", [0.0, 0.3])
def test_an_export_has_every_tensor_and_copies_of_the_ends(tmp_path: Path, plan: DataPlan, weight: float) -> None:
    made = train(tmp_path / "run", plan, recipe_with(**TRAINED | {"multi_token_weight": weight}), 0, 2, None)
    export_checkpoint(made, tmp_path / "export")
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    stored, held = load_file(tmp_path / "export" / "model.safetensors"), load_checkpoint(made).model
    assert config["num_nextn_predict_layers"] == 2 and config["num_hidden_layers"] == 2
    for depth in range(2):
        theirs, ours = f"model.layers.{2 + depth}", f"multi_token.{depth}"
        assert torch.equal(stored[f"{theirs}.embed_tokens.weight"], held["embedding"])
        assert torch.equal(stored[f"{theirs}.shared_head.head.weight"], held["embedding"])
        assert torch.equal(stored[f"{theirs}.eh_proj.weight"], held[f"{ours}.join"])
        assert torch.equal(stored[f"{theirs}.mlp.experts.3.up_proj.weight"], held[f"{ours}.experts_up"][3])
        # muP's factor, as of the model's own norm before the head
        assert torch.equal(stored[f"{theirs}.shared_head.norm.weight"], held[f"{ours}.output_norm"] / 2)
    assert torch.equal(stored["model.norm.weight"], held["final_norm"] / 2)


IMPOSSIBLE: dict[str, dict[str, Any]] = {
    "no layers": {"multi_token_weight": 0.3},
    "adapters": TRAINED | {"adapt": {"rank": 2}},
}


@pytest.mark.parametrize("changes", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_a_weight_without_layers_that_are_trained_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(RecipeError) as error:
        recipe_with(**changes)
    assert "recipe.multi_token_weight" in codes(tree(error.value.message))


def test_a_family_without_such_layers_is_refused() -> None:
    with pytest.raises(RecipeError) as error:
        recipe_with(model__multi_token_layers=1)
    assert "models.no_family" in codes(tree(error.value.message))


def test_a_recipe_without_the_keys_is_written_as_before() -> None:
    written = recipe_with().model_dump()
    assert "multi_token_weight" not in written and "multi_token_layers" not in written["model"]
    assert recipe_with(**TRAINED).model_dump()["multi_token_weight"] == 0.3
