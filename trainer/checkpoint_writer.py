"""Saves checkpoints while training goes on: the step waits neither for the copy nor for the disk.

Weights and optimiser change in the optimiser's step and nowhere else. So a thread copies them while the next step's
forward and backward run; only that step's update waits for the copy, which is by then long made.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.contract.checkpoint.format import Regions, Tensors, save_share, steps_in


class Writer:
    """Saves in a thread, one at a time, and keeps the newest ``keep``."""

    def __init__(self, parent: Path, keep: int, rank: int = 0, ranks: int = 1) -> None:
        self.parent, self.keep, self.rank, self.ranks = parent, keep, rank, ranks
        # CUDA's current device is each thread's own
        device = (torch.cuda.set_device, (torch.cuda.current_device(),)) if torch.cuda.is_available() else (None, ())
        self._pool = ThreadPoolExecutor(1, "checkpoint", *device)
        # Hashing and writing take what time the step leaves over; the copy, which it waits for, does not.
        self._disk = ThreadPoolExecutor(1, "checkpoint-disk", give_way)
        self._pending: Future[Path] | None = None
        self._copied = threading.Event()
        self._copied.set()

    def submit(self, step: int, contents: dict[str, Tensors], regions: Regions, state: dict[str, Any]) -> None:
        """Begin a save, once the one before it is done. The tensors may change after ``wait_until_copied``.

        Raises: what the save before it raised.
        """
        self.wait()
        self._copied.clear()
        ready = torch.cuda.Event() if torch.cuda.is_available() else None
        if ready is not None:
            ready.record()
        self._pending = self._pool.submit(self._save, step, contents, regions, state, ready)

    def wait_until_copied(self) -> None:
        """Until the tensors of the last save may change."""
        self._copied.wait()

    def poll(self) -> None:
        """Raises: what a finished save raised."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> Path | None:
        """The last save's folder, once it is on disk. Raises: what it raised."""
        pending, self._pending = self._pending, None
        return pending.result() if pending is not None else None

    def close(self) -> None:
        self._pool.shutdown(wait=True)
        self._disk.shutdown(wait=True)

    def _save(
        self,
        step: int,
        contents: dict[str, Tensors],
        regions: Regions,
        state: dict[str, Any],
        ready: torch.cuda.Event | None,
    ) -> Path:
        try:
            copied = copy_to_host(contents, ready)
        finally:
            self._copied.set()
        written = self._disk.submit(save_share, self.parent, step, copied, regions, state, self.rank, self.ranks)
        path = written.result()
        if self.rank == 0:
            for _, old in steps_in(self.parent)[: -self.keep]:
                shutil.rmtree(old)
        return path


def give_way() -> None:
    """Put this thread behind all others: Linux keeps a nice value for each (setpriority(2), notes)."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def copy_to_host(contents: dict[str, Tensors], ready: torch.cuda.Event | None = None) -> dict[str, Tensors]:
    """Copies in host memory; those of a GPU are made on a stream of their own, after ``ready``."""
    if ready is None:
        return {kind: {name: _copy(t) for name, t in tensors.items()} for kind, tensors in contents.items()}
    stream = torch.cuda.Stream()
    stream.wait_event(ready)
    with torch.cuda.stream(stream):
        copied = {
            kind: {name: _to_pinned(tensor) for name, tensor in tensors.items()} for kind, tensors in contents.items()
        }
    stream.synchronize()
    return copied


def _copy(tensor: Tensor) -> Tensor:
    """By numpy: torch would start threads of its own, which take the cores from the step."""
    source = tensor.detach().contiguous()
    copy = torch.empty_like(source)
    np.copyto(_bytes(copy), _bytes(source))
    return copy


def _bytes(tensor: Tensor) -> Any:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _to_pinned(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor.detach(), non_blocking=True)
