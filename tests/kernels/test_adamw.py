"""AdamW in place over many tensors equals torch's optimiser, and a skipped update changes no bit."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels import adamw

GO, SKIP = torch.tensor(0.0), torch.tensor(1.0)
SETTINGS = (0.9, 0.95, 1e-8, 0.1)


def tensors(seed: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) * scale for size in ((64, 48), (7,), (1, 1), (0, 5))]


def state() -> tuple[list[Tensor], ...]:
    weights = tensors(0)
    zeros = [[torch.zeros_like(w) for w in weights] for _ in range(2)]
    return weights, *zeros, [torch.zeros(()) for _ in weights]


@pytest.mark.parametrize("update", [adamw.reference, adamw.fused_adamw, adamw.compiled_adamw])
@pytest.mark.slow("compiles the update")
def test_ten_steps_equal_those_of_torchs_adamw(update: Callable[..., None]) -> None:
    """The fused implementation equals torch's to the bit; the plain expression differs only by the order of roundings."""
    weights, exp_avgs, exp_avg_sqs, steps = state()
    theirs = [torch.nn.Parameter(w.clone()) for w in weights]
    optimizer = torch.optim.AdamW(theirs, betas=SETTINGS[:2], eps=SETTINGS[2], weight_decay=SETTINGS[3], fused=True)
    for t in range(10):
        lr, divide_by = 0.01 * (1 + t % 3), torch.tensor(1.0 + t % 2)
        gradients = tensors(t + 1, 10.0 ** (t % 3 - 1))
        for parameter, gradient in zip(theirs, gradients):
            parameter.grad = gradient.clone()
        optimizer.param_groups[0]["lr"] = lr
        optimizer.grad_scale, optimizer.found_inf = divide_by, GO  # type: ignore[attr-defined]
        optimizer.step()
        update(weights, gradients, exp_avgs, exp_avg_sqs, steps, divide_by, GO, lr, *SETTINGS)
    for i, parameter in enumerate(theirs):
        held = optimizer.state[parameter]
        for mine, right in (
            (weights[i], parameter.detach()),
            (exp_avgs[i], held["exp_avg"]),
            (exp_avg_sqs[i], held["exp_avg_sq"]),
            (steps[i], held["step"]),
        ):
            if update is adamw.fused_adamw:
                assert torch.equal(mine, right)
            else:
                torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("update", [adamw.reference, adamw.fused_adamw, adamw.compiled_adamw])
@pytest.mark.parametrize("poison", [math.nan, math.inf, 1.0])
def test_a_skipped_update_changes_no_bit(update: Callable[..., None], poison: float) -> None:
    weights, exp_avgs, exp_avg_sqs, steps = state()
    update(weights, tensors(1), exp_avgs, exp_avg_sqs, steps, torch.tensor(1.0), GO, 0.01, *SETTINGS)
    weights[0][0, :2] = torch.tensor([-0.0, 0.0])
    every = [*weights, *exp_avgs, *exp_avg_sqs, *steps]
    before = [x.clone().view(torch.int32) for x in every]
    sick = [torch.full_like(w, poison) for w in weights]
    update(weights, sick, exp_avgs, exp_avg_sqs, steps, torch.tensor(1.0), SKIP, 0.01, *SETTINGS)
    assert all(torch.equal(x.view(torch.int32), kept) for x, kept in zip(every, before))


def test_a_changed_learning_rate_causes_no_recompilation() -> None:
    """torch.compile takes a number as a constant, and gives up after eight of them."""
    weights, exp_avgs, exp_avg_sqs, steps = state()
    with torch._dynamo.config.patch(error_on_recompile=True):
        torch._dynamo.reset()
        for t in range(12):
            lr = 0.01 / (1 + t)
            adamw.compiled_adamw(
                weights, tensors(t), exp_avgs, exp_avg_sqs, steps, torch.tensor(1.0), GO, lr, *SETTINGS
            )
    assert all(int(step) == 12 for step in steps)
