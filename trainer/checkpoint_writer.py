"""Saves checkpoints while training goes on: the step waits neither for the copy nor for the disk.

Weights and optimiser change in the optimiser's step and nowhere else. So a thread copies them while the next step's
forward and backward run; only that step's update waits for the copy, which is by then long made.

A GPU copies to memory that is page-locked (``locked_memory``). It is made once, while the run compiles, and every save is copied to the
same place.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.contract.checkpoint.format import Regions, Tensors, save_share, steps_in
from trainer.locked_memory import HostMemory

ALIGNED = 256  # bytes: where each tensor begins in ``HostMemory``


class Writer:
    """Saves in a thread, one at a time, and keeps the newest ``keep``.

    ``reserve``: bytes of host memory (``bytes_of``) to make at once, before the first save, and to keep. On a GPU each save goes to
    memory that is kept, which grows if it must; without one, and without ``reserve``, a save gives its memory back.
    """

    def __init__(self, parent: Path, keep: int, rank: int = 0, ranks: int = 1, reserve: int = 0) -> None:
        self.parent, self.keep, self.rank, self.ranks = parent, keep, rank, ranks
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._pool = ThreadPoolExecutor(1, "checkpoint", use, (device,))
        # Hashing and writing take what time the step leaves over; the copy, which it waits for, does not.
        self._disk = ThreadPoolExecutor(1, "checkpoint-disk", give_way, (device,))
        self._pending: Future[Path] | None = None
        self._copied = threading.Event()
        self._copied.set()
        self._memory = HostMemory() if reserve or device is not None else None
        if self._memory is not None and reserve:
            self._disk.submit(self._memory.hold, reserve)  # what it raises, the first save's own call raises again

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
        if self._memory is not None:
            self._disk.submit(self._memory.release)
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
            memory = None
            if self._memory is not None:  # held by the disk's thread, which starts no kernels: see ``lock_pages``
                memory = self._disk.submit(self._memory.hold, bytes_of(t for _, _, t in each(contents))).result()
            copied = copy_to_host(contents, memory, ready)
        finally:
            self._copied.set()
        written = self._disk.submit(save_share, self.parent, step, copied, regions, state, self.rank, self.ranks)
        path = written.result()
        if self.rank == 0:
            for _, old in steps_in(self.parent)[: -self.keep]:
                shutil.rmtree(old)
        return path


def use(device: int | None) -> None:
    """CUDA's current device is each thread's own."""
    if device is not None:
        torch.cuda.set_device(device)


def give_way(device: int | None) -> None:
    """Put this thread behind all others: Linux keeps a nice value for each (setpriority(2), notes)."""
    use(device)
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """What copies of them take in ``HostMemory``."""
    return sum(padded(tensor) for tensor in tensors)


def padded(tensor: Tensor) -> int:
    return -(-tensor.nbytes // ALIGNED) * ALIGNED


def each(contents: dict[str, Tensors]) -> Iterator[tuple[str, str, Tensor]]:
    """(kind, name, tensor)."""
    return ((kind, name, tensor) for kind, tensors in contents.items() for name, tensor in tensors.items())


def copy_to_host(
    contents: dict[str, Tensors], memory: Tensor | None = None, ready: torch.cuda.Event | None = None
) -> dict[str, Tensors]:
    """Copies in ``memory``, one behind the other, or in memory of their own; those of a GPU are made on a stream of their own,
    after ``ready``."""
    copied: dict[str, Tensors] = {kind: {} for kind in contents}
    start = 0
    for kind, name, tensor in each(contents):
        if memory is None:
            copied[kind][name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        else:
            copied[kind][name] = memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            start += padded(tensor)
    if ready is None:  # by numpy: torch would start threads of its own, which take the cores from the step
        for kind, name, tensor in each(contents):
            np.copyto(_bytes(copied[kind][name]), _bytes(tensor.detach().contiguous()))
        return copied
    stream = torch.cuda.Stream()
    stream.wait_event(ready)
    with torch.cuda.stream(stream):
        for kind, name, tensor in each(contents):
            copied[kind][name].copy_(tensor.detach(), non_blocking=True)
    stream.synchronize()
    return copied


def _bytes(tensor: Tensor) -> Any:
    return tensor.reshape(-1).view(torch.uint8).numpy()
