"""The files of a run's metrics, one JSON object a line, flushed about once a second; and the machine's matmul rate."""

from __future__ import annotations

import math
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch

from kernels.contract.files import finite_json, sync_folder, write_atomically
from trainer.contract.json_lines import read_lines

FLUSH_SECONDS = 1.0
LEAST_MATMUL = 128  # rows and columns
MATMUL_SECONDS = 0.1  # the most that one product may take, and after which the matmul rate is not tried again


class Lines:
    """Appends JSON lines to a file. For a resumed run it first drops torn lines and those from ``step`` on.

    Without a path (on ranks that do not lead) it writes nothing.
    """

    def __init__(self, path: Path | None, step: int) -> None:
        self._flushed = time.monotonic()
        self._file = None
        if path is None:
            return
        if path.exists():
            kept = [record for record in read_lines(path) if record["step"] < step]
            write_atomically(path, "".join(map(encode, kept)))
        self._file = open(path, "a", buffering=1 << 16)  # noqa: SIM115 - closed by close()
        sync_folder(path.parent)

    def write(self, record: dict[str, Any]) -> None:
        if self._file is None:
            return
        self._file.write(encode(record))
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()
            self._flushed = time.monotonic()

    def sync(self) -> None:
        """Return once all lines are on disk: a checkpoint that is about to be named goes on from them."""
        if self._file is not None:
            self.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def encode(record: dict[str, Any]) -> str:
    return finite_json(record) + "\n"


def device_name(device: torch.device) -> str:
    """The GPU's name, or the number of threads of the CPU's operations: what speed depends on."""
    return (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{device.type}, {torch.get_num_threads()} threads"
    )


def memory_bytes(device: torch.device) -> int:
    """The most memory that this process has held so far: of the GPU, or of the host if there is no GPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * unit


def matmul_rate(device: torch.device, dtype: torch.dtype, size: int = 1024, tries: int = 5) -> float:
    """FLOP/s of a square matrix product, the best of a few tries: what MFU is measured against.

    Slow cores get fewer tries and, if one product would take too long, as bf16's does without units for it, smaller matrices.
    """
    if size > LEAST_MATMUL:
        rate = matmul_rate(device, dtype, LEAST_MATMUL, tries)
        while size > LEAST_MATMUL and 2 * size**3 / rate > MATMUL_SECONDS:
            size //= 2
    generator = torch.Generator().manual_seed(0)  # the run's own random state is part of what resumes to the bit
    a, b = (torch.randn(size, size, generator=generator).to(device, dtype) for _ in range(2))
    best, begun = math.inf, time.perf_counter()
    for number in range(tries + 1):
        if number > 1 and time.perf_counter() - begun > MATMUL_SECONDS:
            break
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
