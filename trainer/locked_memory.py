"""Page-locked host memory, to which a GPU copies while the host does something else.

Locking takes the host seconds for some GB, so it is done once. torch's own pinned memory is taken anew for every tensor of a first save, in
blocks of powers of two: 16 GB for 12.

Apart because only a GPU executes it; it has not run on one yet.
"""

from __future__ import annotations

import mmap
import sys

import torch
from torch import Tensor

PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device of the process


class HostMemory:
    """Host memory that stays at one place from save to save, page-locked where there is a GPU."""

    def __init__(self) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self.locked = False

    def hold(self, size: int) -> Tensor:
        """At least so many bytes; what was held before stays if it is enough. Nobody may read it meanwhile.

        Raises: OSError where the system has no such memory.
        """
        if size > len(self.bytes):
            self.release()
            # Shared, so that a fork (of a compiler's worker, say) leaves us no copy in place of the pages that the device writes to.
            self.bytes = torch.frombuffer(mmap.mmap(-1, size + -size % mmap.PAGESIZE), dtype=torch.uint8)
            if torch.cuda.is_available():
                self.bytes.numpy().fill(0)  # makes the pages here, and not in the driver, whose lock others wait for
                code = lock_pages(self.bytes)
                self.locked = code == 0
                if code:
                    print(
                        f"checkpoints: CUDA error {code} when {size / 1e9:.1f} GB of host memory were page-locked: they are copied to "
                        "pageable memory, which is slower (is there a limit on locked memory, 'ulimit -l'?)",
                        file=sys.stderr,
                        flush=True,
                    )
        return self.bytes

    def release(self) -> None:
        if self.locked and (code := unlock_pages(self.bytes)):
            print(f"checkpoints: CUDA error {code} when host memory was unlocked", file=sys.stderr, flush=True)
        self.bytes, self.locked = torch.empty(0, dtype=torch.uint8), False


def lock_pages(memory: Tensor) -> int:
    """CUDA's error, 0: none. CUDA keeps a failed call's error for the next kernel that the same thread starts."""
    return int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), len(memory), PORTABLE))


def unlock_pages(memory: Tensor) -> int:
    return int(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))
