"""The fp64 oracle judges every op × implementation × case, and refuses implementations that are wrong on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from kernels.contract.oracle import HOSTILE, compare_with_fp64
from kernels.contract.registry import OPS, Implementation

CASES = {case.name: case for op in OPS.values() for case in op.cases}
JUDGED = [(case, values) for case in CASES for values in HOSTILE if case != "recipe" or values in ("normal", "outlier")]
HERE = [
    (op, name)
    for op in OPS
    for name, i in OPS[op].implementations.items()
    if name not in ("reference", "triton") and i.can_run_on("cpu")
]
UNCOMPILED = [(op, name) for op, name in HERE if OPS[op].implementations[name].eager is None]
COMPILED = [pair for pair in HERE if pair not in UNCOMPILED]
EAGER = [pair for pair in COMPILED if OPS[pair[0]].implementations[pair[1]].eager is not OPS[pair[0]].reference]


@pytest.mark.portable
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("case", "values"), JUDGED)
@pytest.mark.parametrize(("op", "implementation"), UNCOMPILED)
def test_an_implementation_agrees_with_fp64(
    op: str, implementation: str, case: str, values: str, dtype: torch.dtype
) -> None:
    result = compare_with_fp64(OPS[op], implementation, CASES[case], dtype=dtype, values=values, seed=3)
    assert result.ok, result.describe_failures()


@pytest.mark.portable
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("op", "implementation"), EAGER)
def test_the_eager_code_of_a_compiled_implementation_agrees_with_fp64(op: str, implementation: str, case: str) -> None:
    eager = Implementation("eager", OPS[op].implementations[implementation].eager, "as written")  # type: ignore[arg-type]
    for dtype in (torch.float32, torch.bfloat16):
        result = compare_with_fp64(
            replace(OPS[op], implementations={"eager": eager}), "eager", CASES[case], dtype=dtype
        )
        assert result.ok, result.describe_failures()


@pytest.fixture
def always_compiled() -> Iterator[None]:
    """Without this, torch would run uncompiled after eight shapes, and the oracle would judge eager code."""
    with torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True):
        yield


@pytest.mark.sample("swiglu-compiled-dtype1")
@pytest.mark.usefixtures("always_compiled")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("op", "implementation"), COMPILED)
@pytest.mark.slow("compiles an op for each dtype")
def test_a_compiled_implementation_agrees_with_fp64_on_hostile_values(
    op: str, implementation: str, dtype: torch.dtype
) -> None:
    for values in HOSTILE:  # one compilation serves them all
        result = compare_with_fp64(OPS[op], implementation, CASES["small"], dtype=dtype, values=values)
        assert result.ok, (values, result.describe_failures())


@pytest.mark.sample("linear_cross_entropy-chunked_compiled-prime", "newton_schulz-compiled-prime")
@pytest.mark.usefixtures("always_compiled")
@pytest.mark.parametrize("case", [case for case in CASES if case != "small"])
@pytest.mark.parametrize(("op", "implementation"), COMPILED)
def test_a_compiled_implementation_agrees_with_fp64_for_any_shape(op: str, implementation: str, case: str) -> None:
    for values in ("normal", "outlier"):
        result = compare_with_fp64(OPS[op], implementation, CASES[case], dtype=torch.bfloat16, values=values)
        assert result.ok, (values, result.describe_failures())


@pytest.mark.parametrize("case", ["small", "prime", "strided"])
def test_the_forward_pass_of_flex_attention_equals_the_references(case: str) -> None:
    """Without a GPU, only its mask and its grouping of heads can be tested. It has no backward pass on the CPU."""
    op = OPS["attention"]
    flex = op.implementations["flex"].eager
    assert flex is not None and not op.implementations["flex"].can_run_on("cpu")
    inputs = [x.detach() for x in op.inputs(CASES[case])]
    torch.testing.assert_close(flex(*inputs), op.reference(*inputs), atol=2e-6, rtol=1e-5)


def _wrong_scale(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return OPS["swiglu"].reference(gate, up) * 1.001


def _wrong_gradient(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(gate) * up.detach() + (up - up.detach()) * 0.0


@pytest.mark.parametrize("function", [_wrong_scale, _wrong_gradient])
def test_the_oracle_refuses_wrong_results(function: object) -> None:
    wrong = Implementation("wrong", function, "wrong on purpose")  # type: ignore[arg-type]
    op = replace(OPS["swiglu"], implementations={"wrong": wrong})
    assert not compare_with_fp64(op, "wrong", CASES["small"]).ok
