"""Every Triton kernel compiles for three kinds of GPU on a machine without one, and a kernel that does not fit is reported."""

from __future__ import annotations

import json

import pytest
import torch

from kernels.contract.ahead import (
    REGISTERS,
    SHAPES,
    TARGETS,
    CompiledKernel,
    compile_launches,
    compile_op,
    format_kernel_table,
    main,
    read_register_and_stack_use,
)
from kernels.contract.op import OracleCase
from kernels.contract.oracle import compute_outputs_and_gradients
from kernels.contract.registry import OPS
from tests.support.messages import refused

pytest.importorskip("triton", reason="kernels for a GPU are compiled by it")
TRITON = [(op, name) for op in OPS for name, found in OPS[op].implementations.items() if found.needs_triton]
SPILLS: dict[tuple[str, str], tuple[int, str]] = {}  # (op, kernel) → bytes a thread that it may spill, and why


@pytest.mark.parametrize(
    "target",
    [90, *(pytest.param(n, marks=pytest.mark.slow("thirty kernels are compiled")) for n in TARGETS if n != 90)],
)
def test_every_triton_kernel_compiles_and_fits_on_each_gpu(target: int, capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[CompiledKernel] = []
    for op, implementation in TRITON:
        shapes = SHAPES if target == 90 else SHAPES[2:]  # the widest, and the vocabulary: seconds
        rows += compile_op(OPS[op], target, shapes, implementation=implementation)
    with capsys.disabled():
        print(f"\n{format_kernel_table(rows)}")
    assert {(r.op, r.implementation) for r in rows} == set(TRITON), "each launched something"
    for row in rows:
        assert row.spilled <= SPILLS.get((row.op, row.kernel), (0, ""))[0], row
        assert row.registers <= REGISTERS and row.shared <= TARGETS[target], row


@pytest.mark.parametrize("op", ["rms_norm", "add_rms_norm", "qk_norm_rope", "swiglu"])
def test_kernels_read_and_write_rows_sixteen_bytes_at_a_time(op: str) -> None:
    inputs = OPS[op].inputs(OracleCase("ahead", SHAPES[1]), dtype=torch.bfloat16)
    with compile_launches(90) as seen:
        compute_outputs_and_gradients(OPS[op], OPS[op].implementations["triton"].function, inputs, seed=0)
    assert [name for name, _ in seen] == ["forward_kernel", "backward_kernel"], "one launch each way"
    for name, kernel in seen:
        code = kernel.asm["ptx"]
        assert "st.global.v4.b32" in code and ("ld.global.v4.b32" in code or "cp.async.cg" in code), name
        assert not any(f"{way}.global.b{bits}" in code for way in ("ld", "st") for bits in (8, 16)), name


def test_the_report_names_a_kernel_whose_tile_is_too_large() -> None:
    from kernels.rms_norm.triton import backward_kernel

    x, scale, partial = torch.empty(2, 4096, dtype=torch.bfloat16), torch.empty(2), torch.empty(1, 4096)
    with compile_launches(90) as seen:  # 128 elements a thread
        backward_kernel[(1,)](x, x, x[0], scale, x, partial, 2, 4096, 2, ROWS=1, BLOCK=4096, STAGES=1, num_warps=1)
    registers, spilled = read_register_and_stack_use(seen[0][1].asm["cubin"])
    assert spilled > 100
    row = CompiledKernel("rms_norm", "triton", seen[0][0], 4096, 90, 1, registers, spilled, seen[0][1].metadata.shared)
    assert not row.is_within_limits
    assert not CompiledKernel("an op", "triton", "a kernel", 1, 80, 4, 100, 0, TARGETS[80] + 1).is_within_limits


def test_compilation_ahead_specialises_a_call_as_a_gpu_would() -> None:
    """Triton compiles other code for a width or an address that 16 does not divide."""
    from kernels.rms_norm.triton import forward_op

    aligned, odd = torch.zeros(4, 64, dtype=torch.bfloat16), torch.zeros(257, dtype=torch.bfloat16)[1:].view(4, 64)
    with compile_launches(90) as seen:
        for x in (aligned, aligned.clone(), odd, aligned[:, :63].contiguous()):
            forward_op(x, torch.ones(x.shape[1], dtype=torch.bfloat16), 1e-6)
    codes = [kernel.hash for _, kernel in seen]
    assert codes[0] == codes[1] and len(set(codes)) == 3


def test_compile_launches_restores_triton_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    before = driver._active, JITFunction.run
    with pytest.raises(ZeroDivisionError), compile_launches(80):
        assert driver.active.get_current_target().arch == 80
        raise ZeroDivisionError
    assert (driver._active, JITFunction.run) == before
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with refused("kernels.interpreter"), compile_launches(80):
        pass


def test_the_command_prints_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--target", "90", "--op", "swiglu", "--width", "1024"]) == 0
    text = capsys.readouterr().out.splitlines()
    assert text[0].split()[:3] == ["op", "kernel", "width"] and len(text) == 3
    assert main(["--target", "90", "--op", "swiglu", "--width", "1024", "--json"]) == 0
    found = [CompiledKernel(**row) for row in json.loads(capsys.readouterr().out)]
    assert [row.kernel for row in found] == ["forward_kernel", "backward_kernel"] and all(
        row.is_within_limits for row in found
    )
    assert main(["--op", "swish"]) == 2
    assert "error[kernels.no_op]" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "registers x 32 x warps" in capsys.readouterr().out
    with refused("kernels.no_target", target=75, known=[80, 90, 100]):
        compile_op(OPS["swiglu"], 75)
