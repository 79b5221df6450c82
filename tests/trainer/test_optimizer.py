from __future__ import annotations

import math

import pytest
import torch

from tests.trainer.conftest import recipe_with
from tests.trainer.test_model import make_model
from trainer.optimizer import Optimizer, format_table, group_table, squares
from trainer.stability import clip_and_skip


def test_every_parameter_is_in_one_group_and_only_matrices_decay() -> None:
    model, recipe = make_model(), recipe_with().optimizer
    table = {row.parameter: row for row in group_table(model, recipe)}
    assert set(table) == {name for name, _ in model.named_parameters()}
    decayed = {name.rpartition(".")[2] for name, row in table.items() if row.weight_decay}
    assert decayed == {"q", "k", "v", "attention_out", "gate", "up", "down"}
    assert "final_norm" in format_table(list(table.values()))


def test_an_update_is_that_of_the_paper() -> None:
    """Algorithm 2 of arXiv 1711.05101 in fp64, with clipping, over three steps."""
    model = make_model()
    recipe = recipe_with().optimizer
    optimizer = Optimizer(model, recipe)
    weights = {n: p.detach().double() for n, p in model.named_parameters()}
    first = {n: torch.zeros_like(p) for n, p in weights.items()}
    second = {n: torch.zeros_like(p) for n, p in weights.items()}
    decay = {row.parameter: row.weight_decay for row in group_table(model, recipe)}
    for t in range(1, 4):
        generator = torch.Generator().manual_seed(t)
        gradients = {n: torch.randn(p.shape, generator=generator) for n, p in model.named_parameters()}
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name].clone()
        norm = squares(optimizer.gradients()).sum().sqrt()
        assert float(norm) == pytest.approx(
            math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
        )
        optimizer.step(0.01 * t, *clip_and_skip(torch.tensor(1.0), norm, 1.0, math.inf))
        for n, w in weights.items():
            g = gradients[n].double() / float(norm)
            first[n] = recipe.beta1 * first[n] + (1 - recipe.beta1) * g
            second[n] = recipe.beta2 * second[n] + (1 - recipe.beta2) * g * g
            m, v = first[n] / (1 - recipe.beta1**t), second[n] / (1 - recipe.beta2**t)
            weights[n] = w - 0.01 * t * (m / (v.sqrt() + recipe.eps) + decay[n] * w)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.double(), weights[name], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e9])
def test_a_bad_update_changes_nothing_at_all(bad: float) -> None:
    model = make_model()
    optimizer = Optimizer(model, recipe_with().optimizer)
    for sick in (False, True):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.01)
        if sick:
            next(model.parameters()).grad[0, 0] = bad  # type: ignore[index]
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        state = {n: t.clone() for n, t in optimizer.state_tensors().items()}
        norm = squares(optimizer.gradients()).sum().sqrt()
        optimizer.step(0.01, *clip_and_skip(torch.tensor(1.0), norm, 1.0, limit=1000.0))
        same = [torch.equal(p, before[n]) for n, p in model.named_parameters()]
        assert all(same) if sick else not any(same)
        if sick:
            assert all(torch.equal(t, state[n]) for n, t in optimizer.state_tensors().items())


def test_a_loss_that_is_not_finite_skips_too() -> None:
    assert float(clip_and_skip(torch.tensor(math.nan), torch.tensor(1.0), 1.0, math.inf)[1]) == 1.0
