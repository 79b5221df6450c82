"""The file that ``factory tune`` writes, how a plan uses it, and messages about a file that does not fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import factory.cli  # noqa: F401 - its commands
from factory.computing import compute_settings, tuned_kernels
from factory.computing.tuned_kernels import find_tuning, get_tuning_path
from factory.core.errors import ConfigError
from factory.core.progress import SILENT
from factory.core.workspace import Workspace, find_checkout_root
from factory.training import tuning
from factory.training.planning import load_recipe
from kernels.contract.bench import BenchSetting
from kernels.contract.machine import describe_this_machine
from kernels.contract.registry import OPS
from kernels.contract.tune import (
    TimedImplementation,
    choose_fastest_implementation,
    list_in_timing_order,
    list_training_ops,
)
from tests.support.messages import codes, refused

MACHINE = describe_this_machine("cpu")
SHAPE = {
    "batch": 8,
    "context": 32,
    "d_model": 32,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "d_ff": 64,
    "vocab_size": 512,
}


def put(workspace: Workspace, **changes: Any) -> Path:
    path = get_tuning_path(workspace, MACHINE.name, "fp32")
    path.parent.mkdir(exist_ok=True)
    found = {
        "machine": MACHINE.to_json(),
        "setting": {"shape": SHAPE, "precision": "fp32", "compile": False},
        "choice": {"attention": "recompute", "adamw": "fused"},
        "timed": [],
        "recipe": "tiny",
        "at": 1.0,
    }
    path.write_text(json.dumps(found | changes))
    return path


def test_fp8_uses_the_tuning_of_bf16(workspace: Workspace) -> None:
    assert get_tuning_path(workspace, MACHINE.name, "fp8") == get_tuning_path(workspace, MACHINE.name, "bf16")
    assert get_tuning_path(workspace, MACHINE.name, "fp32") != get_tuning_path(workspace, MACHINE.name, "bf16")


@pytest.mark.parametrize(
    ("changes", "shape", "used", "code"),
    [
        ({}, SHAPE, True, ""),
        ({}, SHAPE | {"d_model": 64}, True, "computing.other_shape"),
        ({"machine": replace(MACHINE, torch="1.13.0").to_json()}, SHAPE, False, "computing.other_torch"),
    ],
)
def test_a_tuning_is_used_where_it_fits_and_a_misfit_is_reported_in_one_line(
    workspace: Workspace, changes: dict[str, Any], shape: dict[str, int], used: bool, code: str
) -> None:
    untuned = find_tuning(workspace, MACHINE, "fp32")
    assert untuned.choice is None and codes([untuned.note]) == ["computing.not_tuned"] and "\n" not in untuned.note
    path = put(workspace, **changes)
    found = find_tuning(workspace, MACHINE, "fp32", shape)
    assert found.choice == ({"attention": "recompute", "adamw": "fused"} if used else None)
    assert codes([found.note]) == [code] and bool(code) == bool(found.note)
    assert found.note or found.source == str(path)
    assert find_tuning(workspace, MACHINE, "bf16").choice is None  # another precision has a tuning of its own


@pytest.mark.parametrize("content", ["{", "[]", '{"machine": {}, "choice": {}}'])
def test_a_broken_tuning_is_named(workspace: Workspace, content: str) -> None:
    path = put(workspace)
    path.write_text(content)
    with refused("computing.tuning_invalid", ConfigError, file=path) as error:
        find_tuning(workspace, MACHINE, "fp32")
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_a_tuning_of_another_class_of_machine_is_refused(workspace: Workspace) -> None:
    put(workspace, machine=replace(MACHINE, name="cpu-abacus").to_json())
    with refused("computing.other_machine", ConfigError, made="cpu-abacus", here=MACHINE.name):
        find_tuning(workspace, MACHINE, "fp32")


@pytest.mark.parametrize(
    ("timed", "untuned", "chosen"),
    [
        ([], "reference", "reference"),
        ([("native", 1.3, 1.2, 1.4)], "reference", "native"),
        ([("native", 1.3, 0.9, 1.4)], "reference", "reference"),  # the machine was too busy to show it
        ([("native", 1.01, 1.005, 1.02)], "reference", "reference"),
        ([("fused", None, None, None)], "fused", "fused"),
        ([("fused", 0.5, 0.4, 0.6)], "fused", "reference"),
        ([("fused", 2.0, 1.9, 2.1), ("compiled", 2.5, 2.4, 2.6)], "fused", "compiled"),
    ],
)
def test_tuning_chooses_the_fastest_implementation_that_beats_the_reference_beyond_noise(
    timed: list[tuple[str, Any, Any, Any]], untuned: str, chosen: str
) -> None:
    rows = [TimedImplementation("an op", name, ratio, low, high, 0.001) for name, ratio, low, high in timed]
    assert choose_fastest_implementation(rows, untuned) == chosen


def test_a_plan_uses_tuned_kernels_for_auto_and_keeps_named_kernels(plant: Workspace) -> None:
    put(plant)
    text = (find_checkout_root() / tuned_kernels.KERNELS).read_text()
    recipe, decided, notes = compute_settings.choose_compute_settings(
        plant, load_recipe(plant), text.replace("adamw: auto", "adamw: reference")
    )
    assert recipe.precision == "fp32" and not notes
    assert decided["kernels"]["attention"] == "recompute" and decided["kernels"]["adamw"] == "reference"
    assert decided["kernels"].keys() == OPS.keys()
    assert decided["machine"]["name"] == MACHINE.name and decided["tuning"].endswith("-fp32.json")
    assert set(decided["precision"]["probe"]["rates"]) == {"fp32", "bf16"}


def test_tune_times_the_kernels_of_this_machine_and_the_command_shows_the_times(plant: Workspace) -> None:
    """Real kernels at the tiny recipe's sizes with 2 seconds: an op that was not timed keeps its untuned kernel."""
    path = tuning.tune_kernels(plant, SILENT, seconds=2.0)
    found = tuned_kernels.read_tuning(path)
    assert found["machine"] == MACHINE.to_json() and found["choice"].keys() == OPS.keys()
    assert found["setting"]["shape"] == SHAPE
    timed = {(one["op"], one["implementation"]) for one in found["timed"]}
    assert ("adamw", "fused") in timed and ("attention", "compiled") not in timed  # the recipe compiles nothing
    assert all(one["ratio"] is None or one["ratio"] > 0 for one in found["timed"])
    shown = "\n".join(tuned_kernels.describe_tuning(found))
    assert MACHINE.name in shown and "linear_cross_entropy" in shown
    assert find_tuning(plant, MACHINE, "fp32", SHAPE).note == ""


def test_tune_if_needed_tunes_only_once(plant: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        tuning, "_live_code", lambda workspace: find_checkout_root()
    )  # the plant's own leaves nothing to auto
    monkeypatch.setattr(tuning, "tune_kernels", lambda workspace, progress: asked.append(put(workspace)))
    for _ in range(2):
        tuning.tune_kernels_if_untuned(plant, SILENT)
    assert len(asked) == 1
    put(plant, machine=replace(MACHINE, torch="1.13.0").to_json())
    tuning.tune_kernels_if_untuned(plant, SILENT)
    assert len(asked) == 2


def test_tuning_times_the_most_important_kernels_first() -> None:
    recipe = find_checkout_root() / "policies" / "recipes" / "demo.yaml"
    setting = replace(BenchSetting.from_recipe_file(recipe), precision="bf16")
    order = [
        f"{op.name} {one.name}"
        for op, one in list_in_timing_order([OPS[name] for name in list_training_ops(recipe)], setting, "cpu")
    ]
    assert len(order) == len(set(order)) and order.index("adamw fused") < order.index("linear_cross_entropy compiled")
    compiled = order[order.index("linear_cross_entropy compiled") :]
    assert compiled[2] == "attention recompute", "no op waits until another is done with all it has"
    assert compiled[-1] == "embedding compiled"
