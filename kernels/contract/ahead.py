"""Compiles Triton kernels for a GPU on a machine without one, and reads from the machine code which resources they need.

An implementation is called once, forward and backward, on small CPU tensors. Each of its launches compiles the kernel for the arguments of the
launch (widths, alignment, dtypes, constants, warps), as a launch on a GPU would. No kernel runs, so the results are arbitrary and are
discarded. The registry says which ops there are.

    python -m kernels.contract.ahead --target 90 --op rms_norm

    op        kernel           width  sm  warps  registers  spilled B  shared B
    rms_norm  forward_kernel    1024  90      4         56          0        64
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from kernels.contract.message import format_error_with_code
from kernels.contract.op import KernelError, Op, OracleCase, Shape
from kernels.contract.oracle import compute_outputs_and_gradients
from kernels.contract.registry import OPS, find_op

# Compute capability → bytes of shared memory that one block can have (CUDA C++ programming guide, table of capabilities).
TARGETS = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
REGISTERS = 255  # of a thread; values that do not fit are spilled to memory
# Three widths of a model with few tokens, because the code of a kernel depends only on widths; and a model with a large vocabulary.
SHAPES = (
    *(
        Shape(
            batch=1, context=32, d_model=width, heads=width // 128, kv_heads=8, head_dim=128, d_ff=256, vocab_size=512
        )
        for width in (1024, 4096, 8192)
    ),
    Shape(batch=1, context=32, d_model=64, heads=1, kv_heads=1, head_dim=64, d_ff=128, vocab_size=131_072),
)


@dataclass(frozen=True)
class CompiledKernel:
    """The resources that one kernel needs on one target. ``width``: d_model of the first shape for which the kernel was compiled."""

    op: str
    implementation: str
    kernel: str
    width: int
    target: int  # compute capability: 90 is 9.0
    warps: int
    registers: int  # of a thread
    spilled: int  # bytes of memory for each thread, for values that do not fit into registers
    shared: int  # bytes of shared memory of a block

    @property
    def is_within_limits(self) -> bool:
        return self.registers <= REGISTERS and self.shared <= TARGETS[self.target] and not self.spilled


@contextmanager
def compile_launches(target: int) -> Iterator[list[tuple[str, Any]]]:
    """Within this context a Triton launch compiles the kernel for ``target`` and does not run it. Yields a list to which each launch adds (name of
    the kernel, compiled kernel).

    Raises: KernelError if Triton is missing, or TRITON_INTERPRET is set.
    """
    try:
        from triton.backends.compiler import GPUTarget
        from triton.runtime.driver import driver
        from triton.runtime.jit import JITFunction
    except ImportError as error:
        raise KernelError(
            "kernels.no_triton",
            "Kernels cannot be compiled without Triton: {problem}. Install triton.",
            problem=str(error),
        ) from error
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise KernelError(
            "kernels.interpreter",
            "TRITON_INTERPRET=1 is set, so Triton interprets kernels and does not compile them. Unset the variable.",
        )
    seen: list[tuple[str, Any]] = []
    held, run = driver._active, JITFunction.run

    def compile_only(self: Any, *arguments: Any, **settings: Any) -> Any:
        kernel = run(self, *arguments, **settings | {"warmup": True})
        seen.append((self.fn.__name__, kernel))
        return kernel

    device = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", target, 32),
        get_current_device=lambda: (
            f"sm_{target}"
        ),  # Triton caches kernels by device: these must not mix with a real device's
        get_current_stream=lambda device: 0,
        # For triton.autotune: every configuration is compiled, and none is faster than another.
        get_benchmarker=lambda: lambda call, quantiles: (call(), [0.0] * len(quantiles))[1],
    )
    driver.set_active(device)  # type: ignore[arg-type]
    JITFunction.run = compile_only
    try:
        yield seen
    finally:
        JITFunction.run = run
        driver.set_active(held)  # type: ignore[arg-type]


def compile_op(
    op: Op,
    target: int,
    shapes: Sequence[Shape] = SHAPES,
    dtype: torch.dtype = torch.bfloat16,
    implementation: str = "triton",
) -> list[CompiledKernel]:
    """Compile every kernel that an implementation launches at these shapes. Returns each compiled kernel once.

    Raises: KernelError for an unknown implementation or target. Triton's own error for code that it cannot compile.
    """
    if target not in TARGETS:
        raise KernelError(
            "kernels.no_target",
            "There is no target {target}. The targets are: {known}.",
            target=target,
            known=list(TARGETS),
        )
    function = op.implementation(implementation).function
    found, known = [], set()
    for shape in shapes:
        inputs = op.inputs(OracleCase("ahead", shape), dtype=dtype)
        with compile_launches(target) as seen:
            compute_outputs_and_gradients(op, function, inputs, seed=0)
        for name, kernel in seen:
            if kernel.hash not in known:
                known.add(kernel.hash)
                registers, spilled = read_register_and_stack_use(kernel.asm["cubin"])
                metadata = kernel.metadata
                found.append(
                    CompiledKernel(
                        op.name,
                        implementation,
                        name,
                        shape.d_model,
                        target,
                        metadata.num_warps,
                        registers,
                        spilled,
                        metadata.shared,
                    )
                )
    return found


def read_register_and_stack_use(cubin: bytes) -> tuple[int, int]:
    """(number of registers, bytes of stack or local memory) of a thread, read with ``cuobjdump``, which comes with Triton.

    cuobjdump prints for a kernel: ``Function forward_kernel: REG:32 STACK:0 SHARED:64 LOCAL:0 CONSTANT[0]:596 …``.
    """
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    read = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", said)
    assert read, said
    registers, stack, local = map(int, read.groups())
    return registers, max(stack, local)


def format_kernel_table(rows: Sequence[CompiledKernel]) -> str:
    """The kernels as a table: a heading and one line for each kernel."""
    head = ("op", "kernel", "width", "sm", "warps", "registers", "spilled B", "shared B")
    cells = [(r.op, r.kernel, *map(str, (r.width, r.target, r.warps, r.registers, r.spilled, r.shared))) for r in rows]
    widths = [max(len(row[i]) for row in (head, *cells)) for i in range(len(head))]
    line = lambda row: "  ".join(c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths)))
    return "\n".join(line(row).rstrip() for row in (head, *cells))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.contract.ahead",
        description="""
Compiles every Triton kernel of the registry for GPUs that this machine need not have, and prints the resources that each kernel needs.

  registers   registers of a thread, at most 255. A multiprocessor has 65,536: registers x 32 x warps determines how many blocks share it.
  spilled B   bytes of memory for each thread, for values that do not fit into registers. Spilling costs time, so 0 is best.
  shared B    bytes of shared memory of a block. A kernel with more than 163 KiB (sm_80) or 227 KiB (sm_90, sm_100) cannot be launched.
  width       d_model of the first shape for which the kernel was compiled. Other widths may use the same code.

Exits with 1 if a kernel spills, or does not fit its target. Each kernel takes seconds the first time. Triton caches compiled kernels.
""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--target",
        type=int,
        choices=TARGETS,
        action="append",
        help="compute capability, such as 90 for 9.0 (H100); may be given several times; default: all",
    )
    parser.add_argument("--op", action="append", help="compile only this op; may be given several times")
    parser.add_argument(
        "--width", type=int, action="append", help="compile only shapes of this d_model; may be given several times"
    )
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="dtype of the inputs; default: bf16")
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of the table")
    chosen = parser.parse_args(arguments)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[chosen.dtype]
    shapes = [s for s in SHAPES if not chosen.width or s.d_model in chosen.width]
    rows: list[CompiledKernel] = []
    try:
        for op in [find_op(name) for name in chosen.op or OPS]:
            for name in [i.name for i in op.implementations.values() if i.needs_triton]:
                for target in chosen.target or TARGETS:
                    rows += compile_op(op, target, shapes, dtype, name)
    except KernelError as error:
        print(format_error_with_code(error), file=sys.stderr)
        return 2
    print(json.dumps([asdict(row) for row in rows], indent=1) if chosen.json else format_kernel_table(rows))
    return 0 if all(row.is_within_limits for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
