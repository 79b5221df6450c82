"""The trainer's step compared with that of ``transformers``: same architecture, batch, data, precision, optimiser; they alternate.

``python -m pytest benchmarks/training/test_training_step.py -s``. Prints tokens/s of both, the ratio, model FLOP/s beside the
measured matmul rate and (on a GPU) MFU by its data sheet, and the peak memory of each in a process of its own. Ours runs what
``kernels.contract.tune`` chooses here; all run in the precision that is fastest here. transformers gets the better of eager and compiled,
the batches ready made, plain causal attention over whole rows (its fastest path), and no z-loss; ours reads its batches,
masks documents from one another, and writes every metric of a step.

On an NVIDIA GPU the same file runs a model of the 1 B class, against torch.compile and (if it is installed) Liger.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from agents.line_profiler.workload import make_segment_run
from benchmarks.support.best_here import CUDA, PRECISION, ROOT, demo_recipe, tuned_kernels
from benchmarks.support.memory import printed_by, resident, restart_peak
from kernels.contract.host_memory import keep_freed_memory, release_freed_memory
from kernels.contract.machine import describe_this_machine
from kernels.contract.precision import allow_bf16_matmul
from trainer.batch import Batch, make_batch, prefetch_batches
from trainer.contract.checkpoint.export import make_hf_config
from trainer.contract.plan.precision import DTYPES
from trainer.contract.plan.rates import look_up_data_sheet_flops, measure_matmul_rate
from trainer.contract.recipe import Recipe

KERNELS = ROOT / "policies" / "kernels.yaml"
ROUNDS = 9
WARM_UP = 3
AIM = 1.25 if PRECISION == "bf16" else 1.0  # of the best of transformers' steps, in this machine's best precision
Step = Callable[[], Any]

ONE_BILLION = {
    "vocab_size": 32768,
    "d_model": 2048,
    "layers": 16,
    "heads": 16,
    "kv_heads": 8,
    "head_dim": 128,
    "d_ff": 8192,
    "context": 4096,
}


def recipe_here() -> Recipe:
    """The demo's; on a GPU a model of the 1 B class."""
    recipe = demo_recipe()
    if not CUDA:
        return recipe
    raw = recipe.model_dump() | {"name": "one-billion", "model": recipe.model.model_dump() | ONE_BILLION}
    return Recipe.parse(raw | {"batch": {"sequences": 4}})


def ours(recipe: Recipe, folder: Path) -> Step:
    steps = 200
    run = make_segment_run(recipe, tuned_kernels(recipe), folder, steps=steps, compile=True)
    batches = prefetch_batches(run.order, steps)

    def step() -> None:
        with allow_bf16_matmul(DTYPES[recipe.precision]):
            run.train_step(next(batches).to(run.ranks.device))

    for _ in range(
        recipe.stability.noise_scale_every
    ):  # the last is split for the noise scale: its shapes are compiled too
        step()
    return step


def theirs(recipe: Recipe, batches: list[Batch], how: str) -> Step:
    """``how``: eager · compiled · liger, the last with compiled blocks as well."""
    device = torch.device("cuda" if CUDA else "cpu")
    torch.manual_seed(1)
    if how == "liger":
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3

        apply_liger_kernel_to_qwen3()
    model = Qwen3ForCausalLM(Qwen3Config(**make_hf_config(recipe.model, "float32"), attn_implementation="sdpa")).to(
        device
    )
    run = torch.compile(model) if how == "compiled" else model
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)
    inputs = []
    for batch in batches:
        labels = torch.where(batch.weights_BT > 0, batch.tokens_BT, -100)
        inputs.append((batch.tokens_BT.to(device), labels.to(device)))
    turn = iter(range(1 << 30))

    def step() -> float:
        tokens, labels = inputs[next(turn) % len(inputs)]
        with torch.autocast(device.type, torch.bfloat16, enabled=recipe.precision == "bf16"):
            loss = run(input_ids=tokens, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def make_step(name: str, recipe: Recipe, folder: Path) -> Step:
    if name == "ours":
        return ours(recipe, folder)
    order = make_segment_run(recipe, KERNELS, folder, steps=8, compile=False).order
    return theirs(recipe, [make_batch(order) for _ in range(8)], name)


def rivals() -> list[str]:
    try:
        import liger_kernel  # noqa: F401
    except ImportError:
        return ["eager", "compiled"]
    return ["eager", "compiled", *(["liger"] if CUDA else [])]


def peak_memory(name: str) -> int:
    """Bytes that building a step and running it takes at its peak beyond what was there before, in a fresh process."""
    script = f"from benchmarks.training.test_training_step import print_peak_memory; print_peak_memory({name!r})"
    return printed_by(script)


def print_peak_memory(name: str) -> None:
    recipe = recipe_here()
    if name == "ours":
        keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        before = resident("VmRSS")
        step = make_step(name, recipe, Path(folder))
        for _ in range(WARM_UP):
            step()
        if CUDA:
            torch.cuda.reset_peak_memory_stats()
        else:  # what compiling took is left out: of both, as the trainer does after its first step
            release_freed_memory()
            restart_peak()
        for _ in range(WARM_UP):
            step()
        print(torch.cuda.max_memory_allocated() if CUDA else resident("VmHWM") - before)


def utilisation(recipe: Recipe, device: torch.device, tokens_per_s: float) -> str:
    """Model FLOP/s, as shares of the data sheet's peak (MFU) and of what products alone reach here, where each is known."""
    flops, dtype = tokens_per_s * recipe.model.count_flops_per_token(), DTYPES[recipe.precision]
    peak, products = look_up_data_sheet_flops(device, dtype), measure_matmul_rate(device, dtype)
    mfu = f"MFU {flops / peak:.1%} of {peak / 1e12:.0f} TFLOP/s, " if peak else ""
    return f"{flops / 1e9:,.0f} GFLOP/s, {mfu}{flops / products:.1%} of the products' {products / 1e9:,.0f} GFLOP/s"


def test_training_step_compared_with_transformers(tmp_path: Path) -> None:
    keep_freed_memory()
    recipe = recipe_here()
    names = ["ours", *rivals()]
    steps = {name: make_step(name, recipe, tmp_path / name) for name in names}
    for step in steps.values():
        for _ in range(WARM_UP):
            step()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(ROUNDS):
        for name, step in steps.items():  # alternating, so that what disturbs the machine disturbs all
            start = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - start)
    rates = {name: recipe.tokens_per_step / statistics.median(taken) for name, taken in seconds.items()}
    best = max(names[1:], key=lambda name: rates[name])
    device = torch.device("cuda" if CUDA else "cpu")
    memory = {name: peak_memory(name) for name in ("ours", best)}
    size = f"{recipe.model.parameters / 1e6:.1f} M parameters"
    print(
        f"\n{recipe.name}: {size}, {recipe.tokens_per_step} tokens a step, {recipe.precision}, {describe_this_machine()}"
    )
    for name, tokens in rates.items():
        peak = f"   {memory[name] >> 20} MiB" if name in memory else ""
        label = name if name == "ours" else f"transformers {name}"
        print(f"{label:<22} {tokens:9.0f} tokens/s   {utilisation(recipe, device, tokens)}{peak}")
    pairs = sorted(b / a for a, b in zip(seconds["ours"], seconds[best]))
    print(f"ratio to {best}: {rates['ours'] / rates[best]:.2f} (rounds {pairs[0]:.2f} to {pairs[-1]:.2f})")
    assert rates["ours"] >= AIM * rates[best]
    assert memory["ours"] <= memory[best]
