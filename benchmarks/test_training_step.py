"""The trainer's step beside that of ``transformers``: same architecture, batch, precision and optimiser, in turn.

``python -m pytest benchmarks/test_training_step.py -s``. Prints tokens/s of both, the ratio, MFU against the measured
matmul rate. transformers gets the better of
eager and compiled, packs nothing, masks nothing (plain causal attention, its fastest path), and has no z-loss.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from kernels.host_memory import keep_freed_memory
from kernels.registry import bind, load_choice
from trainer.export import hf_config
from trainer.metrics import matmul_rate
from trainer.model import Decoder
from trainer.optimizer import Optimizer, grad_norm
from trainer.recipe import Recipe
from trainer.stability import clip_and_skip

ROOT = Path(__file__).parents[1]
ROUNDS = 5
Step = Callable[[], Any]


def ours(recipe: Recipe, batch: dict[str, torch.Tensor]) -> Step:
    dtype = torch.bfloat16
    ops = bind(load_choice(ROOT / "policies" / "kernels.yaml", "cpu"), "cpu", dtype)
    model = Decoder(recipe.model, ops, dtype)
    model.initialise(1)
    optimizer = Optimizer(model, recipe.optimizer)
    model.compile()

    def step() -> None:
        loss, _ = model.loss(**batch, z_loss=recipe.stability.z_loss)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = grad_norm(optimizer.gradients())
        optimizer.step(1e-3, *clip_and_skip(loss.detach(), norm, 1.0, 1e9))
        optimizer.zero_grad()

    return step


def theirs(recipe: Recipe, batch: dict[str, torch.Tensor], compiled: bool) -> Step:
    torch.manual_seed(1)
    model = Qwen3ForCausalLM(Qwen3Config(**hf_config(recipe.model, "float32"), attn_implementation="sdpa"))
    run = torch.compile(model) if compiled else model
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = run(input_ids=batch["tokens_BT"], labels=batch["tokens_BT"], use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad(set_to_none=True)

    return step


def make_inputs(recipe: Recipe) -> dict[str, torch.Tensor]:
    """Two documents a row; random tokens, because the time does not depend on them."""
    B, T = recipe.batch.sequences, recipe.model.context
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(recipe.model.vocab_size, (B, T + 1), generator=generator)
    half = torch.arange(T) % (T // 2)
    return {
        "tokens_BT": tokens[:, :-1].contiguous(),
        "targets_BT": tokens[:, 1:].contiguous(),
        "weights_BT": torch.full((B, T), 1 / (B * T)),
        "positions_BT": half.expand(B, T).contiguous(),
        "documents_BT": (torch.arange(T) // (T // 2)).int().expand(B, T).contiguous(),
    }


def test_training_step_beside_transformers() -> None:
    keep_freed_memory()
    recipe = Recipe.load(ROOT / "policies" / "recipes" / "demo.yaml")
    batch = make_inputs(recipe)
    steps = {
        "ours": ours(recipe, batch),
        "transformers eager": theirs(recipe, batch, False),
        "transformers compiled": theirs(recipe, batch, True),
    }
    for step in steps.values():
        step()
        step()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():  # in turn, so that what disturbs the machine disturbs all
            start = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - start)
    rates = {name: recipe.tokens_per_step / statistics.median(taken) for name, taken in seconds.items()}
    best = max((name for name in steps if name != "ours"), key=lambda name: rates[name])
    rate = matmul_rate(torch.device("cpu"), torch.bfloat16)
    size = f"{recipe.model.parameters / 1e6:.1f} M parameters"
    print(f"\n{recipe.name}: {size}, {recipe.tokens_per_step} tokens a step, bf16")
    for name, tokens in rates.items():
        mfu = tokens * recipe.model.flops_per_token() / rate
        print(f"{name:<22} {tokens:9.0f} tokens/s   MFU {mfu:6.1%} of {rate / 1e9:.0f} GFLOP/s")
    print(
        f"ratio to {best}: {rates['ours'] / rates[best]:.2f}   process: {psutil.Process().memory_info().rss >> 20} MiB"
    )
    assert rates["ours"] > rates[best]
