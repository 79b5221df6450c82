"""Compares the schedules with the closed forms of the papers, worked out by hand here, and with torch's own schedulers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, MultiStepLR, SequentialLR

from tests.support.trainer.segments import recipe_with
from trainer.contract.recipe import Recipe
from trainer.optim.schedule import compute_batch_size_lr_share, compute_lr_share


def recipe_of(batch: dict[str, Any] | None = None, **schedule: Any) -> Recipe:
    changes = {f"schedule__{key}": value for key, value in ({"warmup_steps": 4} | schedule).items()}
    return recipe_with(**changes, **{f"batch__{key}": value for key, value in (batch or {}).items()})


def trunk(recipe: Recipe, steps: int) -> list[float]:
    return [compute_lr_share(recipe, "trunk", step, 0, steps) for step in range(steps)]


def of_torch(make: Any, steps: int) -> list[float]:
    """The rates that a torch scheduler sets, one a step, for a peak of one."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler: LRScheduler = make(optimizer)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("kind", "step", "first", "last", "share"),
    [
        ("trunk", 0, 0, 20, 0.25),
        ("trunk", 2, 0, 20, 0.75),
        ("trunk", 3, 0, 20, 1.0),
        ("trunk", 19, 0, 20, 1.0),  # the trunk has no end that it decays to
        ("trunk", 10**9, 20, 10**9 + 1, 1.0),
        ("anneal", 20, 20, 29, 1 - math.sqrt(0.1)),
        ("anneal", 24, 20, 29, 1 - math.sqrt(0.5)),
        ("anneal", 28, 20, 29, 1 - math.sqrt(0.9)),
    ],
)
def test_the_wsd_schedule_has_the_rates_worked_out_by_hand(
    kind: str, step: int, first: int, last: int, share: float
) -> None:
    assert compute_lr_share(recipe_of(), kind, step, first, last) == pytest.approx(share)  # type: ignore[arg-type]


@pytest.mark.parametrize("floor", [0.0, 0.1])
@pytest.mark.parametrize("warmup", [0, 5])
def test_the_cosine_schedule_equals_torchs_after_a_linear_warm_up(warmup: int, floor: float) -> None:
    recipe = recipe_of(kind="cosine", cosine_steps=50, warmup_steps=warmup, final_lr_share=floor)
    period = 50 - warmup
    if warmup:
        make = lambda o: SequentialLR(
            o,
            [
                LinearLR(o, start_factor=1 / warmup, total_iters=warmup - 1),
                CosineAnnealingLR(o, period, eta_min=floor),
            ],
            milestones=[warmup],
        )
    else:
        make = lambda o: CosineAnnealingLR(o, period, eta_min=floor)
    shares = trunk(recipe, 80)
    assert shares[:51] == pytest.approx(of_torch(make, 51), abs=1e-9)
    assert shares[50:] == pytest.approx([floor] * 30, abs=1e-12), "torch would climb again; the trunk stays"


def test_the_multi_step_schedule_equals_torchs() -> None:
    """DeepSeek LLM's (2401.02954 §2.3): 31.6 % of the peak from 80 % of the steps on, 10 % from 90 % on."""
    steps = [{"from_step": 80, "share": 10**-0.5}, {"from_step": 90, "share": 0.1}]
    recipe = recipe_of(kind="multi-step", milestones=steps, warmup_steps=0)
    assert trunk(recipe, 100) == pytest.approx(of_torch(lambda o: MultiStepLR(o, [80, 90], gamma=10**-0.5), 100))


@pytest.mark.parametrize(("shape", "middle"), [("1-sqrt", 1 - math.sqrt(0.5)), ("linear", 0.5), ("cosine", 0.5)])
def test_the_rate_of_an_anneal_falls_to_its_floor(shape: str, middle: float) -> None:
    recipe = recipe_of(shape=shape, final_lr_share=0.1)
    shares = [compute_lr_share(recipe, "anneal", step, 100, 199) for step in range(100, 199)]
    assert shares == sorted(shares, reverse=True)
    assert shares[49] == pytest.approx(0.1 + 0.9 * middle)
    assert 0.1 < shares[-1] < 0.12


@pytest.mark.parametrize(
    ("schedule", "branch", "start"),
    [
        ({}, 20, 1.0),
        ({"warmup_steps": 20}, 9, 0.5),  # off the warm-up: the rate does not go on climbing
        ({"kind": "cosine", "cosine_steps": 44, "warmup_steps": 4}, 24, 0.5),  # half way down
        ({"kind": "cosine", "cosine_steps": 44, "final_lr_share": 0.2}, 500, 0.2),  # nothing left to anneal
        ({"kind": "multi-step", "milestones": [{"from_step": 30, "share": 0.4}]}, 30, 0.4),
        ({"kind": "multi-step", "milestones": [{"from_step": 30, "share": 0.4}], "final_lr_share": 0.5}, 30, 0.4),
    ],
)
def test_an_anneal_starts_from_the_trunks_rate(schedule: dict[str, Any], branch: int, start: float) -> None:
    recipe = recipe_of(shape="linear", **schedule)
    floor = min(start, recipe.schedule.final_lr_share)
    shares = [compute_lr_share(recipe, "anneal", step, branch, branch + 9) for step in range(branch, branch + 9)]
    assert shares == pytest.approx([floor + (start - floor) * (1 - (i + 1) / 10) for i in range(9)])


def test_rewarming_climbs_from_the_anneals_last_rate_to_the_trunks() -> None:
    recipe = recipe_of(rewarmup_steps=5, final_lr_share=0.1)
    shares = [compute_lr_share(recipe, "trunk", step, 26, 36, rewarm=True) for step in range(26, 36)]
    assert shares == pytest.approx([0.28, 0.46, 0.64, 0.82, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    assert [compute_lr_share(recipe, "trunk", step, 26, 36) for step in (26, 35)] == [1.0, 1.0], "only when asked to"
    at_once = recipe_of(rewarmup_steps=0)
    assert compute_lr_share(at_once, "trunk", 26, 26, 36, rewarm=True) == 1.0


def test_rewarming_joins_a_falling_trunk() -> None:
    recipe = recipe_of(kind="cosine", cosine_steps=44, rewarmup_steps=4)
    shares = [compute_lr_share(recipe, "trunk", step, 20, 44, rewarm=True) for step in range(20, 44)]
    plain = [0.5 * (1 + math.cos(math.pi * (step - 4) / 40)) for step in range(20, 44)]
    assert shares[:4] == pytest.approx([plain[i] * (i + 1) / 4 for i in range(4)])
    assert shares[4:] == pytest.approx(plain[4:])


def test_a_smaller_batch_has_the_square_root_of_its_share() -> None:
    """Four times the batch is twice the rate: Adam's rule in 2205.10287."""
    warmup = [{"until_step": 10, "sequences": 2}, {"until_step": 20, "sequences": 4}]
    recipe = recipe_of(batch={"sequences": 8, "warmup": warmup})
    assert [compute_batch_size_lr_share(recipe.batch, step) for step in (9, 10, 19, 20)] == pytest.approx(
        [0.5, math.sqrt(0.5), math.sqrt(0.5), 1.0]
    )
    assert compute_lr_share(recipe, "trunk", 1, 0, 30) == pytest.approx(0.5 * 0.5)
    assert compute_lr_share(recipe, "anneal", 15, 12, 21) == pytest.approx((1 - math.sqrt(0.4)) * math.sqrt(0.5))


def test_every_share_lies_between_zero_and_one() -> None:
    for kind in ({"kind": "wsd"}, {"kind": "cosine", "cosine_steps": 30, "final_lr_share": 0.05}):
        recipe = recipe_of(**kind, rewarmup_steps=3)
        for rewarm in (False, True):
            for segment in ("trunk", "anneal"):
                shares = [compute_lr_share(recipe, segment, s, 12, 40, rewarm) for s in range(12, 40)]  # type: ignore[arg-type]
                assert all(0 < share <= 1 for share in shares)
