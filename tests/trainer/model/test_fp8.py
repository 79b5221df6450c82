"""Products in fp8 (``precision: fp8``): their errors, which tensors are in eight bits, and a model that learns with them."""

from __future__ import annotations

import math
import shutil
import statistics
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.trainer.segment_runs import records, result
from tests.support.trainer.segments import MakeShard, plan_of, recipe_with, train_here, write_spec
from tests.support.trainer.small_models import make_model
from trainer.contract.checkpoint import format as checkpoints
from trainer.model import fp8

EXPERTS = {"count": 4, "per_token": 2, "d_ff": 32, "dense_layers": 1, "shared": 1}
HALF_STEP = {fp8.FORWARD: 2.0**-4, fp8.GRADIENT: 2.0**-3}  # of a value: the most that rounding to the format moves it
BF16 = 2.0**-8


def drawn(*size: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def gradients(x: Tensor, matrices: list[Tensor], upstream: list[Tensor]) -> list[Tensor]:
    """y of each matrix, dx, and the gradient of each matrix."""
    leaves = [t.clone().requires_grad_() for t in (x, *matrices)]
    products = fp8.apply_several_fp8_linears(leaves[0], leaves[1:])
    return [*(y.detach() for y in products), *torch.autograd.grad(products, leaves, upstream)]


def test_products_and_gradients_are_within_the_formats_rounding() -> None:
    """Of each element, against fp64: |error| ≤ |a| |b| ((1 + u)(1 + v) - 1), and bf16's own. On the whole, of random values, 4 % and 6 %."""
    x, matrices = drawn(6, 32, 96), [drawn(64, 96, seed=1, scale=0.1), drawn(32, 96, seed=2, scale=0.1)]
    upstream = [drawn(6, 32, 64, seed=3, scale=1e-4), drawn(6, 32, 32, seed=4, scale=1e-4)]
    found = gradients(x, matrices, upstream)
    x64, m64, u64 = x.double(), [m.double() for m in matrices], [u.double() for u in upstream]
    exact = [x64 @ m.t() for m in m64]
    sizes = [x64.abs() @ m.abs().t() for m in m64]
    exact.append(sum(u @ m for u, m in zip(u64, m64)))
    sizes.append(sum(u.abs() @ m.abs() for u, m in zip(u64, m64)))
    for u in u64:
        exact.append(u.flatten(0, 1).t() @ x64.flatten(0, 1))
        sizes.append(u.abs().flatten(0, 1).t() @ x64.abs().flatten(0, 1))
    for number, (ours, truth, size) in enumerate(zip(found, exact, sizes, strict=True)):
        first = HALF_STEP[fp8.FORWARD if number < len(matrices) else fp8.GRADIENT]
        error = (ours.double() - truth).abs()
        assert bool((error <= size * ((1 + first) * (1 + HALF_STEP[fp8.FORWARD]) - 1 + 2 * BF16)).all()), number
        assert ours.dtype == torch.bfloat16
        assert 0.02 < error.norm() / truth.norm() < (0.045 if number < len(matrices) else 0.07), number


def test_a_scale_is_a_power_of_two_and_rounds_nothing() -> None:
    x = drawn(64, 64)
    for dtype in HALF_STEP:
        values, factor = fp8.quantise(x, dtype)
        assert math.frexp(float(factor))[0] == 0.5 and factor.dtype == torch.float32
        assert float(values.float().abs().max()) <= 2 * fp8.LARGEST[dtype] < torch.finfo(dtype).max
        for power in (-90, -7, 3, 90):
            again, other = fp8.quantise(x * 2.0**power, dtype)
            assert torch.equal(again.view(torch.uint8), values.view(torch.uint8)) and other == factor * 2.0**power
        error = (values.float() * factor - x.float()).abs()
        assert bool((error <= x.abs().float() * HALF_STEP[dtype]).all())


@pytest.mark.parametrize("value", [0.0, 1e-38, 1e-30, 3e38])
def test_values_of_any_magnitude_are_quantised_without_overflow(value: float) -> None:
    found, factor = fp8.quantise(torch.full((16, 16), value, dtype=torch.bfloat16), fp8.FORWARD)
    back = found.float() * factor
    assert bool(back.isfinite().all()) and float(back[0, 0]) == pytest.approx(value, rel=2.0**-4, abs=1e-37)


def test_zero_rows_stay_zero_and_non_finite_values_remain() -> None:
    x, matrices = drawn(32, 32), [drawn(16, 32, seed=1)]
    x[3] = 0
    upstream = [drawn(32, 16, seed=2)]
    upstream[0][5] = 0
    y, dx, dweight = gradients(x, matrices, upstream)
    assert not y[3].any() and not dx[5].any() and y.isfinite().all() and dweight.isfinite().all()
    for every in gradients(torch.zeros_like(x), matrices, [torch.zeros_like(upstream[0])]):
        assert not every.any()
    for bad in (float("inf"), float("nan")):
        sick = x.clone()
        sick[7, 7] = bad
        y, dx, dweight = gradients(sick, matrices, upstream)
        assert y.isnan().all() and dweight.isnan().all() and dx.isfinite().all()


def test_joining_matrices_or_splitting_rows_does_not_change_the_rounding_of_elements() -> None:
    """Therefore layouts and micro-batches differ only in the order of sums. (Elements near the lower end of the formats are left out.)"""
    away = lambda x: torch.where(x.abs() < 0.25, 0.25, x)
    x, matrices = away(drawn(64, 32)), [away(drawn(32, 32, seed=1)) / 16, away(drawn(16, 32, seed=2))]
    upstream = [away(drawn(64, 32, seed=3)), away(drawn(64, 16, seed=4)) * 2.0**-14]
    *apart, dx, one, two = gradients(x, matrices, upstream)
    joined, dx_joined, both = gradients(x, [torch.cat(matrices)], [torch.cat(upstream, 1)])
    assert torch.equal(torch.cat(apart, 1), joined)
    torch.testing.assert_close(dx, dx_joined, rtol=2e-2, atol=2e-2 * float(dx.abs().max()))
    assert torch.equal(torch.cat((one, two)), both)
    halves = [gradients(x[rows], matrices, [u[rows] for u in upstream]) for rows in (slice(32), slice(32, 64))]
    for number in range(2):
        assert torch.equal(torch.cat([half[number] for half in halves]), apart[number])
    summed, most = halves[0][3].float() + halves[1][3].float(), float(one.abs().max())
    torch.testing.assert_close(
        summed, one.float(), rtol=0, atol=2 * BF16 * most
    )  # each half's product is rounded to bf16


def test_the_operands_have_the_layout_that_a_gpu_requires() -> None:
    """torch checks tensors without values as it checks a GPU's: the first row-major, the second column-major, all sizes multiples of 16."""
    meta = lambda *size: torch.empty(size, dtype=torch.bfloat16, device="meta")
    found = gradients(meta(4, 32, 96), [meta(64, 96), meta(32, 96)], [meta(4, 32, 64), meta(4, 32, 32)])
    assert [(tuple(t.shape), t.dtype) for t in found] == [
        (size, torch.bfloat16) for size in ((4, 32, 64), (4, 32, 32), (4, 32, 96), (64, 96), (32, 96))
    ]
    one = torch.empty((), device="meta")
    a, b = (torch.empty(32, 32, dtype=fp8.FORWARD, device="meta") for _ in range(2))
    with pytest.raises(RuntimeError, match="col_major"):
        torch._scaled_mm(a, b, one, one)
    with pytest.raises(RuntimeError, match="divisible by 16"):
        fp8.apply_several_fp8_linears(meta(16, 40), [meta(16, 40)])


@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        pytest.param("inductor", marks=pytest.mark.long("g++ takes half a minute, as for the compiled blocks below")),
    ],
)
def test_fp8_products_compile_to_one_graph_with_the_same_results(backend: str) -> None:
    count = 1 if backend == "inductor" else 2  # g++ takes some seconds for each one's kernels
    x, matrices = drawn(32, 32), [drawn(16, 32, seed=1), drawn(48, 32, seed=2)][:count]
    upstream = [drawn(32, 16, seed=3), drawn(32, 48, seed=4)][:count]
    expected = gradients(x, matrices, upstream)
    compiled = torch.compile(fp8.apply_several_fp8_linears, fullgraph=True, dynamic=False, backend=backend)
    leaves = [t.clone().requires_grad_() for t in (x, *matrices)]
    products = compiled(leaves[0], leaves[1:])
    found = [*products, *torch.autograd.grad(products, leaves, upstream)]
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


def rows() -> tuple[Tensor, Tensor, Tensor]:
    """tokens, positions, documents of two rows."""
    tokens = torch.randint(512, (2, 32), generator=torch.Generator().manual_seed(0))
    return tokens, torch.arange(32).expand(2, 32), torch.zeros(2, 32, dtype=torch.int32)


def test_only_the_layers_products_are_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[list[tuple[int, ...]]] = []
    products = fp8.apply_several_fp8_linears
    monkeypatch.setattr(
        fp8, "apply_several_fp8_linears", lambda x, m: taken.append([tuple(w.shape) for w in m]) or products(x, m)
    )
    model = make_model(recipe_with(model__experts=EXPERTS), torch.bfloat16)
    model.logits(*rows())
    assert taken == []
    model.use_fp8()
    attention = [[(64, 32), (32, 32), (32, 32)], [(32, 64)]]
    dense, shared = [[(64, 32), (64, 32)], [(32, 64)]], [[(32, 32), (32, 32)], [(32, 32)]]
    model.logits(*rows())
    assert taken == [*attention, *dense, *attention, *shared], "no router, no routed expert, no head"
    taken.clear()
    model.join_matrices()
    model.logits(*rows())
    attention, dense, shared = [[(128, 32)], [(32, 64)]], [[(128, 32)], [(32, 64)]], [[(64, 32)], [(32, 32)]]
    assert taken == [*attention, *dense, *attention, *shared]


@torch.no_grad()
def test_a_model_in_fp8_is_near_the_one_in_bf16() -> None:
    model = make_model(dtype=torch.bfloat16)
    before = model.logits(*rows())
    model.use_fp8()
    near = model.logits(*rows())
    model.join_matrices()
    joined = model.logits(*rows())
    assert 0.01 < float((near - before).norm() / before.norm()) < 0.2  # eight products in turn, 4 % each
    assert float((joined - near).norm() / near.norm()) < 0.01


def learned(folder: Path) -> list[float]:
    return [line["loss"] for line in records(folder)]


@pytest.mark.slow("three segments of 100 steps")
def test_a_model_learns_in_fp8_as_in_bf16(tmp_path: Path, make_shard: MakeShard) -> None:
    plan = plan_of(make_shard(counts={"code": 900, "docs": 400, "chat": 400}), max_epochs=16)
    curves = {}
    for precision in ("fp32", "bf16", "fp8"):
        recipe = recipe_with(precision=precision, schedule__trunk_steps={"first": 100, "later": 10})
        folder = write_spec(tmp_path / precision, plan, recipe, last_step=100)
        assert train_here(folder) == (0, "")
        curves[precision] = learned(folder)
    apart = {
        name: statistics.fmean(abs(a - b) for a, b in zip(curves[name], curves["fp32"], strict=True))
        for name in ("bf16", "fp8")
    }
    fell = curves["fp32"][0] - statistics.fmean(curves["fp32"][-20:])
    ends = {name: statistics.fmean(curve[-20:]) for name, curve in curves.items()}
    assert curves["fp8"] != curves["bf16"]
    assert apart["fp8"] < 0.01 * fell and abs(ends["fp8"] - ends["bf16"]) < 0.01 * fell


@pytest.mark.long(
    "a segment whose blocks are compiled by g++, and one whose blocks are not; the eager compiler's are in the fast tier"
)
def test_training_in_fp8_is_the_same_with_compiled_and_recomputed_blocks(tmp_path: Path, make_shard: MakeShard) -> None:
    plan = plan_of(make_shard())
    changes = {"compile": True, "parallel__recompute": "block", "stability__noise_scale_every": 0}
    folders = {}
    for name, some in {"plain": {}, "compiled": changes}.items():
        recipe = recipe_with(precision="fp8", **some)
        folders[name] = write_spec(tmp_path / name, plan, recipe, last_step=8)
        assert train_here(folders[name])[0] == 0
    assert learned(folders["compiled"]) == pytest.approx(learned(folders["plain"]), abs=0.01)


def test_a_resumed_run_continues_bit_for_bit(tmp_path: Path, make_shard: MakeShard) -> None:
    plan = plan_of(make_shard())
    recipe = recipe_with(precision="fp8", keep_checkpoints=4)
    straight = write_spec(tmp_path / "straight", plan, recipe, last_step=12)
    assert train_here(straight) == (0, "")
    resumed = tmp_path / "resumed"
    shutil.copytree(straight, resumed)
    (resumed / "result.json").unlink()
    for step in (10, 12):
        shutil.rmtree(resumed / "checkpoints" / checkpoints.format_checkpoint_name(step))
    assert train_here(resumed) == (0, "")
    ours, theirs = (checkpoints.load_checkpoint(Path(result(folder)["checkpoint"])) for folder in (resumed, straight))
    assert ours.state["step"] == 12 and learned(resumed) == learned(straight)
    assert all(torch.equal(tensor, theirs.model[name]) for name, tensor in ours.model.items())
