"""``precision: auto`` is a pure choice from measured seconds. The probe that measures them is short on any machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.messages import refused
from tests.support.paths import ROOT
from tests.support.trainer.published import model_of
from tests.support.trainer.segments import MakeShard, plan_of, train_here, write_spec
from trainer.contract.errors import RecipeError, SpecError
from trainer.contract.plan.precision import (
    PrecisionTimings,
    TimedPart,
    _grown,
    choose_precision,
    choose_precision_from_timings,
    list_products,
    list_supported_precisions,
    make_timed_parts,
    refuse_unsupported_precision,
    replace_auto_precision,
    supports_fp8,
    time_precisions,
)
from trainer.contract.plan.spec import SegmentSpec
from trainer.contract.recipe import Recipe

CPU = torch.device("cpu")


def tiny(**changes: Any) -> Recipe:
    recipe = Recipe.load(ROOT / "policies" / "recipes" / "tiny.yaml")
    return Recipe.parse(recipe.model_dump() | changes)


def test_a_part_that_would_exceed_the_time_limit_is_not_timed() -> None:
    def never() -> None:
        raise AssertionError

    part = TimedPart(1e12, lambda share: (never, 1e9))
    assert _grown(part, guess=1e8, device=CPU, seconds=9.0) == 1e8  # it would take ten seconds: the guess is returned
    ran: list[float] = []
    assert _grown(TimedPart(1e9, lambda share: (lambda: ran.append(share), 1e9 * share)), 1e12, CPU, 0.01) != 1e12
    assert ran


@pytest.mark.parametrize(
    ("asked", "fp32", "bf16", "before", "chosen", "warned"),
    [
        ("auto", 1.0, 0.5, "", "bf16", False),
        ("auto", 1.0, 40.0, "", "fp32", False),
        ("auto", 1.0, 0.95, "", "fp32", False),  # too little to give up digits for
        ("auto", 1.0, 0.95, "bf16", "bf16", False),  # what began in a precision goes on in it
        ("auto", 1.0, 1.05, "bf16", "bf16", False),
        ("auto", 1.0, 0.5, "fp32", "bf16", False),  # another machine
        ("auto", 1.0, 30.0, "bf16", "fp32", False),
        ("fp32", 1.0, 0.9, "", "fp32", False),
        ("fp32", 1.0, 0.5, "bf16", "fp32", True),
        ("bf16", 1.0, 40.0, "", "bf16", True),
    ],
)
def test_the_chosen_precision_follows_from_the_measured_seconds(
    asked: str, fp32: float, bf16: float, before: str, chosen: str, warned: bool
) -> None:
    found = choose_precision_from_timings(asked, PrecisionTimings("cpu", {"fp32": fp32, "bf16": bf16}, {}), before)
    assert found.precision == chosen
    assert bool(found.warning) == warned
    if warned:
        assert asked in found.warning and "x as fast" in found.warning and "\n" not in found.warning


def test_probe_measures_every_part_in_every_precision_of_the_device() -> None:
    found = time_precisions(tiny(), CPU)
    assert set(found.seconds) == set(list_supported_precisions(CPU)) == {"fp32", "bf16"}
    for rates in found.rates.values():
        assert set(rates) == {"products", "attention", "loss head"} and min(rates.values()) > 0
    whole = {name: part.flops for name, part in make_timed_parts(tiny(), CPU, torch.float32).items()}
    threads = torch.get_num_threads()
    for name, seconds in found.seconds.items():
        assert seconds == pytest.approx(sum(whole[part] / found.rates[name][part] for part in whole) / threads)


def test_probe_leaves_random_numbers_and_threads_alone() -> None:
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    time_precisions(tiny(), CPU, seconds=0.1)
    assert torch.equal(state, torch.get_rng_state()) and torch.get_num_threads() == threads


def test_probe_of_a_large_model_computes_no_more_than_it_may() -> None:
    """The time is counted in this thread's own seconds. A recipe whose step takes minutes is measured by a share of its step."""
    large = {"vocab_size": 65536, "d_model": 4096, "layers": 40, "heads": 32, "kv_heads": 8, "head_dim": 128}
    recipe = tiny(model=tiny().model.model_dump() | large | {"d_ff": 14336, "context": 2048})
    began = time.thread_time()
    found = time_precisions(recipe, CPU, seconds=1.0)
    spent = time.thread_time() - began
    assert min(found.seconds.values()) > 10 * spent


def test_the_flops_of_the_timed_parts_sum_to_those_of_the_recipe() -> None:
    model = tiny().model
    tokens = tiny().tokens_per_step
    found = make_timed_parts(tiny(), CPU, torch.float32)
    assert found["products"].flops + found["loss head"].flops == 6.0 * tokens * model.matmul_parameter_count


def test_a_gpu_without_bf16_refuses_a_recipe_that_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GTX 1080")
    assert list_supported_precisions(torch.device("cuda")) == ("fp32",)
    with refused("plan.no_precision", RecipeError, name="'GTX 1080'", precision="bf16", other="fp32", auto="auto"):
        choose_precision(tiny(precision="bf16"), torch.device("cuda"))


@pytest.mark.parametrize(("capability", "has"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)])
def test_a_gpu_before_ada_refuses_fp8(capability: tuple[int, int], has: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    gpu, recipe = torch.device("cuda"), tiny(precision="fp8")
    assert supports_fp8(gpu) is has
    if has:
        refuse_unsupported_precision(recipe, gpu)
        return
    for refuses in (refuse_unsupported_precision, choose_precision):
        with refused("plan.no_precision", RecipeError, name="'A100'", precision="fp8", other="bf16") as found:
            refuses(recipe, gpu)
        assert found.value.data["needed"].code == "plan.fp8_gpu"
    refuse_unsupported_precision(tiny(precision="bf16"), gpu)


def test_fp8_is_measured_where_a_recipe_asks_for_it_and_never_chosen() -> None:
    assert supports_fp8(CPU) and "fp8" not in list_supported_precisions(CPU)
    found = choose_precision(tiny(precision="fp8"), CPU, before="bf16", seconds=0.3)
    assert found.precision == found.asked == "fp8"
    assert set(found.probe.rates["fp8"]) == {"products", "attention", "loss head"}
    assert set(choose_precision(tiny(precision="auto"), CPU, before="fp8", seconds=0.1).probe.seconds) == {
        "fp32",
        "bf16",
    }
    slow = PrecisionTimings("cuda", {"fp32": 3.0, "bf16": 1.0, "fp8": 1.5}, {})
    assert {**choose_precision_from_timings("fp8", slow).warning.data} == {
        "precision": "fp8",
        "fastest": "bf16",
        "ratio": 1.5,
        "auto": "auto",
    }


def test_a_run_in_fp8_is_refused_at_its_start_if_torch_lacks_fp8_products(
    tmp_path: Path, make_shard: MakeShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*arguments: Any, **keywords: Any) -> None:
        raise RuntimeError("not compiled with it")

    monkeypatch.setattr(torch, "_scaled_mm", missing)
    folder = write_spec(tmp_path / "segment", plan_of(make_shard()), tiny(precision="fp8"))
    code, said = train_here(folder)
    assert code == 2 and "error[plan.no_precision]" in said and "fp8" in said and "bf16" in said


def test_an_explicit_precision_is_not_measured() -> None:
    recipe = tiny(precision="bf16")
    assert replace_auto_precision(recipe, CPU) is recipe


def test_a_segments_spec_with_precision_auto_is_refused(tmp_path: Path, make_shard: MakeShard) -> None:
    folder = write_spec(tmp_path / "segment", plan_of(make_shard()), tiny(precision="auto"))
    with refused("strict.wrong_value", SpecError) as found:
        SegmentSpec.load(folder)
    assert found.value.data["problem"].code == "plan.auto_precision"


@pytest.mark.skipif("avx2" not in Path("/proc/cpuinfo").read_text(), reason="needs an x86 processor with AVX2")
def test_without_fast_bf16_the_demo_recipe_trains_in_fp32() -> None:
    words = [sys.executable, "-m", "trainer.contract.plan.precision", str(ROOT / "policies" / "recipes" / "demo.yaml")]
    emulated = os.environ | {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run(words, cwd=ROOT, env=emulated, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("demo: fp32\n") and "GFLOP/s" in done.stdout


@pytest.mark.parametrize("name", ["Llama 3 8B", "Gemma 2 2B", "DeepSeek-V3", "Qwen3-30B-A3B"])
def test_the_timed_products_of_a_layer_are_those_of_the_models_last_layer(name: str) -> None:
    """All layers, the head and the routers together have each weight that multiplies a token once."""
    model = model_of(name)
    of_last = sum(inputs * outputs for inputs, outputs in list_products(model))
    experts = model.experts
    router, dense = (model.d_model * experts.count, experts.dense_layers) if experts else (0, 0)
    other = model.attention_parameters_per_layer + 3 * model.d_model * model.d_ff
    head = model.vocab_size * model.d_model
    assert (model.layers - dense) * (of_last + router) + dense * other + head == model.matmul_parameter_count
