"""What fits when a public model's training continues."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.contract.message import Message
from tests.support.trainer.public_configs import CONFIGS
from trainer.contract.plan.continuing import (
    CONTEXTS,
    Devices,
    Fit,
    convert_fits_to_json,
    describe_missing_keys,
    find_fit,
    list_training_ways,
)
from trainer.contract.plan.hf_config import PublicModel, read_public_model
from trainer.contract.plan.sizing import GB, GpuLayout, estimate_memory_parts, sum_bytes
from trainer.contract.recipe import Recipe

ROOM = Message("test.room", "GPUs")


def fits_of(name: str, devices: Devices, context: int | None = None) -> tuple[PublicModel, dict[str, Fit]]:
    public = read_public_model(CONFIGS[name], name, context)
    ways = list_training_ways(public.spec, 16)
    kinds = ("full", "frozen", "lora", "dora")
    return public, {
        kind: find_fit(public.spec, way, devices, public.longest_context) for kind, way in zip(kinds, ways, strict=True)
    }


def test_lora_fits_where_full_training_does_not() -> None:
    """A model of 7.6 B weights on a card of 24 GB: 16 bytes a weight are 122 GB, 2 bytes are 15 GB."""
    for name, memory in (("Mistral 7B v0.1", 24), ("OLMo 2 7B", 24), ("SmolLM3 3B", 24)):
        _, fits = fits_of(name, Devices(ROOM, 1, memory * GB))
        assert fits["full"].layout is None and fits["full"].longest_context == 0
        assert fits["lora"].layout is not None and fits["lora"].longest_context >= 4096, name
        assert sum_bytes(fits["full"].memory) > memory * GB >= sum_bytes(fits["lora"].memory)


@given(
    name=st.sampled_from(["SmolLM2-135M", "Qwen2.5-0.5B", "Gemma 2 2B", "GLM-4.5-Air"]),
    count=st.sampled_from([1, 2, 8, 64]),
    memory=st.floats(4, 200),
    kind=st.sampled_from(["full", "frozen", "lora", "dora"]),
    rows=st.sampled_from([None, 1024]),
)
@settings(deadline=None, max_examples=60)
def test_the_longest_context_fits_and_a_longer_one_does_not(
    name: str, count: int, memory: float, kind: str, rows: int | None
) -> None:
    devices = Devices(ROOM, count, memory * GB, 2, rows)
    public, fits = fits_of(name, devices)
    found, way = fits[kind], fits[kind].way

    def least(context: int) -> float:
        model = public.spec.model_copy(update={"context": context})
        return min(
            sum_bytes(estimate_memory_parts(
                model, GpuLayout(count, tensor, 1, "block"), devices.memory, logit_rows=rows, trained=way.trained
            ))
            for tensor in (1, 2, 4, 8) if count % tensor == 0 and public.spec.kv_heads % tensor == 0 and tensor <= count
        )  # fmt: skip

    longest = found.longest_context
    assert longest <= public.longest_context
    assert longest == 0 or least(longest) <= devices.memory
    longer = min(longest + CONTEXTS, public.longest_context)
    assert longest == public.longest_context or least(longer) > devices.memory
    assert (found.layout is not None) == (longest >= public.spec.context)
    if found.layout is not None:
        assert sum_bytes(found.memory) <= devices.memory
        assert found.recipe["batch"]["micro_sequences"] == found.layout.micro_sequences
        assert found.recipe["parallel"] == {"tensor": found.layout.tensor, "recompute": found.layout.recompute}


@pytest.mark.parametrize("positions", [8, 80, 127, 128, 99_999])
def test_the_longest_context_of_a_model_that_fits_is_its_own_number(positions: int) -> None:
    public = read_public_model(CONFIGS["SmolLM2-135M"] | {"max_position_embeddings": positions}, "config.json")
    (full, *_) = list_training_ways(public.spec, 16)
    assert find_fit(public.spec, full, Devices(ROOM, 1, 1000 * GB), public.longest_context).longest_context == positions


def test_a_model_allows_its_own_positions_whatever_context_is_asked_for() -> None:
    for config in ({}, {"model_type": "newer"}):
        found = read_public_model(CONFIGS["SmolLM2-135M"] | {"max_position_embeddings": 80} | config, "x", 4096)
        assert (found.longest_context, found.spec.context) == (80, 4096)


def test_the_keys_of_a_fit_make_a_recipe_that_can_be_trained() -> None:
    public, fits = fits_of("SmolLM2-135M", Devices(ROOM, 1, 24 * GB), 1024)
    keys = fits["full"].recipe
    recipe = Recipe.parse(
        {
            "name": "mine", "model": public.spec.model_dump() | keys["model"], "mixture": {"weights": {"*": 1.0}},
            "batch": {"sequences": 64} | keys["batch"], "optimizer": {"lr": 3e-4}, "parallel": keys["parallel"],
            "schedule": {"warmup_steps": 2, "trunk_steps": {"first": 8, "later": 8}, "anneal_steps": 2},
        }
    )  # fmt: skip
    assert recipe.model.parameters == 134_515_008 and recipe.model.context == 1024
    assert fits["lora"].recipe["adapt"] == {"kind": "lora", "rank": 16} and fits["frozen"].recipe["freeze"] == [
        "embedding"
    ]
    said = {remark.data["key"] for remark in describe_missing_keys(list(fits.values()))}
    assert said == {"adapt", "freeze"} - set(Recipe.model_fields), "keys that a recipe has are not announced as missing"


def test_an_untied_head_is_frozen_with_the_embedding() -> None:
    _, fits = fits_of("Mistral 7B v0.1", Devices(ROOM, 8, 80 * GB))
    assert fits["frozen"].recipe["freeze"] == ["embedding", "head"]
    trained = [fit.way.trained.parameters for fit in fits.values()]
    assert trained[:2] == [7_241_732_096, 7_241_732_096 - 2 * 32_000 * 4096] and trained[2] < trained[3] < trained[1]


def test_fits_for_programs_have_each_part_of_the_memory() -> None:
    public, fits = fits_of("Qwen2.5-0.5B", Devices(ROOM, 1, 8 * GB))
    (said,) = convert_fits_to_json(public, [fits["full"]])
    assert said["share"] == 1 and said["fits"] is False and said["layout"] is None and said["recipe"] == {}
    assert said["memory_needed"] == pytest.approx(sum(part["bytes"] for part in said["memory"]))
    wide = find_fit(
        public.spec, fits["full"].way, replace(fits["full"].devices, memory=80 * GB), public.longest_context
    )
    assert convert_fits_to_json(public, [wide])[0]["layout"]["gpus"] == 1
