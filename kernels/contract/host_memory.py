"""Keeps freed host memory in the process, instead of returning it to the operating system after every tensor.

glibc maps each block above 32 MiB and unmaps it when it is freed. On a CPU every step would then pay for the page faults of its activations. If
the heap is never trimmed, every step uses the same pages again.
"""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # malloc.h


def keep_freed_memory() -> bool:
    """From now on keep freed memory for the next tensors. Call it before the first tensor is made. Returns False if the C library is not glibc."""
    library = _glibc()
    if library is None:
        return False
    settings = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 1 << 30), (M_TOP_PAD, 64 << 20))
    return all(library.mallopt(name, value) == 1 for name, value in settings)


def release_freed_memory() -> None:
    """Return memory that is now free to the operating system. Call it after compiling, which leaves about 100 MiB that no step would use."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") else None
