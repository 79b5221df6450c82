"""The Triton kernels, forward and backward, in triton's interpreter; it needs its switch set before triton is
imported: a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.registry import OPS

SCRIPT = """
import sys, torch
from kernels.oracle import HOSTILE, judge
from kernels.registry import OPS
op = OPS[sys.argv[1]]
wrong = []
for case in op.cases:
    if case.name == "recipe":
        continue  # the interpreter runs some hundred programs a second
    for values in HOSTILE if case.name == "small" else ("normal", "outlier"):
        # The interpreter truncates to bf16 where the GPU rounds: twice the rounding error.
        for dtype, factor in ((torch.float32, 2.0), (torch.bfloat16, 4.0)):
            result = judge(op, "triton", case, dtype=dtype, values=values, factor=factor)
            if not result.ok:
                wrong.append(f"{case.name} {dtype} {values}: {result.failures()}")
print("\\n".join(wrong))
sys.exit(bool(wrong))
"""


@pytest.mark.parametrize("op", [name for name, op in OPS.items() if "triton" in op.implementations])
def test_triton_in_the_interpreter(op: str) -> None:
    root = Path(__file__).parents[2]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", SCRIPT, op], env=environment, capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
