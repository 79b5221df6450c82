"""The key of an arm follows from its content alone, and impossible arms are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from factory.core.errors import InputError
from factory.runs.arm import Arm, check_arms
from tests.support.messages import refused
from tests.support.trainer.segments import recipe_with
from trainer.contract.checkpoint.format import Checkpoint, save_checkpoint


def base(**keys: Any) -> dict[str, Any]:
    plan = {"token_shards": [{"id": "a", "path": "here/a", "generation": 0}], "weights": {"*": 1.0}, "seed": 3}
    spec = {"kind": "trunk", "recipe": recipe_with().model_dump(), "data_plan": plan, "first_step": 0, "last_step": 8}
    return {**spec, "initial_checkpoint": None} | keys


ARM = Arm("one", base(), "c0ffee")


@pytest.mark.parametrize(
    "keys",
    [
        {"code": "beef"},
        {"recipe": {"optimizer.lr": 0.5}},
        {"plan": {"seed": 4}},
        {"until": 4},
        {"seed": 3},  # walks the data from its beginning
        {"precision": "bf16"},
        {"kernels": "cpu: {}"},
        {"ranks": 2},
        {"environment": "python"},
        {"repeat": 1},
    ],
)
def test_the_key_of_an_arm_depends_on_everything_that_determines_the_training(keys: dict[str, Any]) -> None:
    other = replace(ARM, name="other", **keys)
    assert other.key != ARM.key
    check_arms([ARM, other])


def test_the_key_of_an_arm_does_not_depend_on_names_and_paths(tmp_path: Path) -> None:
    moved = base()
    moved["data_plan"] |= {"token_shards": [{"id": "a", "path": "there/a", "generation": 0}]}
    assert replace(ARM, name="two", base=moved).key == ARM.key
    held = Checkpoint({"w": torch.ones(3)}, {"exp_avg.w": torch.zeros(3)}, {"step": 4})
    here, there = (save_checkpoint(tmp_path / name, held) for name in "ab")
    other = save_checkpoint(tmp_path / "c", replace(held, model={"w": torch.zeros(3)}))
    keys = [replace(ARM, start=path).key for path in (here, there, other)]
    assert keys[0] == keys[1] != keys[2] and keys[0] != ARM.key


def test_an_arm_resumes_from_a_start_within_the_segment_and_begins_at_one_at_its_first_step(tmp_path: Path) -> None:
    within, begins = tmp_path / "step-00000004", tmp_path / "step-00000002"
    arm = replace(ARM, base=base(first_step=2))
    found = replace(arm, start=within)
    assert (found.first_step, found.resumed_checkpoint, found.make_spec()["initial_checkpoint"]) == (4, within, None)
    found = replace(arm, start=begins)
    assert (found.first_step, found.resumed_checkpoint, found.make_spec()["initial_checkpoint"]) == (
        2,
        None,
        str(begins),
    )


@pytest.mark.parametrize(
    ("arms", "code", "data"),
    [
        (
            [replace(ARM, recipe={"optimizer.lrr": 1})],
            "runs.unknown_recipe_key",
            {"arm": "one", "key": "optimizer.lrr", "hint": "; did you mean 'lr'?"},
        ),
        (
            [replace(ARM, recipe={"optimiser.lr": 1})],
            "runs.unknown_recipe_key",
            {"key": "optimiser.lr", "hint": "; did you mean 'optimizer'?"},
        ),
        (
            [replace(ARM, plan={"sede": 1})],
            "runs.unknown_plan_key",
            {"arm": "one", "key": "sede", "hint": "; did you mean 'seed'?"},
        ),
        ([ARM, replace(ARM, name="two")], "runs.equal_arms", {"one": "one", "other": "two"}),
        (
            [ARM, replace(ARM, name="two", recipe={"precision": "fp32"})],
            "runs.equal_arms",
            {"one": "one", "other": "two"},
        ),
    ],
)
def test_arms_with_unknown_keys_and_equal_arms_are_refused(arms: list[Arm], code: str, data: dict[str, Any]) -> None:
    with refused(code, InputError, **data) as raised:
        check_arms(arms)
    assert "\n" not in str(raised.value)


def test_recipe_keys_that_the_user_names_freely_are_accepted() -> None:
    check_arms([replace(ARM, recipe={"mixture.weights": {"code": 1.0}, "schedule.trunk_steps.first": 9})])
    check_arms([replace(ARM, recipe={"mixture.weights.code": 1.0})])
