"""Does the best rate of a narrow model serve a wide one? Loss by width and rate, with and without ``model.base_d_model``.

``python -m pytest benchmarks/training/test_width_transfer.py -s``. Two widths of the real decoder under the real optimiser learn
a stream that they never see twice: a chain in which two tokens decide the next one's distribution. The narrow model is
the base, so that it is the same with the dial and without. Asserted is that with the dial the wide model's best rate is
within a factor of two of the narrow one's; what happens without it is printed.
"""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.support.best_here import ROOT
from kernels.contract.registry import bind_ops
from trainer.contract.recipe import Recipe
from trainer.model.transformer import Decoder
from trainer.monitor.stability import decide_clip_and_skip
from trainer.optim.optimizer import Optimizer, compute_sums_of_squares

NARROW, WIDE = 64, 256
STEPS, WARM_UP = 160, 16
VOCABULARY, ROWS, CONTEXT = 128, 16, 32
HELD_OUT = 64  # rows
RATES = {"adamw": [2.0**-i for i in range(5, 10)], "muon": [2.0**-i for i in range(4, 9)]}


def chain(rows: int, seed: int) -> Tensor:
    """[rows, CONTEXT + 1]: the sum of two tokens' own vectors decides the logits of the next."""
    table = np.random.default_rng(0)
    one, two = (table.normal(size=(VOCABULARY, VOCABULARY)) * 2.0 for _ in range(2))
    chance = np.random.default_rng(seed)
    tokens = chance.integers(VOCABULARY, size=(rows, CONTEXT + 1))
    for t in range(2, CONTEXT + 1):
        logits = one[tokens[:, t - 1]] + two[tokens[:, t - 2]] + chance.gumbel(size=(rows, VOCABULARY))
        tokens[:, t] = logits.argmax(1)
    return torch.from_numpy(tokens)


def recipe_of(width: int, base: int | None, name: str, rate: float) -> Recipe:
    raw: dict[str, Any] = Recipe.load(ROOT / "policies" / "recipes" / "tiny.yaml").model_dump()
    raw["model"] |= {
        "vocab_size": VOCABULARY,
        "d_model": width,
        "heads": width // 16,
        "kv_heads": width // 16,
        "d_ff": 2 * width,
        "context": CONTEXT,
        "base_d_model": base,
    }
    raw["optimizer"] |= {"name": name, "lr": rate}
    return Recipe.parse(raw)


def loss_of(model: Decoder, tokens: Tensor) -> Tensor:
    B, T = tokens.shape[0], CONTEXT
    loss, _, _ = model.loss(
        tokens[:, :-1],
        tokens[:, 1:],
        torch.full((B, T), 1 / (B * T)),
        torch.arange(T).expand(B, T),
        torch.zeros(B, T, dtype=torch.int32),
        z_loss=0.0,
    )
    return loss


def trained_loss(recipe: Recipe, batches: list[Tensor], held_out: Tensor) -> float:
    """On held-out rows after a warm-up and a linear decay to zero."""
    model = Decoder(recipe.model, bind_ops({}, "cpu", torch.float32), torch.float32)
    model.initialise(recipe.seed)
    optimizer = Optimizer(model, recipe.optimizer, recipe.model.mup_width_ratio)
    for step, tokens in enumerate(batches):
        loss = loss_of(model, tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        rate = recipe.optimizer.lr * min((step + 1) / WARM_UP, (STEPS - step) / (STEPS - WARM_UP))
        norm = compute_sums_of_squares(optimizer.gradients()).sum().sqrt()
        optimizer.step(rate, *decide_clip_and_skip(loss.detach(), norm, recipe.stability.grad_clip, math.inf))
        optimizer.zero_grad()
    with torch.no_grad():
        return float(loss_of(model, held_out))


def best_rate(losses: dict[float, float]) -> float:
    """The lowest point of the parabola through the best rate and its neighbours, in log rate; no end may be the best."""
    rates = sorted(losses)
    at = min(range(len(rates)), key=lambda i: losses[rates[i]])
    assert 0 < at < len(rates) - 1, f"the best rate, {rates[at]}, is an end of the grid"
    left, here, right = (losses[rates[i]] for i in (at - 1, at, at + 1))
    return rates[at] * 2.0 ** (0.5 * (left - right) / (left - 2 * here + right))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_best_rate_stays_where_it_is_as_the_width_grows(name: str) -> None:
    began = time.perf_counter()
    batches, held_out = [chain(ROWS, seed) for seed in range(1, STEPS + 1)], chain(HELD_OUT, 10**6)
    models = {"narrow": (NARROW, None), "wide, dial": (WIDE, NARROW), "wide, none": (WIDE, None)}
    losses = {
        model: {rate: trained_loss(recipe_of(width, base, name, rate), batches, held_out) for rate in RATES[name]}
        for model, (width, base) in models.items()
    }
    print(f"\n{name}, widths {NARROW} and {WIDE}, {STEPS} steps: {time.perf_counter() - began:.0f} s")
    print(f"{'rate':<12}" + "".join(f"{rate:9.5f}" for rate in RATES[name]) + "   best rate")
    found = {model: best_rate(by_rate) for model, by_rate in losses.items() if model != "wide, none"}
    found["wide, none"] = min(losses["wide, none"], key=lambda rate: losses["wide, none"][rate])
    for model, by_rate in losses.items():
        print(f"{model:<12}" + "".join(f"{loss:9.4f}" for loss in by_rate.values()) + f"   {found[model]:.5f}")
    print(
        f"best rate of the wide model, as a share of the narrow one's: {found['wide, dial'] / found['narrow']:.2f} with "
        f"the dial, {found['wide, none'] / found['narrow']:.2f} without"
    )
    at = min(RATES[name], key=lambda rate: losses["narrow"][rate])
    print(
        f"at the narrow model's best of the grid, {at:.5f}: " + "  ".join(f"{m} {v[at]:.4f}" for m, v in losses.items())
    )
    assert 0.5 <= found["wide, dial"] / found["narrow"] <= 2.0
