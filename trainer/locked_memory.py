"""Page-locked host memory, to which a GPU can copy while the host continues to work.

Locking a few GB takes the host seconds. Therefore memory is locked once and used for every save. torch's own pinned memory would be allocated
tensor by tensor in the first save, in blocks whose sizes are powers of two: 16 GB for 12 GB of tensors.

A separate file, because only a GPU executes it.
"""

from __future__ import annotations

import mmap
import sys

import torch
from torch import Tensor

from kernels.contract.message import Message

PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device of the process


class HostMemory:
    """Host memory that all saves share. It is page-locked if there is a GPU."""

    def __init__(self) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self.locked = False

    def reserve(self, size: int) -> Tensor:
        """Return at least ``size`` bytes of memory. The present memory is kept if it is large enough. Nothing may be reading it during this call.

        Raises: OSError if the system has too little memory.
        """
        if size > len(self.bytes):
            self.release()
            # Shared memory: after a fork (by a compiler's worker, say) it is still the memory that the device writes to.
            self.bytes = torch.frombuffer(mmap.mmap(-1, size + -size % mmap.PAGESIZE), dtype=torch.uint8)
            if torch.cuda.is_available():
                self.bytes.numpy().fill(0)  # makes the pages here, not in the driver, for whose lock others would wait
                code = lock_pages(self.bytes)
                self.locked = code == 0
                if code:
                    said = Message(
                        "trainer.not_locked",
                        "CUDA could not page-lock {gb:.1f} GB of host memory for checkpoints (CUDA error {code}). Checkpoints are "
                        "copied to pageable memory, which is slower. Check whether 'ulimit -l' limits locked memory.",
                        code=code,
                        gb=size / 1e9,
                    )
                    print(said, file=sys.stderr, flush=True)
        return self.bytes

    def release(self) -> None:
        if self.locked and (code := unlock_pages(self.bytes)):
            said = Message(
                "trainer.not_unlocked",
                "CUDA could not unlock the host memory that was page-locked for checkpoints (CUDA error {code})",
                code=code,
            )
            print(said, file=sys.stderr, flush=True)
        self.bytes, self.locked = torch.empty(0, dtype=torch.uint8), False


def lock_pages(memory: Tensor) -> int:
    """Page-lock ``memory``. Returns CUDA's error code, 0 for success. After a failure, the thread's next kernel reports the same error again."""
    return int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), len(memory), PORTABLE))


def unlock_pages(memory: Tensor) -> int:
    return int(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))
