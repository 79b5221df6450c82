"""Compiles the C++ in ``kernels/native/`` on first use, with torch.compile's own compiler, flags and cache."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

SOURCES = Path(__file__).with_name("native")
NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}  # of the dtypes, as functions end in them
OUT_OF_MEMORY, FAILED = -1, -2  # native/in_parallel.h
FLAGS = ("-ftree-loop-vectorize",)  # torch's flags leave it out: its own loops are written with vectors


@functools.cache
def library(name: str) -> ctypes.CDLL:
    """The shared library of ``native/<name>.cpp``. Its calls release the interpreter's lock.

    Torch's private loader knows the flags, the vector instructions, OpenMP, a cache that outlives the process, and
    locks between processes. Raises: what torch.compile raises without a C++ compiler, or with one that fails.
    """
    from torch._inductor.codecache import CppCodeCache

    text = (SOURCES / f"{name}.cpp").read_text(encoding="utf-8")
    for header in SOURCES.glob("*.h"):  # in place, so that the cache's key holds it too
        text = text.replace(f'#include "{header.name}"', header.read_text(encoding="utf-8").replace("#pragma once", ""))
    loaded = CppCodeCache.load(text, device_type="cpu", extra_flags=FLAGS)
    assert isinstance(loaded, ctypes.CDLL)
    return loaded


def call(name: str, function: str, *arguments: Tensor | int | float) -> int:
    """A function of ``native/<name>.cpp``: tensors by address, numbers as int64 and float; the threads come last.

    Returns what it returned. Raises: MemoryError, RuntimeError for what it could not do.
    """
    passed = [
        ctypes.c_void_p(x.data_ptr()) if isinstance(x, Tensor) else ctypes.c_float(x) if isinstance(x, float) else x
        for x in (*arguments, torch.get_num_threads())
    ]
    found = getattr(library(name), function)
    found.restype = ctypes.c_int64
    code = int(found(*(ctypes.c_int64(x) if isinstance(x, int) else x for x in passed)))
    if code == OUT_OF_MEMORY:
        raise MemoryError(f"{function}: no memory for its scratch space")
    if code == FAILED:
        raise RuntimeError(f"{function}: the matrix units refused the product")
    return code


def rows_of(x_XD: Tensor) -> Tensor:
    """[N, D] with a dense last dimension: a view of x wherever one step leads from row to row."""
    x_ND = x_XD.reshape(x_XD.shape[:-1].numel(), x_XD.shape[-1])
    return x_ND if x_ND.stride(1) == 1 else x_ND.contiguous()
