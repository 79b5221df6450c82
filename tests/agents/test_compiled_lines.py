"""A compiled step is profiled as it runs, and its generated kernels count for the lines that they compute."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from agents.line_profiler import session
from agents.line_profiler.capture import Line, RecordedOperation, describe_arguments
from agents.line_profiler.compiled import (
    BETWEEN,
    UNNAMED,
    CompiledGraphs,
    divide_among_lines,
    separate_calls,
)
from agents.line_profiler.lines import PeakRates
from agents.line_profiler.machine import read_machine_facts
from agents.line_profiler.profile_schema import Profile
from agents.line_profiler.session import measure_profile
from agents.line_profiler.signature import make_operation_signature
from agents.line_profiler.stopwatch import TimedOperation, keep_fastest_times, measure_least_overhead
from tests.support.paths import ROOT
from trainer.contract.recipe import Recipe

PRODUCT: Line = ("trainer/model/block.py", 1, "")
NORM: Line = ("kernels/rms_norm/__init__.py", 2, "rms_norm")
GATE: Line = ("kernels/swiglu/__init__.py", 3, "swiglu")
MM = make_operation_signature(torch.ops.aten.mm.default, (torch.ones(2, 2), torch.ones(2, 2)), {})


def _event(line: Line, operation: str, seconds: float, **more: object) -> RecordedOperation:
    made = RecordedOperation(line, "", False, operation, seconds, 0.0, 0.0, 8.0, (), (), None)
    return replace(made, **more)  # type: ignore[arg-type]


EAGER = [
    _event(PRODUCT, "aten.mm.default", 9.0, signature=MM),
    _event(PRODUCT, "aten._to_copy.default", 1.0),
    _event(NORM, "aten.mul.Tensor", 3.0),
    _event(GATE, "aten.silu.default", 2.0),
]


def test_a_fused_kernels_time_is_divided_by_the_eager_time_of_what_it_fuses() -> None:
    """The product is called as an operation of its own, so its eager time is no part of the fused kernel's weights."""
    among = (PRODUCT, NORM)
    events = [
        _event(PRODUCT, "aten.mm.out", 5.0, signature=MM, among=(PRODUCT, GATE), graph=1),
        _event(PRODUCT, "cpp_fused_0", 4.0, among=among, graph=1),
        _event(NORM, "aten.pow.Tensor_Scalar", 0.5),
    ]
    found = [(event.line, event.seconds, event.bytes) for event in divide_among_lines(events, EAGER)]
    assert found == [(PRODUCT, 5.0, 8.0), (PRODUCT, 1.0, 2.0), (NORM, 3.0, 6.0), (NORM, 0.5, 8.0)]


def test_a_kernel_whose_lines_took_no_eager_time_is_divided_evenly() -> None:
    other: Line = ("trainer/run.py", 9, "")
    events = [_event(other, "cpp_fused_0", 4.0, among=(other, UNNAMED), graph=1)]
    assert [(one.line, one.seconds) for one in divide_among_lines(events, EAGER)] == [(other, 2.0), (UNNAMED, 2.0)]


def test_time_on_the_way_into_compiled_code_and_out_of_it_has_a_line_of_its_own() -> None:
    events = [
        _event(NORM, "aten.mul.Tensor", 1.0, host_s=0.1),
        _event(GATE, "cpp_fused_0", 1.0, host_s=0.2, among=(GATE,), graph=1),
        _event(GATE, "cpp_fused_1", 1.0, host_s=0.3, among=(GATE,), graph=1),
        _event(GATE, "cpp_fused_0", 1.0, host_s=0.4, among=(GATE,), graph=2),
        _event(NORM, "aten.mul.Tensor", 1.0, host_s=0.5),
    ]
    found = separate_calls(events)
    assert sum(one.host_s for one in found if one.line == BETWEEN) == pytest.approx(0.2 + 0.4 + 0.5)
    assert sum(one.host_s + one.seconds for one in found) == pytest.approx(5 + 1.5)
    assert {one.host_s for one in found if one.line == GATE} == {0.0, 0.3}


def test_a_trace_ends_in_a_line_and_enters_an_op_by_its_folder() -> None:
    block, own, shared = (
        ROOT / file
        for file in ("trainer/model/block.py", "kernels/qk_norm_rope/__init__.py", "kernels/rms_norm/__init__.py")
    )
    trace = (
        f'File "{block}", line 30, in run\n  x\nFile "{own}", line 40, in f\n  y\nFile "{shared}", line 24, in g\n  z\n'
    )
    outside = 'File "/usr/lib/python3/torch/nn.py", line 5, in h\n  w\n'
    found = CompiledGraphs().find_lines([trace, trace + outside, outside])
    assert found == (("kernels/rms_norm/__init__.py", 24, "qk_norm_rope"),)


def test_each_operation_counts_with_its_fastest_time() -> None:
    lap = lambda name, gap, seconds: TimedOperation(name, gap, seconds)
    quiet_first = [lap("a", 1.0, 2.0), lap("b", 9.0, 9.0)]
    quiet_last = [lap("a", 8.0, 8.0), lap("b", 1.0, 3.0)]
    another_step = [lap("c", 0.0, 0.0)]
    found = keep_fastest_times([quiet_first, another_step, quiet_last])
    assert [(one.operation, one.gap, one.seconds) for one in found] == [("a", 1.0, 2.0), ("b", 1.0, 3.0)]


def test_the_least_overhead_is_that_of_one_crossing() -> None:
    assert 0 <= measure_least_overhead(bursts=20) < 1e-3


def test_the_larger_of_two_rates_counts() -> None:
    assert PeakRates(3.0, 10.0).find_larger_rates(PeakRates(5.0, 7.0)) == PeakRates(5.0, 10.0)


def test_arguments_of_a_call_are_told_with_shapes_and_strides() -> None:
    x = torch.zeros(4, 6, dtype=torch.bfloat16)
    assert describe_arguments((x[:, :3], [x, x], 0.5)) == (
        "bfloat16[4, 3] strides (6, 1)",
        "2 × bfloat16[4, 6] strides (6, 1)",
        "0.5",
    )


def test_caches_and_vector_units_are_read_from_where_linux_tells_them(tmp_path: Path) -> None:
    cache = tmp_path / "cpu0" / "cache"
    told = {
        "index0": ("Data", "1", "48K", "0"),
        "index1": ("Instruction", "1", "32K", "0"),
        "index3": ("Unified", "3", "32768K", "0-7"),
    }
    for index, values in told.items():
        (cache / index).mkdir(parents=True)
        for name, value in zip(("type", "level", "size", "shared_cpu_list"), values):
            (cache / index / name).write_text(value + "\n")
    (cache / "index0" / "coherency_line_size").write_text("64\n")
    facts = read_machine_facts(torch.device("cpu"), tmp_path, frozenset(("avx2", "avx512f", "sse")))
    assert (facts["L1 cache"], facts["L3 cache"]) == ("48 KiB", "32768 KiB, shared by 8 threads")
    assert (facts["vector units"], facts["cache line"]) == ("avx2, avx512f", "64 bytes")
    nothing = read_machine_facts(torch.device("cpu"), tmp_path / "nowhere", frozenset())
    assert "L1 cache" not in nothing and "vector units" not in nothing and nothing["threads"]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Profile]:
    recipe = Recipe.load(ROOT / "policies" / "recipes" / "tiny.yaml")
    recipe = recipe.model_copy(update={"compile": True, "model": recipe.model.model_copy(update={"layers": 1})})
    kernels = tmp_path_factory.mktemp("compiled") / "kernels.yaml"
    kernels.write_text("cpu: {}\n")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("LEAST_S", "SETTLING_S"):
            patch.setattr(session, name, 0.0)
        patch.setattr(session, "_crossing", lambda *_: 0.0)
        best = PeakRates(1e18, 1e18)
        yield measure_profile(recipe, kernels, steps=2, isolate=False, best=best, implementations_s=1e-9).profile


@pytest.mark.slow("it compiles a block without a cache, because a cached graph may have the lines of other sources")
def test_the_lines_of_a_compiled_recipe_are_those_of_its_compiled_step(compiled: Profile) -> None:
    assert compiled.compiled and compiled.step_s == compiled.recipe_step_s
    assert sum(line.share for line in compiled.lines) == pytest.approx(1.0)
    assert not any(line.file == UNNAMED[0] for line in compiled.lines), "each generated kernel has lines of ours"
    lines = {(line.source[:34], line.op): line for line in compiled.lines}
    product = lines["joined_BTX = self.multiply(h_BTD, torch.cat(weights)"[:34], ""]
    assert product.forward_s > 0 and product.backward_s > 0 and product.flops > 0
    ops = {op.op: op for op in compiled.ops}
    for name in ("swiglu", "attention", "rms_norm", "linear_cross_entropy", "adamw"):
        assert ops[name].forward_s > 0 and ops[name].share > 0, name
    assert ops["swiglu"].backward_s > 0 and ops["swiglu"].called_with[0].arguments[0].startswith("float32[")
    names = {name for line in compiled.lines for name in line.operations}
    assert any(name.startswith("cpp_fused") for name in names) or torch.cuda.is_available()
    assert compiled.memory_bytes_per_s == 1e18 > compiled.measured_bytes_per_s
    assert Profile.from_mapping(json.loads(compiled.to_json())) == compiled
