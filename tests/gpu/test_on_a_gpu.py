"""``pytest -m gpu``: what ``python -m benchmarks.gpu`` reports, as promises. The same functions, held to ``benchmarks.gpu.aims``.

One file and one process: a kernel that poisons the device fails all that follows it. The script, which isolates each, then says which.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import aims, fast, right, shapes, step, timing
from benchmarks.gpu.models import MODELS
from benchmarks.gpu.parts import Settings
from benchmarks.gpu.rivals import rivals
from benchmarks.support.waits import waits
from kernels.contract.op import Op
from kernels.contract.precision import allow_bf16_matmul
from kernels.contract.registry import OPS
from trainer.contract.plan.gpus import find_gpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
CUDA = "cuda"
IMPLEMENTATIONS = [pytest.param(op, i.name, id=f"{op.name}-{i.name}") for op, i in right.on_cuda()]


@pytest.mark.parametrize(("op", "implementation"), IMPLEMENTATIONS)
def test_an_implementation_computes_correctly_on_the_gpu(op: Op, implementation: str) -> None:
    found = right.verdict(op, implementation, CUDA)
    assert not found.wrong, "\n".join(f"{what}: {why}" for what, why in found.wrong)
    assert found.right


@pytest.fixture(scope="module")
def settings() -> Settings:
    """The settings of the benchmarks, with the measured peaks of this GPU."""
    copy = timing.copy_rate(CUDA, 1 << 30)
    product = timing.product_rate(CUDA, 8192, 20)
    return Settings(CUDA, free=float(torch.cuda.mem_get_info()[0]), copy_rate=copy, product_rate=product)


@pytest.mark.parametrize("name", aims.SHARES)
def test_the_fastest_registered_implementation_reaches_its_share_of_the_gpus_peak(
    settings: Settings, name: str
) -> None:
    """A recipe can choose every registered implementation, and torch's own kernel is one of them."""
    op = OPS[name]
    number = [width.d_model for width in shapes.WIDTHS].index(aims.AIM_WIDTH)
    shape = shapes.shape_for(op, number, fast.free_bytes(settings))
    shares = {}
    with allow_bf16_matmul(shapes.dtype_of(op)):
        for rival in rivals(op, CUDA):
            if rival.name in op.implementations or rival.name == "torch.compile":
                shares[rival.name] = fast.timed(rival, op, shape, settings).share or 0.0
    print(name, {key: f"{share:.0%}" for key, share in shares.items()})
    assert max(shares.values()) >= aims.SHARES[name], shares


@pytest.fixture(scope="module")
def one_billion(tmp_path_factory: pytest.TempPathFactory) -> step.Stepper:
    made = step.stepper(MODELS["1b"].recipe("1b", "bf16"), tmp_path_factory.mktemp("1b"))
    for _ in range(step.WARM_UP):
        made.step()
    return made


def test_a_step_waits_for_the_gpu_only_once(one_billion: step.Stepper) -> None:
    waiting = waits(one_billion.step)
    assert len(waiting) <= aims.HOST_WAITS, waiting


def test_a_step_of_one_billion_parameters_reaches_its_mfu(one_billion: step.Stepper) -> None:
    card = torch.cuda.get_device_name()
    gpu, aim = find_gpu(card), aims.mfu_aim("1b", card)
    if gpu is None or aim is None:
        pytest.skip(f"no data sheet of {card} is known")
    recipe = one_billion.recipe
    seconds = statistics.median(step.seconds_of(one_billion.step, CUDA, step.TIMES, at_once=step.AT_ONCE))
    mfu = recipe.tokens_per_step / seconds * recipe.model.count_flops_per_token() / gpu.peak_flops
    print(f"{recipe.tokens_per_step / seconds:,.0f} tokens/s, MFU {mfu:.1%}")
    assert mfu >= aim


def test_a_run_continues_after_sigkill(tmp_path: Path) -> None:
    """``benchmarks.gpu`` reports the distance of the two runs. This test checks that the resumed run ends, and near the other."""
    from benchmarks.gpu import chain

    recipe = chain.small_recipe(Settings(CUDA))
    whole, killed = (
        chain.segment(tmp_path / name, recipe, tmp_path / "shards", chain.STEPS) for name in ("whole", "killed")
    )
    chain.trained(whole, 300)
    chain.killed_and_resumed(killed, 300)
    assert chain.distance(killed, whole)[2] < 0.05
