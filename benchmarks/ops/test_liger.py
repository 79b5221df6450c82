"""Liger-Kernel's functions against our oracle, in triton's interpreter: is the contender given the same task?

``python -m pytest benchmarks/ops/test_liger.py -s``. Skipped where Liger is not installed. The interpreter is chosen before triton is
imported, so each check is a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from benchmarks.ops.liger import FUNCTIONS, installed
from benchmarks.support.best_here import ROOT

CASES = ("small", "prime", "strided")
SCRIPT = """
import importlib, sys
import numpy as np
import triton.language as tl
import triton.runtime.interpreter as interpreter
from benchmarks.ops.liger import NAME, contest
from kernels.contract.oracle import compare_with_fp64
plain = interpreter._implicit_cvt

def convert(argument):  # triton 3.9's interpreter leaves numbers to be Python's, which cannot .to(dtype) as those on a GPU can
    if not isinstance(argument, float):
        return plain(argument)
    return tl.tensor(interpreter.TensorHandle(np.array([argument], np.float32), tl.float32), tl.float32)

interpreter._implicit_cvt = convert
for name in ("rms_norm", "fused_add_rms_norm"):  # libdevice's functions are stubs that return None there
    importlib.import_module(f"liger_kernel.ops.{name}").rsqrt = lambda x: tl.rsqrt(x)
op = contest(sys.argv[1])
cases = [case for case in op.cases if case.name in sys.argv[2:]]
results = [compare_with_fp64(op, NAME, case) for case in cases]
for result in results:
    print(result.op, result.case, result.dtype, "right" if result.ok else result.failures())
sys.exit(not (len(results) == len(sys.argv[2:]) and all(result.ok for result in results)))
"""


@pytest.mark.skipif(installed() is None, reason="Liger-Kernel is not installed")
@pytest.mark.parametrize("op", FUNCTIONS)
def test_liger_computes_our_op(op: str) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-c", SCRIPT, op, *CASES]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    print(f"\nLiger-Kernel {installed()}, interpreted:\n{done.stdout}")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
