"""Compiles the C++ in ``kernels/native/`` on first use, with torch.compile's own compiler, flags and cache."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

SOURCES = Path(__file__).with_name("native")
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
