"""The presets' recipes: their sizes, the plans that ``factory plan`` makes of them, and the machines that they fit."""

from __future__ import annotations

import re

import pytest
import torch

from factory.presets.presets import (
    PRESETS,
    Hardware,
    estimate_memory_per_device,
    explain_why_recipe_is_too_large,
    find_largest_fitting_preset,
)
from kernels.contract.message import Message
from kernels.contract.registry import bind_ops
from tests.support.paths import ROOT
from trainer.contract.plan.gpus import GPUS
from trainer.contract.plan.run_plan import PlanRequest, plan_run
from trainer.contract.recipe import Recipe
from trainer.model.transformer import Decoder

RECIPES = ROOT / "policies" / "recipes"
LAPTOP = Hardware((), 8e9, 1)
WEIGHTS = {"laptop": 12_588_672, "one-gpu": 213_945_344, "eight-gpus": 1_040_267_776}


def machine(gpus: int, gigabytes: float) -> Hardware:
    return Hardware((gigabytes * 1e9,) * gpus, 64e9, gpus)


@pytest.mark.parametrize("name", PRESETS)
def test_each_presets_recipe_has_the_stated_size_and_can_be_exported(name: str) -> None:
    recipe = Recipe.load(RECIPES / f"{name}.yaml")
    assert (
        recipe.model.parameters == WEIGHTS[name] and recipe.model.list_warnings() == [] and recipe.precision == "auto"
    )
    with torch.device("meta"):
        model = Decoder(recipe.model, bind_ops({}, "cpu", torch.float32), torch.float32)
    assert sum(parameter.numel() for parameter in model.parameters()) == WEIGHTS[name]


@pytest.mark.parametrize(
    ("name", "gpus", "gpu", "tokens"), [("one-gpu", 1, "rtx-4090", 4e9), ("eight-gpus", 8, "a100-40", 20e9)]
)
def test_the_plan_of_a_gpu_preset_fits_the_gpus_that_it_is_for(name: str, gpus: int, gpu: str, tokens: float) -> None:
    recipe = Recipe.load(RECIPES / f"{name}.yaml")
    found = plan_run(PlanRequest(recipe.model, tokens, gpus, GPUS[gpu], recipe.batch, logit_rows=None))
    assert found.layout.recompute == "none" and found.sequences == recipe.batch.sequences
    assert found.layout.micro_sequences >= (recipe.batch.micro_sequences or 0)
    assert estimate_memory_per_device(recipe, gpus, GPUS[gpu].memory, 2) <= GPUS[gpu].memory


@pytest.mark.parametrize(
    ("here", "fits"),
    [
        (LAPTOP, "laptop"),
        (Hardware((), 2e9, 1), "laptop"),
        (Hardware((), 5e8, 1), ""),
        (machine(1, 16), "one-gpu"),
        (machine(1, 12), "laptop"),
        (machine(1, 80), "eight-gpus"),  # it fits, but is slow
        (machine(8, 40), "eight-gpus"),
        (machine(8, 16), "one-gpu"),
        (machine(3, 80), ""),  # three GPUs cannot share a step of 256, 128 or 16 rows
    ],
)
def test_the_largest_fitting_preset_is_found_for_each_machine(here: Hardware, fits: str) -> None:
    assert find_largest_fitting_preset(here, RECIPES) == fits


@pytest.mark.parametrize(
    ("name", "here", "code", "size", "machine"),
    [
        ("one-gpu", LAPTOP, "presets.needs_gpus", 11.8, "no GPU and 8 GB RAM"),
        ("eight-gpus", LAPTOP, "presets.needs_gpus", 21.3, "no GPU and 8 GB RAM"),
        ("one-gpu", machine(1, 8), "presets.needs_memory", 12.6, "1 GPU of 8 GB"),
        ("eight-gpus", machine(2, 24), "presets.needs_memory", 29.9, "2 GPUs of 24 GB"),
        ("one-gpu", machine(3, 80), "presets.not_shareable", None, "3 GPUs of 80 GB"),
    ],
)
def test_a_model_that_is_too_large_is_refused_with_the_memory_that_it_needs(
    name: str, here: Hardware, code: str, size: float | None, machine: str
) -> None:
    said = explain_why_recipe_is_too_large(Recipe.load(RECIPES / f"{name}.yaml"), here, PRESETS[name].gpus)
    assert isinstance(said, Message) and (said.code, said.data["machine"]) == (code, machine)
    assert said.data.get("gpus", PRESETS[name].gpus) == PRESETS[name].gpus
    if size is None:
        assert re.search(r"\(128\) .*\(3\)", said)
    else:
        assert said.data["size"] == pytest.approx(size, abs=0.05)


def test_the_hardware_of_this_machine_is_found() -> None:
    found = Hardware.of_this_machine()
    assert found.memory > 5e8 and found.ranks == max(1, len(found.gpus))
