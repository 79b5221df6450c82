"""Compares experts with a loop over tokens and experts in fp64, and shows how the bias changes their load."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.contract.registry import bind_ops
from models.spec import ExpertsSpec
from tests.support.trainer.segments import recipe_with
from trainer.model.experts import compute_expert_outputs, route_tokens, update_router_bias
from trainer.model.transformer import Decoder

N, D, E_, F_ = 24, 16, 6, 8
Parts = dict[str, Tensor]


def parts(seed: int = 0, dtype: torch.dtype = torch.float32) -> Parts:
    """x and the weights of ``E_`` experts; the bias reorders the choice."""
    generator = torch.Generator().manual_seed(seed)
    normal = lambda *size: torch.randn(*size, generator=generator, dtype=torch.float64)
    made = {
        "x": normal(N, D),
        "router": normal(E_, D) / D**0.5,
        "gate": normal(E_, D, F_) / D**0.5,
        "up": normal(E_, D, F_) / D**0.5,
        "down": normal(E_, F_, D) / F_**0.5,
        "bias": normal(E_) * 0.15,
    }
    return {name: tensor.to(dtype).requires_grad_(name != "bias") for name, tensor in made.items()}


def choose(per_token: int, **changes: Any) -> ExpertsSpec:
    return ExpertsSpec(count=E_, per_token=per_token, d_ff=F_, **changes)


def ours(p: Parts, per_token: int) -> Tensor:
    return compute_expert_outputs(
        p["x"],
        route_tokens(p["x"], p["router"], p["bias"], choose(per_token)),
        p["gate"],
        p["up"],
        p["down"],
        choose(per_token),
        bind_ops({}),
    )


def by_loops(p: Parts, per_token: int) -> Tensor:
    """Token by token, expert by expert."""
    rows = []
    for x in p["x"]:
        affinity = [torch.sigmoid(p["router"][e] @ x) for e in range(E_)]
        chosen = sorted(range(E_), key=lambda e: float(affinity[e].detach() + p["bias"][e]), reverse=True)[:per_token]
        total = sum(affinity[e] for e in chosen)
        y = torch.zeros(D, dtype=x.dtype)
        for e in chosen:
            hidden = F.silu(x @ p["gate"][e]) * (x @ p["up"][e])
            y = y + affinity[e] / total * (hidden @ p["down"][e])
        rows.append(y)
    return torch.stack(rows)


@pytest.mark.parametrize("per_token", [1, 2, 5, E_])
@pytest.mark.parametrize("seed", [0, 1])
def test_forward_and_every_gradient_equal_a_loop_in_fp64(per_token: int, seed: int) -> None:
    narrow, wide = parts(seed), parts(seed, torch.float64)
    dy = torch.randn(N, D, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    y, expected = ours(narrow, per_token), by_loops(wide, per_token)
    torch.testing.assert_close(y.double(), expected, atol=2e-6, rtol=1e-5)
    y.backward(dy.float())
    expected.backward(dy)
    for name in ("x", "router", "gate", "up", "down"):
        found, wanted = narrow[name].grad, wide[name].grad
        assert found is not None and wanted is not None
        if name == "router" and per_token == 1:  # one weight, divided by itself: nothing to learn
            assert float(found.abs().max()) < 1e-6 and float(wanted.abs().max()) < 1e-12
        else:
            assert float(wanted.abs().max()) > 1e-3, name
        torch.testing.assert_close(found.double(), wanted, atol=5e-6, rtol=1e-4, msg=name)


def test_an_expert_without_a_token_gets_a_gradient_of_zero() -> None:
    narrow, wide = parts(), parts(dtype=torch.float64)
    for p in (narrow, wide):
        p["bias"][2] = -100.0
    y, expected = ours(narrow, 2), by_loops(wide, 2)
    torch.testing.assert_close(y.double(), expected, atol=2e-6, rtol=1e-5)
    y.sum().backward()
    routing = route_tokens(narrow["x"], narrow["router"], narrow["bias"], choose(2))
    load = routing.count_tokens_per_expert(torch.ones(N, dtype=torch.bool))
    assert load[2] == 0 and load.sum() == 2 * N and (load > 0).sum() >= 3
    for name in ("router", "gate", "up", "down"):
        grad = narrow[name].grad
        assert grad is not None and torch.equal(grad.flatten(1).ne(0).any(1), load > 0), name


def test_strided_inputs_and_weights_give_the_same_result() -> None:
    p = parts()
    wanted = ours(p, 2)
    with torch.no_grad():
        strided = {
            "x": torch.stack((p["x"], -p["x"]), dim=1)[:, 0],  # every other row
            "router": p["router"].T.contiguous().T,
            "bias": p["bias"],
            **{name: p[name].transpose(1, 2).contiguous().transpose(1, 2) for name in ("gate", "up", "down")},
        }
    assert not any(strided[name].is_contiguous() for name in strided if name != "bias")
    torch.testing.assert_close(ours(strided, 2), wanted, atol=1e-6, rtol=1e-5)


def test_the_bias_changes_the_choice_of_experts_but_not_their_weights() -> None:
    p = parts()
    plain, moved = (
        route_tokens(p["x"], p["router"], torch.zeros(E_), choose(2)),
        route_tokens(p["x"], p["router"], p["bias"], choose(2)),
    )
    assert not torch.equal(plain.experts_Nk, moved.experts_Nk)
    affinity = (p["x"] @ p["router"].T).sigmoid().gather(1, moved.experts_Nk)
    torch.testing.assert_close(moved.weights_Nk, affinity / affinity.sum(-1, keepdim=True))


def test_the_router_is_in_fp32_under_bf16() -> None:
    p = {name: tensor.detach().bfloat16() for name, tensor in parts().items()}
    routing = route_tokens(p["x"], p["router"], p["bias"].float(), choose(2))
    assert routing.logits_NE.dtype == routing.weights_Nk.dtype == torch.float32
    torch.testing.assert_close(routing.logits_NE, p["x"].float() @ p["router"].float().T)
    assert ours(p, 2).dtype == torch.bfloat16


def test_router_z_loss_is_the_sum_of_squared_logsumexp_over_counted_tokens() -> None:
    p = parts()
    routing = route_tokens(p["x"], p["router"], p["bias"], choose(2))
    counts = torch.arange(N) % 3 > 0
    logits = p["x"].detach().double() @ p["router"].detach().double().T
    expected = sum(float(torch.log(torch.exp(row).sum())) ** 2 for row, count in zip(logits, counts) if count)
    assert float(routing.z_loss(counts)) == pytest.approx(expected, rel=1e-5)
    load = torch.zeros(E_)
    for row, count in zip(routing.experts_Nk.tolist(), counts):
        for expert in row:
            load[expert] += float(count)
    assert torch.equal(routing.count_tokens_per_expert(counts), load)


# -- in the model ------------------------------------------------------------------------------------------------------
EXPERTS = {"count": 4, "per_token": 2, "d_ff": 16, "shared": 1, "dense_layers": 1}


def make_model(dtype: torch.dtype = torch.float32, layers: int = 3) -> Decoder:
    model = Decoder(recipe_with(model__experts=EXPERTS, model__layers=layers).model, bind_ops({}, "cpu", dtype), dtype)
    model.initialise(seed=1)
    return model


def batch(padding: int = 0) -> dict[str, Tensor]:
    """Two rows of 32, the first with that many positions of padding at its end."""
    generator = torch.Generator().manual_seed(3)
    tokens, targets = (torch.randint(512, (2, 32), generator=generator) for _ in range(2))
    documents, weights = torch.zeros(2, 32, dtype=torch.int32), torch.ones(2, 32)
    if padding:
        documents[0, -padding:], weights[0, -padding:] = -1, 0.0
    return {
        "tokens_BT": tokens,
        "targets_BT": targets,
        "weights_BT": weights / weights.sum(),
        "positions_BT": torch.arange(32).repeat(2, 1),
        "documents_BT": documents,
    }


def test_padding_tokens_change_neither_the_loss_nor_the_load() -> None:
    model = make_model()
    full = batch(padding=12)
    loss, _, load = model.loss(**full, z_loss=0.0, router_z_share=0.01)
    other = full | {"tokens_BT": full["tokens_BT"].clone()}
    other["tokens_BT"][0, -12:] = 7  # what stands in the padding does not matter
    loss_too, _, load_too = model.loss(**other, z_loss=0.0, router_z_share=0.01)
    assert load is not None and load_too is not None
    assert torch.equal(load, load_too) and load.shape == (2, 4)
    torch.testing.assert_close(loss, loss_too)
    assert load.sum(1).tolist() == [2 * (64 - 12)] * 2  # per_token experts for each token that is one


def test_the_loss_includes_the_router_z_loss_of_every_expert_layer() -> None:
    model, data = make_model(), batch(padding=5)
    plain, _, _ = model.loss(**data, z_loss=0.0)
    with_z, _, _ = model.loss(**data, z_loss=0.0, router_z_share=0.25)
    inputs: list[Tensor] = []
    for block in list(model.blocks)[1:]:
        block.apply_experts = keep(block.apply_experts, inputs)  # type: ignore[assignment,arg-type]
    model.loss(**data, z_loss=0.0)
    z = 0.0
    for block, h_BTD in zip(list(model.blocks)[1:], inputs, strict=True):
        logits = h_BTD.double() @ block.router.double().T  # type: ignore[operator,union-attr]
        z += float((logits.exp().sum(-1).log() ** 2)[data["documents_BT"] >= 0].sum())
    assert float(with_z - plain) == pytest.approx(0.25 * z, rel=1e-4)


def keep(function: object, inputs: list[Tensor]) -> object:
    def kept(h_BTD: Tensor, documents_BT: Tensor) -> object:
        inputs.append(h_BTD.detach())
        return function(h_BTD, documents_BT)  # type: ignore[operator]

    return kept


@pytest.mark.long("forward and backward of a dense block and of one of experts are compiled, in two precisions")
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"])
def test_compiled_blocks_give_the_same_loss_and_gradients(dtype: torch.dtype, near: float) -> None:
    data = batch(padding=3)
    eager, compiled = make_model(dtype, layers=2), make_model(dtype, layers=2)
    compiled.compile()
    expected, _, load = eager.loss(**data, z_loss=1e-4, router_z_share=0.01)
    loss, _, load_too = compiled.loss(**data, z_loss=1e-4, router_z_share=0.01)
    torch.testing.assert_close(loss, expected, atol=near, rtol=near)
    assert load is not None and load_too is not None
    assert float((load - load_too).abs().sum()) <= (0 if dtype == torch.float32 else 4)  # near ties, rounded
    expected.backward()
    loss.backward()
    for (name, a), b in zip(eager.named_parameters(), compiled.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None, name
        assert float((a.grad - b.grad).norm()) <= 10 * near * float(a.grad.norm()), name


# -- balance -----------------------------------------------------------------------------------------------------------
def test_the_bias_moves_by_its_rate_towards_the_mean_load_and_not_in_a_skipped_step() -> None:
    bias = torch.tensor([0.5, 0.0, 0.0, -0.5])
    update_router_bias(bias, torch.tensor([9.0, 5.0, 1.0, 5.0]), 0.1, torch.tensor(0.0))
    torch.testing.assert_close(bias, torch.tensor([0.4, 0.0, 0.1, -0.5]))
    update_router_bias(bias, torch.tensor([9.0, 5.0, 1.0, float("nan")]), 0.1, torch.tensor(1.0))
    torch.testing.assert_close(bias, torch.tensor([0.4, 0.0, 0.1, -0.5]))


def test_a_bias_that_changes_no_choice_does_not_change_the_loss() -> None:
    model, data = make_model(), batch()
    loss, _, _ = model.loss(**data, z_loss=1e-4, router_z_share=0.01)
    with torch.no_grad():
        for _, bias in model.named_buffers():
            bias.add_(0.25)  # of all experts alike
    shifted, _, _ = model.loss(**data, z_loss=1e-4, router_z_share=0.01)
    assert torch.equal(loss, shifted)
    shifted.backward()
    assert not any(bias.requires_grad for _, bias in model.named_buffers())


def test_the_bias_evens_out_a_skewed_load() -> None:
    """MaxVio (the largest load over the mean, less one) of a router that prefers two experts of eight."""
    generator = torch.Generator().manual_seed(0)
    skew = torch.tensor([2.0, 1.5, 0.0, 0.0, 0.0, 0.0, -0.5, -1.0])
    router, bias = torch.randn(8, D, generator=generator) / D**0.5, torch.zeros(8)
    counts, skip = torch.ones(512, dtype=torch.bool), torch.tensor(0.0)
    imbalance = []
    for _ in range(300):
        x = torch.randn(512, D, generator=generator)
        x[:, 0] = 1.0
        biased = torch.cat((router[:, :1] + skew[:, None], router[:, 1:]), dim=1)
        routing = route_tokens(x, biased, bias, choose(2))
        load = routing.count_tokens_per_expert(counts)
        imbalance.append(float(load.max() / load.mean()) - 1)
        update_router_bias(bias, load, 5e-3, skip)
    first, last = sum(imbalance[:5]) / 5, sum(imbalance[-50:]) / 50
    assert first > 1.5 and last < 0.2, (first, last)


def test_training_evens_out_the_load_of_a_skewed_router() -> None:
    """Through the model's own loss and its own loads, with the weights held still."""
    model, data = make_model(), batch()
    biases = [bias for _, bias in model.named_buffers()]
    with torch.no_grad():
        for bias in biases:
            bias.copy_(torch.tensor([0.6, 0.3, -0.3, -0.6]))
    worst = []
    for _ in range(80):
        _, _, load = model.loss(**data, z_loss=0.0)
        assert load is not None
        worst.append(float((load.max(1).values / load.mean(1)).max()) - 1)
        for bias, load_E in zip(biases, load):
            update_router_bias(bias, load_E, 0.02, torch.tensor(0.0))
    assert worst[0] > 0.8 and max(worst[-10:]) < 0.35, worst


def test_the_loss_of_balance_is_that_of_transformers_for_each_row() -> None:
    """transformers sums the shares of the k choices; here they are shares of all choices. Padding counts for neither."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    generator = torch.Generator().manual_seed(3)
    x, router = torch.randn(3 * N, D, generator=generator), torch.randn(E_, D, generator=generator)
    holds = torch.ones(3, N, dtype=torch.bool)
    holds[1, N // 2 :] = False
    holds[2] = False  # a row without documents
    routing = route_tokens(x, router, None, choose(2, scores="softmax"))
    rows = [
        load_balancing_loss_func((logits,), E_, 2, attention_mask=mask[None].long())
        for logits, mask in zip(routing.logits_NE.view(3, N, E_)[:2], holds[:2], strict=True)
    ]
    assert float(routing.balance_loss(holds)) == pytest.approx(float(sum(rows)) / 2, rel=1e-5)
    even = route_tokens(torch.eye(E_).repeat(4, 1), 40 * torch.eye(E_), None, choose(1, scores="softmax"))
    assert float(even.balance_loss(torch.ones(1, 4 * E_, dtype=torch.bool))) == pytest.approx(1.0)
    one = route_tokens(torch.eye(E_)[:1].repeat(4, 1), 40 * torch.eye(E_), None, choose(1, scores="softmax"))
    assert float(one.balance_loss(torch.ones(1, 4, dtype=torch.bool))) == pytest.approx(E_)


def test_tokens_go_to_experts_of_their_best_groups_only() -> None:
    p = parts(4)
    routing = route_tokens(p["x"], p["router"], p["bias"], choose(2, groups=3, groups_per_token=1))
    wanted_Nge = (torch.sigmoid(p["x"] @ p["router"].T) + p["bias"]).unflatten(1, (3, 2))
    best_N = wanted_Nge.sum(-1).argmax(-1)  # groups of two: both of its experts count
    assert torch.equal(routing.experts_Nk.sort(-1).values, torch.stack((2 * best_N, 2 * best_N + 1), -1))
    assert len(best_N.unique()) == 3


def test_weights_are_scaled_after_they_are_normalised() -> None:
    p = parts(5)
    plain, scaled, raw = (
        route_tokens(p["x"], p["router"], p["bias"], choose(2, **changes)).weights_Nk
        for changes in ({}, {"scale": 2.5}, {"normalise": False})
    )
    torch.testing.assert_close(scaled.sum(-1), torch.full((N,), 2.5))
    torch.testing.assert_close(raw / raw.sum(-1, keepdim=True), plain)
    assert float(raw.max()) < 1
