"""Every op × implementation on this device against eager, interleaved in one process: ``make bench``.

Asserted only as a ratio: no registered implementation is much slower than the reference it stands in for, unless it
says so.
pytest-benchmark times the implementation; the ratio to eager, from pairs run in turn, is printed and kept in
``extra_info``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.bench import Setting, compare
from kernels.op import Case, Shape
from kernels.oracle import judge
from kernels.registry import OPS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = {"recipe": Shape(batch=8), "long": Shape(batch=2, context=1024)}
PAIRS = [
    (op.name, i.name)
    for op in OPS.values()
    for i in op.implementations.values()
    if i.name != "reference" and i.runs_on(DEVICE)
]
FLOOR = 0.5  # times eager's speed; machines are noisy, and a pointwise op may be call-bound at these sizes


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("op", "implementation"), PAIRS)
def test_against_eager(benchmark: Any, op: str, implementation: str, shape: str) -> None:
    result = judge(OPS[op], implementation, Case(shape, SHAPES[shape]), dtype=torch.bfloat16, device=DEVICE)
    assert result.ok, result.failures()
    found = compare(op, implementation, setting=Setting(SHAPES[shape], "bf16", False), device=DEVICE, pairs=5, warmup=1)
    benchmark.extra_info.update(ratio=found.ratio, ratio_low=found.ratio_low, ratio_high=found.ratio_high)
    function = OPS[op].implementations[implementation].function
    inputs = OPS[op].inputs(Case(shape, SHAPES[shape]), device=DEVICE, dtype=torch.bfloat16)
    benchmark.pedantic(function, args=inputs, rounds=3, warmup_rounds=1)
    print(
        f"\n{op}: {implementation} is {found.ratio:.2f} times as fast as eager "
        f"({found.ratio_low:.2f}–{found.ratio_high:.2f}), {shape}"
    )
    assert found.ratio > FLOOR
