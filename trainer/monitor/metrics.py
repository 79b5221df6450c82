"""The files of a run's metrics: one JSON object in each line, flushed about once a second."""

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch

from kernels.contract.files import encode_finite_json, sync_folder, write_atomically
from trainer.contract.json_lines import read_json_lines

FLUSH_SECONDS = 1.0


class MetricsFile:
    """Appends JSON lines to a file. For a resumed run it first drops torn lines and the lines from ``step`` on.

    Without a path it writes nothing: only the leading rank writes.
    """

    def __init__(self, path: Path | None, step: int) -> None:
        self._flushed = time.monotonic()
        self._file = None
        if path is None:
            return
        if path.exists():
            kept = [record for record in read_json_lines(path) if record["step"] < step]
            write_atomically(path, "".join(map(encode_line, kept)))
        self._file = open(path, "a", buffering=1 << 16)  # noqa: SIM115 - closed by close()
        sync_folder(path.parent)

    def write(self, record: dict[str, Any]) -> None:
        if self._file is None:
            return
        self._file.write(encode_line(record))
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()
            self._flushed = time.monotonic()

    def sync(self) -> None:
        """Return once all lines are on disk. Call it before a checkpoint is saved, because a resumed run needs the lines of the steps before it."""
        if self._file is not None:
            self.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def encode_line(record: dict[str, Any]) -> str:
    return encode_finite_json(record) + "\n"


def device_name(device: torch.device) -> str:
    """A name for the device that implies its speed: the GPU's name, or "cpu" with the number of threads."""
    return (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{device.type}, {torch.get_num_threads()} threads"
    )


def measure_peak_memory_bytes(device: torch.device) -> int:
    """The most bytes of memory that this process has held so far: on the GPU, or on the host if ``device`` is a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * unit
