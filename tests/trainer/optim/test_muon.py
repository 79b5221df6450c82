"""Compares Muon with torch's own Muon, and shows that a skipped update changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.newton_schulz import COEFFICIENTS, LEAST_NORM
from kernels.newton_schulz import reference as orthogonalise
from tests.support.trainer.segments import recipe_with
from tests.support.trainer.small_models import iterated, make_model
from trainer.contract.recipe import MuonRecipe
from trainer.monitor.stability import decide_clip_and_skip
from trainer.optim.muon import Muon, compute_adamw_like_scale, group_parameters_for_stacking
from trainer.optim.optimizer import Optimizer, compute_sums_of_squares

GO = torch.tensor(0.0)
SHAPES = [(32, 32), (48, 16), (16, 48), (1, 24), (24, 1)]


def gradient(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 10.0 ** (seed % 4 - 2)


def step(
    muon: Muon, grads: dict[str, Tensor], lr: float, decay: float, skip: Tensor = GO, divide_by: float = 1.0
) -> None:
    for name, grad in grads.items():
        muon.parameters[name].grad = grad.clone()
    muon.step(lr, dict.fromkeys(grads, 1.0), dict.fromkeys(grads, decay), torch.tensor(divide_by), skip)


def bits(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """To compare to the bit: equal floats may differ in the sign of a zero, and NaN equals nothing."""
    return {n: t.detach().contiguous().view(torch.int32).clone() for n, t in tensors.items()}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("recipe", [{}, {"nesterov": False}, {"momentum": 0.0}, {"momentum": 0.8, "steps": 3}], ids=str)
def test_a_matrix_is_updated_as_by_torch(shape: tuple[int, int], recipe: dict[str, float]) -> None:
    """Ten steps with a changing rate, decay and clipping; the same operations, so the same bits."""
    settings = MuonRecipe.model_validate(recipe)
    ours, theirs = (torch.nn.Parameter(gradient(shape, 99)) for _ in range(2))
    muon = Muon({"w": ours}, settings)
    reference = torch.optim.Muon(
        [theirs],
        momentum=settings.momentum,
        nesterov=settings.nesterov,
        ns_steps=settings.steps,
        ns_coefficients=COEFFICIENTS,
        eps=LEAST_NORM,
        weight_decay=0.1,
        adjust_lr_fn="match_rms_adamw",
    )
    for t in range(10):
        lr, grad, divide_by = 0.02 * (1 + t % 3), gradient(shape, t), 1.0 + t % 2
        step(muon, {"w": grad}, lr, 0.1, divide_by=divide_by)
        theirs.grad = grad / divide_by
        reference.param_groups[0]["lr"] = lr
        reference.step()
        assert torch.equal(ours, theirs), t
    assert torch.equal(muon.momentum["w"], reference.state[theirs]["momentum_buffer"])


@pytest.mark.parametrize("shape", SHAPES)
def test_a_stack_of_experts_is_updated_as_each_matrix_alone(shape: tuple[int, int]) -> None:
    experts = 4
    stack = torch.nn.Parameter(gradient((experts, *shape), 7))
    one_by_one = {str(e): torch.nn.Parameter(stack.detach()[e].clone()) for e in range(experts)}
    together, apart = Muon({"w": stack}, MuonRecipe()), Muon(one_by_one, MuonRecipe())  # type: ignore[arg-type]
    for t in range(6):
        grad = gradient((experts, *shape), t) * torch.tensor([1.0, 1e-3, 1e3, 0.0 if t % 2 else 1.0]).view(-1, 1, 1)
        step(together, {"w": grad}, 0.02, 0.1)
        step(apart, {str(e): grad[e] for e in range(experts)}, 0.02, 0.1)
    for e in range(experts):
        assert torch.equal(together.momentum["w"][e], apart.momentum[str(e)])
        # batched products may sum in another order, so that a bf16 rounding of the update (2^-8 of it) may differ
        update = 0.02 * 6 * compute_adamw_like_scale(torch.Size(shape))
        torch.testing.assert_close(stack[e], one_by_one[str(e)], atol=update / 256, rtol=0)


def test_orthogonalising_matrices_together_gives_the_same_as_each_alone() -> None:
    shapes: dict[str, tuple[int, ...]] = {"a": (48, 16), "b": (16, 48), "c": (48, 16), "d": (3, 48, 16), "e": (48, 16)}
    weights = {name: torch.nn.Parameter(gradient(shape, 5)) for name, shape in shapes.items()}
    apart = {name: torch.nn.Parameter(weight.detach().clone()) for name, weight in weights.items()}
    calls = []

    def counted(matrices: Tensor, steps: int) -> Tensor:
        assert matrices.dtype == torch.bfloat16, "a GPU multiplies these in half the time"
        calls.append(tuple(matrices.shape))
        return orthogonalise(matrices, steps)

    one = Muon(weights, MuonRecipe(), counted)  # type: ignore[arg-type]
    alone = [Muon({name: weight}, MuonRecipe()) for name, weight in apart.items()]
    for t in range(4):
        grads = {name: gradient(shape, t + i) for i, (name, shape) in enumerate(shapes.items())}
        step(one, grads, 0.02, 0.1)
        for muon, (name, grad) in zip(alone, grads.items()):
            step(muon, {name: grad}, 0.02, 0.1)
    assert calls == [(6, 48, 16), (16, 48)] * 4
    for name, muon in zip(shapes, alone):
        assert torch.equal(one.momentum[name], muon.momentum[name])
        # batched products may sum in another order, so that a bf16 rounding of the update (2^-8 of it) may differ
        update = 0.02 * 4 * compute_adamw_like_scale(torch.Size(shapes[name]))
        torch.testing.assert_close(weights[name], apart[name], atol=update / 256, rtol=0)


def test_a_stack_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    many: dict[str, tuple[int, ...]] = {str(i): (8, 4) for i in range(130)}
    assert [len(names) for names in group_parameters_for_stacking(many)] == [64, 64, 2]
    assert group_parameters_for_stacking({"a": (65, 8, 4), "b": (8, 4), "c": (63, 8, 4)}) == [["a"], ["b", "c"]], (
        "never parted"
    )
    monkeypatch.setattr("trainer.optim.muon.ELEMENTS", 100)
    assert group_parameters_for_stacking({"a": (8, 4), "b": (8, 4), "c": (8, 4), "d": (4, 8), "e": (8, 4)}) == [
        ["a", "b", "c"],
        ["d"],
        ["e"],
    ]


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 3e38])
def test_a_skipped_update_changes_no_bit(poison: float) -> None:
    weights = {"matrix": torch.nn.Parameter(gradient((8, 12), 1)), "stack": torch.nn.Parameter(gradient((3, 8, 4), 2))}
    with torch.no_grad():
        weights["matrix"][0, :2] = torch.tensor([-0.0, 0.0])
    muon = Muon(weights, MuonRecipe())  # type: ignore[arg-type]
    step(muon, {n: gradient(tuple(w.shape), 3) for n, w in weights.items()}, 0.02, 0.1)
    muon.momentum["matrix"][1, :2] = torch.tensor([-0.0, 0.0])
    before = bits(weights), bits(muon.momentum)  # type: ignore[arg-type]
    sick = {n: torch.full_like(w, poison) for n, w in weights.items()}
    step(muon, sick, 0.02, 0.1, skip=torch.tensor(1.0))
    for held, kept in zip((weights, muon.momentum), before):
        assert all(torch.equal(after, kept[n]) for n, after in bits(held).items())  # type: ignore[arg-type]


@pytest.mark.parametrize("experts", [None, {"count": 4, "per_token": 2, "d_ff": 16}], ids=["dense", "experts"])
@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e9])
def test_one_bad_element_anywhere_skips_the_update_and_leaves_no_trace(
    experts: dict[str, int] | None, poison: float
) -> None:
    """After a good, a bad and a good step, everything is as if the bad step had not been made."""
    recipe = recipe_with(optimizer__name="muon", model__experts=experts)
    models = [make_model(recipe) for _ in range(2)]
    sick, well = (Optimizer(model, recipe.optimizer) for model in models)
    for poisoned in (name for name in sick.parameters if name.startswith(("blocks.1.", "embedding"))):
        for kind in ("good", "bad", "good"):
            for optimizer in (sick, well):
                for i, (name, parameter) in enumerate(optimizer.parameters.items()):
                    parameter.grad = 0.01 * gradient(tuple(parameter.shape), i % 3)
                    if kind == "bad" and name == poisoned:
                        parameter.grad.view(-1)[-1] = poison
                if kind == "good" or optimizer is sick:
                    norm = compute_sums_of_squares(optimizer.gradients()).sum().sqrt()
                    divide_by, skip = decide_clip_and_skip(torch.tensor(1.0), norm, 1.0, limit=1000.0)
                    assert bool(skip) == (kind == "bad")
                    optimizer.step(0.01, divide_by, skip)
                optimizer.zero_grad()
        states = [bits({n: t.float() for n, t in o.state_tensors().items()} | o.parameters) for o in (sick, well)]
        assert all(torch.equal(states[0][n], states[1][n]) for n in states[1]), poisoned


@pytest.mark.parametrize("spread", [lambda n: torch.ones(n), lambda n: torch.logspace(0, -4, n)], ids=["flat", "steep"])
@pytest.mark.parametrize("shape", [(32, 32), (96, 32), (32, 96)])
def test_singular_values_of_the_result_are_those_of_the_iterated_quintic(
    shape: tuple[int, int], spread: Callable[[int], Tensor]
) -> None:
    u, _, v = torch.linalg.svd(gradient(shape, 0).double(), full_matrices=False)
    values = spread(min(shape)).double()
    found = orthogonalise(((u * values) @ v).float(), 5).double()
    reached = torch.diagonal(u.mT @ found @ v.mT)
    share = values / values.norm()
    told = share >= 0.003  # rounding the matrix to bf16 makes singular values of 1e-4 of its norm by itself
    torch.testing.assert_close(reached[told], iterated(share, 5)[told], atol=0.06, rtol=0)
    assert float(reached[told].min()) > 0.68 - 0.06 and float(torch.linalg.svdvals(found).max()) < 1.21 + 0.06
    assert told.sum() > len(share) / 2
    if float(share.min()) == float(share.max()):  # nothing is small: U V' itself, up to a factor near one
        torch.testing.assert_close(found / found.norm(), (u @ v) / (u @ v).norm(), atol=0.02, rtol=0)


def test_a_zero_gradient_gives_a_zero_update() -> None:
    assert torch.equal(orthogonalise(torch.zeros(4, 6), 5), torch.zeros(4, 6, dtype=torch.bfloat16))
    stack = torch.stack((torch.zeros(4, 6), torch.randn(4, 6)))
    found = orthogonalise(stack, 5)
    assert not found[0].any() and torch.isfinite(found).all()
