"""Training continues from a checkpoint only with the function of its weights, unless the recipe names the change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from models.spec import ACCEPTABLE, ExpertsSpec, ModelSpec
from models.tensors import list_tensor_shapes
from tests.support.trainer.segment_runs import result
from tests.support.trainer.segments import MakeShard, plan_of, recipe_with, train_here, write_spec
from trainer.contract.checkpoint import format as checkpoints
from trainer.contract.checkpoint.model_function_changes import (
    OF_EXPORT,
    OF_TRAINING,
    find_export_changes,
    find_model_function_changes,
    find_unaccepted_changes,
)
from trainer.contract.data.data_plan import DataPlan
from trainer.contract.errors import RecipeError
from trainer.contract.recipe import Recipe

# Without QK-norm, whose weights are as long as a head.
PLAIN = {"model__qk_norm": False, "model__kv_heads": 4}
EXPERTS = {"count": 4, "per_token": 2, "d_ff": 16}
SAME_SHAPES = [
    (PLAIN, {"model__rope_theta": 5e5}, "rope_theta is 500000.0", "but 10000.0 in"),
    (PLAIN, {"model__heads": 8, "model__kv_heads": 8, "model__head_dim": 8}, "heads is 8", "but 4 in"),
    (PLAIN, {"model__norm_eps": 0.1}, "norm_eps is 0.1", "but 1e-06 in"),
    (PLAIN, {"model__across_documents": True}, "across_documents is True", "but False in"),
    (PLAIN, {"model__nope_every": 2}, "nope_every is 2", "but None in"),
    ({}, {"model__base_d_model": 16}, "base_d_model is 16", "but None in"),
    ({"model__experts": EXPERTS}, {"model__experts": EXPERTS | {"per_token": 3}}, "experts.per_token is 3", "but 2 in"),
]  # fmt: skip


def test_the_check_compares_every_key_of_a_model() -> None:
    """A key that is later added to the schema is compared too, whatever it means."""
    keys = {*ModelSpec.model_fields, *(f"experts.{key}" for key in ExpertsSpec.model_fields)} - {"experts"}
    assert {*OF_TRAINING, *OF_EXPORT, *ACCEPTABLE} < keys
    before = recipe_with(model__experts=EXPERTS).model.model_dump()
    for key in sorted(keys - {*OF_TRAINING, *OF_EXPORT}):
        other: dict[str, Any] = json.loads(json.dumps(before))
        *outer, last = key.split(".")
        (other[outer[0]] if outer else other)[last] = "other"
        assert list(find_model_function_changes(other, recipe_with(model__experts=EXPERTS).model)) == [key]


# For each key, a model with another value of it. A second key is named where the value needs it.
OTHER: dict[str, dict[str, Any]] = {
    "vocab_size": {"vocab_size": 128}, "d_model": {"d_model": 64}, "layers": {"layers": 4}, "d_ff": {"d_ff": 96}, "tied": {"tied": False},
    "qk_norm": {"qk_norm": "whole"}, "attention_sinks": {"attention_sinks": True}, "qkv_bias": {"qkv_bias": True},
    "attention_out_bias": {"attention_out_bias": True}, "gated": {"gated": False}, "mlp_bias": {"mlp_bias": True}, "norms": {"norms": "post"},
    "latent": {"latent": {"q_rank": 8, "kv_rank": 8, "nope_head_dim": 4, "rope_head_dim": 4, "v_head_dim": 4}, "qk_norm": False, "kv_heads": 4},
    "experts.count": {"experts": {"count": 8}}, "experts.d_ff": {"experts": {"d_ff": 24}}, "experts.shared": {"experts": {"shared": 2}},
    "experts.dense_layers": {"experts": {"dense_layers": 0}}, "experts.balance": {"experts": {"balance": "loss"}},
    "rope_theta": {"rope_theta": 5e5}, "norm_eps": {"norm_eps": 0.1}, "nope_every": {"nope_every": 2}, "across_documents": {"across_documents": True},
    "base_d_model": {"base_d_model": 16}, "rope_share": {"rope_share": 0.5}, "rope_scaling": {"rope_scaling": {"kind": "linear", "factor": 2.0}},
    "window_rope_theta": {"window_rope_theta": 5.0, "windows": [4]}, "windows": {"windows": [4, None]}, "position": {"position": "alibi"},
    "attention_scale": {"attention_scale": 0.1}, "attention_softcap": {"attention_softcap": 50.0}, "logit_softcap": {"logit_softcap": 30.0},
    "activation": {"activation": "gelu"}, "norm_plus_one": {"norm_plus_one": True}, "embedding_scale": {"embedding_scale": 8.0},
    "experts.per_token": {"experts": {"per_token": 3}}, "experts.scores": {"experts": {"scores": "softmax"}},
    "experts.normalise": {"experts": {"normalise": False}}, "experts.scale": {"experts": {"scale": 2.5}},
    "experts.groups": {"experts": {"groups": 2, "groups_per_token": 1}},
    "experts.groups_per_token": {"experts": {"groups": 2, "groups_per_token": 2}},
    "norm_weights": {"norm_weights": False}, "embedding_norm": {"embedding_norm": True}, "experts.bias": {"experts": {"bias": True}},
    "experts.clamp": {"experts": {"clamp": 7.0}}, "experts.clamp_alpha": {"experts": {"clamp_alpha": 1.0}},
    "multi_token_layers": {"multi_token_layers": 1},
}  # fmt: skip
HEADS = ("heads", "kv_heads", "head_dim")  # one alone changes shapes, all three together need not


def test_each_key_of_a_model_is_of_training_or_export_or_changes_a_shape_or_can_be_accepted() -> None:
    """A key that is later added to the schema has to be put into one of the four."""
    keys = {*ModelSpec.model_fields, *(f"experts.{key}" for key in ExpertsSpec.model_fields)} - {"experts"}
    assert {*OTHER, *HEADS, *OF_TRAINING, *OF_EXPORT} == keys
    assert not set(ACCEPTABLE) & set(OF_TRAINING) and set(OF_EXPORT) < set(ACCEPTABLE)
    for key, change in OTHER.items():
        experts = EXPERTS | {"shared": 0}
        plain = {
            "vocab_size": 64, "d_model": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "d_ff": 64, "context": 32,
        } | ({"experts": experts} if key.startswith("experts") else {})  # fmt: skip
        other = plain | change | ({"experts": experts | change["experts"]} if "experts" in change else {})
        before, after = ModelSpec.model_validate(plain), ModelSpec.model_validate(other)
        assert key in find_model_function_changes(before.model_dump(), after)
        assert (list_tensor_shapes(before) == list_tensor_shapes(after)) == (key in ACCEPTABLE), key
        if key not in ACCEPTABLE:
            assert key in find_unaccepted_changes(before.model_dump(), after, ACCEPTABLE), "no list can accept it"


@pytest.mark.parametrize(
    ("before", "after", "changes"),
    [
        ({}, {"context": 64}, {}),
        ({}, {"context": 16, "max_positions": 32}, {}),
        ({"max_positions": 64}, {"context": 64}, {}),
        ({"max_positions": 64}, {"context": 16}, {"max_positions": (64, 16)}),
        ({}, {"max_positions": 64}, {"max_positions": (32, 64)}),
        ({}, {"family": "qwen3"}, {}),
        ({"family": "qwen3"}, {}, {}),
        ({"qk_norm": False}, {"qk_norm": False, "family": "mistral"}, {"family": ("llama", "mistral")}),
    ],
)
def test_what_an_export_says_is_compared_as_it_would_be_written(
    before: dict[str, Any], after: dict[str, Any], changes: dict[str, Any]
) -> None:
    old, new = (recipe_with(**{f"model__{key}": value for key, value in one.items()}).model for one in (before, after))
    assert find_export_changes(old.model_dump(), new) == changes
    assert find_model_function_changes(old.model_dump(), new) == {}, "the weights compute the same"


def test_a_key_that_an_older_checkpoint_lacks_has_its_default() -> None:
    before = recipe_with().model.model_dump()
    for key in ("nope_every", "across_documents", "experts", "base_d_model", "rope_theta"):
        del before[key]
    assert find_model_function_changes(before, recipe_with().model) == {}
    assert find_model_function_changes(before, recipe_with(model__rope_theta=5e5).model) == {
        "rope_theta": (10_000.0, 500_000.0)
    }
    assert find_model_function_changes(before, recipe_with(model__context=64).model) == {}, (
        "the data order has its own word on that"
    )


@pytest.fixture
def plan(make_shard: MakeShard) -> DataPlan:
    return plan_of(make_shard(counts={"code": 200, "docs": 60, "chat": 60}))


def trained(folder: Path, plan: DataPlan, **changes: Any) -> str:
    trunk = write_spec(folder / "trunk", plan, recipe_with(**changes), last_step=2)
    assert train_here(trunk) == (0, "")
    return str(result(trunk)["checkpoint"])


@pytest.mark.parametrize(
    ("first", "change", "new", "old"), SAME_SHAPES, ids=[new.split()[0] for _, _, new, _ in SAME_SHAPES]
)
def test_a_change_of_function_with_equal_shapes_is_refused_unless_the_recipe_names_it(
    tmp_path: Path, plan: DataPlan, first: dict[str, Any], change: dict[str, Any], new: str, old: str
) -> None:
    start = {"first_step": 2, "last_step": 4, "initial_checkpoint": trained(tmp_path, plan, **first)}
    silent = write_spec(tmp_path / "silent", plan, recipe_with(**(first | change)), **start)
    code, errors = train_here(silent)
    assert code == 2 and f"{new} in the recipe, {old} " in errors and len(errors.splitlines()) == 1
    names = [key.removeprefix("model__") for key in change] if "model__experts" not in change else ["experts.per_token"]
    for name in names:
        assert name in errors.partition("accept_changes: ")[2]
    accepting = recipe_with(**(first | change), accept_changes=names)
    named = write_spec(tmp_path / "named", plan, accepting, **start)
    assert train_here(named)[0] == 0
    last = checkpoints.read_checkpoint_state(Path(result(named)["checkpoint"]))
    assert last["recipe"]["accept_changes"] == names, "and stands in what was made of it"
    on = {"first_step": 4, "last_step": 5, "initial_checkpoint": result(named)["checkpoint"]}
    assert train_here(write_spec(tmp_path / "on", plan, recipe_with(**(first | change)), **on))[0] == 0


def test_a_change_of_shapes_is_refused_by_key_and_cannot_be_accepted(tmp_path: Path, plan: DataPlan) -> None:
    start = {"first_step": 2, "last_step": 4, "initial_checkpoint": trained(tmp_path, plan)}
    wide = write_spec(tmp_path / "wide", plan, recipe_with(model__d_ff=96), **start)
    code, errors = train_here(wide)
    assert (
        code == 2
        and "error[trainer.other_function]" in errors
        and "d_ff is 96" in errors
        and "accept_changes" not in errors
    )
    with pytest.raises(RecipeError, match="accept_changes"):
        recipe_with(accept_changes=["d_ff"])


def test_keys_of_training_may_change_without_accept_changes(tmp_path: Path, plan: DataPlan) -> None:
    first = {"model__experts": EXPERTS}
    start = {"first_step": 2, "last_step": 4, "initial_checkpoint": trained(tmp_path, plan, **first)}
    other = {
        "model__experts": EXPERTS | {"bias_rate": 0.01, "z_loss": 0.0},
        "optimizer__lr": 1e-3,
        "stability__z_loss": 0.0,
    }
    assert train_here(write_spec(tmp_path / "on", plan, recipe_with(**other), **start)) == (0, "")


def test_a_checkpoint_without_a_recipe_is_compared_by_its_shapes(tmp_path: Path, plan: DataPlan) -> None:
    """Such a checkpoint was made by hand. Planning compares the recipe in the ledger instead."""
    made = checkpoints.load_checkpoint(Path(trained(tmp_path, plan, **PLAIN)))
    bare = checkpoints.Checkpoint(made.model, made.optimizer, {k: v for k, v in made.state.items() if k != "recipe"})
    start = {
        "first_step": 2,
        "last_step": 4,
        "initial_checkpoint": str(checkpoints.save_checkpoint(tmp_path / "bare", bare)),
    }
    assert train_here(write_spec(tmp_path / "on", plan, recipe_with(**PLAIN, model__rope_theta=5e5), **start)) == (
        0,
        "",
    )
    code, errors = train_here(write_spec(tmp_path / "wide", plan, recipe_with(**PLAIN, model__d_ff=96), **start))
    assert code == 2 and "error[trainer.other_shape]" in errors and "96" in errors.partition(" has shape ")[2]
    taken, *_ = made.model
    for changed, words in (
        (made.model | {"zz.other": made.model[taken]}, "checkpoint has the tensor zz.other"),
        ({name: tensor for name, tensor in made.model.items() if name != taken}, f"recipe has the tensor {taken}"),
    ):
        path = checkpoints.save_checkpoint(
            tmp_path / words, checkpoints.Checkpoint(changed, bare.optimizer, bare.state)
        )
        other = start | {"initial_checkpoint": str(path)}
        code, errors = train_here(write_spec(tmp_path / words, plan, recipe_with(**PLAIN), **other))
        assert code == 2 and "error[trainer.other_model]" in errors and f"only the {words}" in errors


def test_a_recipe_without_accept_changes_is_written_without_the_key(tmp_path: Path) -> None:
    """Code older than ``accept_changes`` can read the recipe, and the recipe's hash does not change."""
    plain = recipe_with()
    assert "accept_changes" not in plain.model_dump() and "accept_changes" not in json.loads(plain.model_dump_json())
    named = recipe_with(accept_changes=["rope_theta"])
    assert Recipe.parse(json.loads(named.model_dump_json())) == named and named.sha256 != plain.sha256
    assert plain.sha256 == "52eed205cff44692ffdb80415bc9c1e3c170efa1dd99759ce9e91b621214808a"
