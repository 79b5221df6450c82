from __future__ import annotations

import math

import pytest
import torch

from tests.support.trainer.segments import recipe_with
from tests.support.trainer.small_models import iterated, make_model
from trainer.monitor.stability import decide_clip_and_skip
from trainer.optim.optimizer import Optimizer, compute_sums_of_squares, format_update_rule_table, make_update_rule_table


def test_every_parameter_is_in_one_group_and_only_matrices_decay() -> None:
    model, recipe = make_model(), recipe_with().optimizer
    table = {row.parameter: row for row in make_update_rule_table(model, recipe)}
    assert set(table) == {name for name, _ in model.named_parameters()}
    decayed = {name.rpartition(".")[2] for name, row in table.items() if row.weight_decay}
    assert decayed == {"q", "k", "v", "attention_out", "gate", "up", "down"}
    assert "final_norm" in format_update_rule_table(list(table.values()))


EXPERTS = {"count": 4, "per_token": 2, "d_ff": 16}
MATRICES = {"q", "k", "v", "attention_out", "gate", "up", "down", "shared_gate", "shared_up", "shared_down"}
MATRICES |= {"experts_gate", "experts_up", "experts_down"}


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("base", [None, 32, 8])
def test_the_rates_change_with_the_width_as_mup_says(name: str, base: int | None) -> None:
    """Table 8 of arXiv 2203.03466: hidden weights' Adam rate falls as 1 / width, vectors and embedding keep theirs."""
    recipe = recipe_with(model__experts=EXPERTS, model__base_d_model=base, optimizer__name=name)
    times = recipe.model.d_model / base if base else 1.0
    for row in make_update_rule_table(make_model(recipe), recipe.optimizer, recipe.model.mup_width_ratio):
        key = row.parameter.rpartition(".")[2]
        if key in MATRICES:
            share = times**-0.5 if name == "muon" else 1 / times
            assert (row.rule, row.lr_share) == (name, pytest.approx(share))
            assert row.lr_share * row.weight_decay == pytest.approx(recipe.optimizer.weight_decay)
        else:
            assert key in {"embedding", "router"} or key.endswith("norm")
            assert (row.rule, row.weight_decay) == ("adamw", 0.0)
            assert row.lr_share == pytest.approx(1 / times if key == "router" else 1.0)


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("width", [32, 128])
def test_the_first_update_moves_hidden_states_equally_far_at_any_width(name: str, width: int) -> None:
    """What the table is for: the update times an input that it aligns with has entries of one size at any width."""
    sizes = {"model__d_model": width, "model__heads": width // 8, "model__kv_heads": width // 8, "model__d_ff": width}
    recipe = recipe_with(**sizes, model__head_dim=8, model__base_d_model=32, optimizer__name=name, optimizer__lr=0.01)
    recipe = recipe.model_copy(update={"optimizer": recipe.optimizer.model_copy(update={"weight_decay": 0.0})})
    model = make_model(recipe)
    optimizer = Optimizer(model, recipe.optimizer, recipe.model.mup_width_ratio)
    generator = torch.Generator().manual_seed(2)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    inputs = {}
    for n, p in model.named_parameters():
        if p.ndim == 2 and n.startswith("blocks"):
            inputs[n] = torch.randn(p.shape[1], generator=generator).sign()
            p.grad = torch.outer(torch.randn(p.shape[0], generator=generator), inputs[n])
        else:
            p.grad = torch.zeros_like(p)
    optimizer.step(0.01, torch.tensor(1.0), torch.tensor(0.0))
    for n, x in inputs.items():
        moved = ((optimizer.parameters[n] - before[n]) @ x).detach()
        # Adam: a sum of ``width`` entries of 0.01 · 32 / width; Muon: of rank one, its norm 0.2 sqrt(32) at any width
        expected = 0.01 * 32 if name == "adamw" else 0.01 * 0.2 * math.sqrt(32) * float(iterated(torch.tensor(1.0), 5))
        assert float(moved.square().mean().sqrt()) == pytest.approx(expected, rel=0.03), n


@pytest.mark.parametrize(("had", "wanted"), [("muon", "adamw"), ("adamw", "muon")])
def test_the_state_of_another_optimiser_is_refused(had: str, wanted: str) -> None:
    optimizers = {}
    for name in (had, wanted):
        model = make_model()
        optimizers[name] = Optimizer(model, recipe_with(optimizer__name=name).optimizer)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.01)
    optimizers[had].step(0.01, torch.tensor(1.0), torch.tensor(0.0))
    with pytest.raises(KeyError, match="blocks.0.q"):
        optimizers[wanted].load_state_tensors(optimizers[had].state_tensors())


def test_an_adamw_update_is_that_of_the_paper() -> None:
    """Algorithm 2 of arXiv 1711.05101 in fp64, with clipping, over three steps."""
    model = make_model()
    recipe = recipe_with().optimizer
    optimizer = Optimizer(model, recipe)
    weights = {n: p.detach().double() for n, p in model.named_parameters()}
    first = {n: torch.zeros_like(p) for n, p in weights.items()}
    second = {n: torch.zeros_like(p) for n, p in weights.items()}
    decay = {row.parameter: row.weight_decay for row in make_update_rule_table(model, recipe)}
    for t in range(1, 4):
        generator = torch.Generator().manual_seed(t)
        gradients = {n: torch.randn(p.shape, generator=generator) for n, p in model.named_parameters()}
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name].clone()
        norm = compute_sums_of_squares(optimizer.gradients()).sum().sqrt()
        assert float(norm) == pytest.approx(
            math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
        )
        optimizer.step(0.01 * t, *decide_clip_and_skip(torch.tensor(1.0), norm, 1.0, math.inf))
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
        norm = compute_sums_of_squares(optimizer.gradients()).sum().sqrt()
        optimizer.step(0.01, *decide_clip_and_skip(torch.tensor(1.0), norm, 1.0, limit=1000.0))
        same = [torch.equal(p, before[n]) for n, p in model.named_parameters()]
        assert all(same) if sick else not any(same)
        if sick:
            assert all(torch.equal(t, state[n]) for n, t in optimizer.state_tensors().items())


def test_a_loss_that_is_not_finite_skips_the_update() -> None:
    assert float(decide_clip_and_skip(torch.tensor(math.nan), torch.tensor(1.0), 1.0, math.inf)[1]) == 1.0
