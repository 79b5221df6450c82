from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernels.registry import bind
from tests.trainer.conftest import recipe_with
from trainer.model import Decoder
from trainer.recipe import Recipe


def make_model(recipe: Recipe | None = None, dtype: torch.dtype = torch.float32) -> Decoder:
    model = Decoder((recipe or recipe_with()).model, bind({}, "cpu", dtype), dtype)
    model.initialise(seed=1)
    return model


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


def test_a_seed_gives_one_model_and_depth_scales_what_writes_to_the_residual() -> None:
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


def test_parameter_count_is_what_the_recipe_says() -> None:
    recipe = recipe_with()
    assert sum(p.numel() for p in make_model(recipe).parameters()) == recipe.model.parameters
