"""Keep freed host memory, instead of returning it to the kernel after every tensor.

glibc maps each block above 32 MiB and unmaps it when freed, so that on a CPU every step pays for the page faults of its
activations. From a heap that is never trimmed, the same pages serve every step.
"""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # malloc.h


def keep_freed_memory() -> bool:
    """Keep freed memory for the next tensors. Call it before the first tensor is made. Returns False where the C library is not glibc."""
    library = _glibc()
    if library is None:
        return False
    settings = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 1 << 30), (M_TOP_PAD, 64 << 20))
    return all(library.mallopt(name, value) == 1 for name, value in settings)


def release_freed_memory() -> None:
    """Return the memory that is free now to the kernel. Call it after compiling, which leaves some 100 MiB that no step would use."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") else None
