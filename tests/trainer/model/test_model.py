from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernels.contract.registry import bind_ops
from tests.support.trainer.families import FAMILIES, ODD
from tests.support.trainer.segments import recipe_with
from tests.support.trainer.small_models import make_model
from trainer.model.transformer import Decoder, make_rope_tables


def packed(lengths: list[int], seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """tokens, positions, documents of one row of documents of those lengths."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(512, (1, sum(lengths)), generator=generator)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    documents = torch.cat([torch.full((n,), i, dtype=torch.int32) for i, n in enumerate(lengths)])[None]
    return tokens, positions, documents


def test_logits_of_a_document_do_not_depend_on_its_neighbours() -> None:
    model = make_model()
    tokens, positions, documents = packed([9, 12, 11])
    together = model.logits(tokens, positions, documents)
    for start, stop in ((0, 9), (9, 21), (21, 32)):
        part = tokens[:, start:stop]
        alone = model.logits(part, torch.arange(stop - start)[None], torch.zeros_like(part, dtype=torch.int32))
        torch.testing.assert_close(together[:, start:stop], alone, atol=2e-6, rtol=1e-5)
    changed = tokens.clone()
    changed[:, :9] = 5  # another neighbour
    torch.testing.assert_close(
        model.logits(changed, positions, documents)[:, 9:], together[:, 9:], atol=2e-6, rtol=1e-5
    )


def test_no_token_sees_a_later_one() -> None:
    model = make_model()
    tokens, positions, documents = packed([32])
    before = model.logits(tokens, positions, documents)
    tokens[0, 20] = 7
    after = model.logits(tokens, positions, documents)
    torch.testing.assert_close(before[:, :20], after[:, :20], atol=2e-6, rtol=1e-5)
    assert not torch.allclose(before[:, 20:], after[:, 20:])


def test_loss_is_the_weighted_mean_of_torchs_cross_entropy() -> None:
    model = make_model()
    tokens, positions, documents = packed([10, 22])
    targets, weights = tokens.roll(-1), (torch.rand(1, 32) > 0.4).float()
    weights /= weights.sum()
    loss, nll, _ = model.loss(tokens, targets, weights, positions, documents, z_loss=1e-3)
    logits = model.logits(tokens, positions, documents)[0]
    expected = torch.nn.functional.cross_entropy(logits, targets[0], reduction="none")
    torch.testing.assert_close(nll[0], torch.where(weights[0] > 0, expected, 0.0))
    z = 1e-3 * (logits.logsumexp(-1) ** 2 * weights[0]).sum()
    torch.testing.assert_close(loss, (expected * weights[0]).sum() + z)


def test_a_seed_gives_one_model_and_residual_weights_scale_with_depth() -> None:
    deep = recipe_with(model__layers=8, model__d_model=128, model__d_ff=256)
    model = make_model(deep)
    for (name, a), b in zip(model.named_parameters(), make_model(deep).parameters(), strict=True):
        assert torch.equal(a, b), name
    block = model.blocks[3]
    assert float(block.q.detach().std()) == pytest.approx(128**-0.5, rel=0.05)
    assert float(block.down.detach().std()) == pytest.approx(256**-0.5 / math.sqrt(16), rel=0.05)
    assert float(model.embedding.detach().std()) == pytest.approx(0.02, rel=0.05)


def test_bf16_stays_near_fp32() -> None:
    args = packed([16, 16])
    exact, near = make_model().logits(*args), make_model(dtype=torch.bfloat16).logits(*args)
    assert near.dtype == torch.bfloat16
    assert float((exact - near.float()).detach().abs().max()) < 0.05 * float(exact.detach().abs().max())


NOPE = {"model__qk_norm": False, "model__nope_every": 2}


def test_a_layer_without_position_embedding_has_no_position_dependence() -> None:
    """Later positions, or ones in another order, change a layer with RoPE and leave one without as it is."""
    model = make_model(recipe_with(**NOPE, model__layers=4, model__context=128))
    assert [block.has_rope for block in model.blocks] == [True, False, True, False]
    tokens, positions, documents = packed([32])
    for other in (positions * 3 + 5, positions.flip(1)):
        x_BTD = torch.randn(1, 32, 32, generator=torch.Generator().manual_seed(0))
        for block in model.blocks:
            y, moved = (
                block(x_BTD, *make_rope_tables(p, model.shape, torch.float32), documents)[0] for p in (positions, other)
            )
            assert torch.equal(y, moved) is not block.has_rope
    # a causal layer without positions sees its earlier tokens as a set
    nope = model.blocks[1]
    x_BTD = torch.randn(1, 8, 32, generator=torch.Generator().manual_seed(1))
    order = torch.tensor([3, 0, 5, 1, 6, 2, 4, 7])
    tables = make_rope_tables(torch.arange(8)[None], model.shape, torch.float32)
    for block, same in ((nope, True), (model.blocks[0], False)):
        last, shuffled = (block(x, *tables, documents[:, :8])[0][:, -1] for x in (x_BTD, x_BTD[:, order]))
        assert torch.allclose(last, shuffled, atol=1e-5) is same


def test_across_documents_lets_tokens_see_the_earlier_documents_of_their_row() -> None:
    tokens, positions, documents = packed([9, 12, 11])
    padded = documents.clone()
    padded[:, 21:] = -1  # the last eleven hold nothing
    changed = tokens.clone()
    changed[:, :9] = 5
    for across in (False, True):
        model = make_model(recipe_with(model__across_documents=across))
        before, after = (model.logits(x, positions, padded) for x in (tokens, changed))
        assert torch.allclose(before[:, 9:21], after[:, 9:21], atol=2e-6, rtol=1e-5) is not across
        torch.testing.assert_close(before[:, 21:], after[:, 21:])  # padding is no document
        later = tokens.clone()
        later[:, 9:] = 5
        torch.testing.assert_close(model.logits(later, positions, padded)[:, :9], before[:, :9], atol=2e-6, rtol=1e-5)
        one_text = model.logits(tokens, torch.arange(32)[None], torch.zeros_like(documents))
        assert torch.allclose(model.logits(tokens, positions, documents), one_text, atol=2e-6, rtol=1e-5) is across


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_embedding_gradient_share_scales_the_input_embeddings_gradient_and_nothing_else(dtype: torch.dtype) -> None:
    tokens, positions, documents = packed([32])
    targets, weights = tokens.roll(-1), torch.full((1, 32), 1 / 32)
    gradients: dict[float, dict[str, Tensor]] = {}
    losses = []
    for share in (1.0, 0.5, 0.125, 1e-12):  # powers of two scale exactly
        model = Decoder(recipe_with().model, bind_ops({}, "cpu", dtype), dtype, embedding_grad_share=share)
        model.initialise(seed=1)
        loss, _, _ = model.loss(tokens, targets, weights, positions, documents, z_loss=0.0)
        loss.backward()
        losses.append(loss.detach())
        gradients[share] = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    head = gradients[1e-12]["embedding"]  # the embedding is the head too; that part is left alone
    whole = gradients[1.0]["embedding"] - head
    assert float(whole.norm()) > 0.1 * float(head.norm()) > 0
    for share in (0.5, 0.125):
        part = gradients[share]["embedding"] - head
        torch.testing.assert_close(part, share * whole, atol=1e-6, rtol=1e-4)
        for name in gradients[share].keys() - {"embedding"}:
            assert torch.equal(gradients[share][name], gradients[1.0][name]), name


def test_mup_scales_the_logits_by_the_ratio_of_the_widths() -> None:
    tokens, positions, documents = packed([32])
    plain, narrow = make_model(), make_model(recipe_with(model__base_d_model=8))
    torch.testing.assert_close(
        narrow.logits(tokens, positions, documents), plain.logits(tokens, positions, documents) * 8 / 32
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_models_parameter_counts_equal_those_of_its_recipe(family: str) -> None:
    recipe = recipe_with(**(ODD | FAMILIES[family][1]))
    model = make_model(recipe)
    assert sum(p.numel() for p in model.parameters()) == recipe.model.parameters
    experts = recipe.model.experts
    multiplied = 0
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:  # the embedding too: it is the head
            multiplied += parameter.numel()
        elif parameter.ndim == 3:
            assert experts is not None and name.split(".")[-1].startswith("experts_")
            multiplied += parameter[0].numel() * experts.per_token
    assert multiplied == recipe.model.matmul_parameter_count
