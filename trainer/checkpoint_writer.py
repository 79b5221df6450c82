"""Saves checkpoints while training goes on: the step waits neither for a copy nor for the disk.

Only the optimiser's step changes weights and optimiser state. Therefore a thread copies them during the next step's forward and backward;
only that step's update waits for the copy, which is usually done by then. The last save of a run on a CPU copies nothing, because no update
follows. Frozen weights are never copied (``UnchangedWeights``).

A GPU copies to page-locked memory (``locked_memory``). That memory is made once, while the run compiles, and every save uses it.
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

from trainer.contract.checkpoint.format import (
    NOTHING_UNCHANGED,
    Regions,
    Tensors,
    UnchangedWeights,
    list_checkpoints,
    save_rank_share,
)
from trainer.locked_memory import HostMemory

ALIGNED = 256  # bytes: where each tensor begins in ``HostMemory``


class CheckpointWriter:
    """Saves checkpoints in a thread, one at a time, and keeps the newest ``keep``.

    ``reserve``: bytes of host memory (``count_host_bytes``) to allocate before the first save, and to keep. On a GPU all saves use the same memory,
    which is kept and grows if needed. On a CPU without ``reserve``, each save frees its memory. ``unchanged``: weights that no save copies.
    Their record is kept until the last save.
    """

    def __init__(
        self,
        parent: Path,
        keep: int,
        rank: int = 0,
        ranks: int = 1,
        reserve: int = 0,
        unchanged: UnchangedWeights = NOTHING_UNCHANGED,
    ) -> None:
        self.parent, self.keep, self.rank, self.ranks = parent, keep, rank, ranks
        self.unchanged = unchanged
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._pool = ThreadPoolExecutor(1, "checkpoint", set_cuda_device, (device,))
        # Hashing and writing run at the lowest priority. The copy does not, because the step waits for it.
        self._disk = ThreadPoolExecutor(1, "checkpoint-disk", lower_thread_priority, (device,))
        self._pending: Future[Path] | None = None
        self._copied = threading.Event()
        self._copied.set()
        self._memory = HostMemory() if reserve or device is not None else None
        if self._memory is not None and reserve:
            self._disk.submit(
                self._memory.reserve, reserve
            )  # an error here is raised again by the first save's own call

    def begin_save(
        self, step: int, contents: dict[str, Tensors], regions: Regions, state: dict[str, Any], is_last: bool = False
    ) -> None:
        """Begin a save as soon as the previous one is done. The tensors may change after ``wait_until_copied``. With ``is_last`` they do not change
        any more: those in host memory are written without a copy.

        Raises: the error of the previous save.
        """
        self.wait_for_last_save()
        self._copied.clear()
        ready = torch.cuda.Event() if torch.cuda.is_available() else None
        if ready is not None:
            ready.record()
        self._pending = self._pool.submit(self._save, step, contents, regions, state, ready, is_last)

    def wait_until_copied(self) -> None:
        """Wait until the tensors of the last save may change."""
        self._copied.wait()

    def raise_if_finished_save_failed(self) -> None:
        """Raise the error of the last save, if that save has finished."""
        if self._pending is not None and self._pending.done():
            self.wait_for_last_save()

    def wait_for_last_save(self) -> Path | None:
        """Wait for the last save. Returns its folder. Raises: its error."""
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
        is_last: bool,
    ) -> Path:
        try:
            memory = None
            if (
                self._memory is not None
            ):  # the disk's thread makes it, because that thread starts no kernels (see ``lock_pages``)
                memory = self._disk.submit(
                    self._memory.reserve, count_host_bytes(t for _, _, t in iterate_checkpoint_tensors(contents))
                ).result()
            in_host_memory = all(tensor.device.type == "cpu" for _, _, tensor in iterate_checkpoint_tensors(contents))
            copied = contents if is_last and in_host_memory else copy_to_host(contents, memory, ready)
        finally:
            self._copied.set()
        written = self._disk.submit(
            save_rank_share, self.parent, step, copied, regions, state, self.rank, self.ranks, self.unchanged
        )
        path = written.result()
        if self.rank == 0:
            for _, old in list_checkpoints(self.parent)[: -self.keep]:
                if is_last or old != self.unchanged.record:
                    shutil.rmtree(old)
        return path


def set_cuda_device(device: int | None) -> None:
    """Set this thread's CUDA device: each thread has its own."""
    if device is not None:
        torch.cuda.set_device(device)


def lower_thread_priority(device: int | None) -> None:
    """Give this thread the lowest priority. Linux keeps a nice value for each thread (setpriority(2), notes)."""
    set_cuda_device(device)
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def count_host_bytes(tensors: Iterable[Tensor]) -> int:
    """The bytes that copies of these tensors take in ``HostMemory``."""
    return sum(count_padded_bytes(tensor) for tensor in tensors)


def count_padded_bytes(tensor: Tensor) -> int:
    return -(-tensor.nbytes // ALIGNED) * ALIGNED


def iterate_checkpoint_tensors(contents: dict[str, Tensors]) -> Iterator[tuple[str, str, Tensor]]:
    """Yield (kind, name, tensor) of each tensor."""
    return ((kind, name, tensor) for kind, tensors in contents.items() for name, tensor in tensors.items())


def copy_to_host(
    contents: dict[str, Tensors], memory: Tensor | None = None, ready: torch.cuda.Event | None = None
) -> dict[str, Tensors]:
    """Copies of all tensors, one after the other in ``memory``, or without ``memory`` each in its own. Copies from a GPU are made on a separate
    stream, after ``ready``."""
    copied: dict[str, Tensors] = {kind: {} for kind in contents}
    start = 0
    for kind, name, tensor in iterate_checkpoint_tensors(contents):
        if memory is None:
            copied[kind][name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        else:
            copied[kind][name] = memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            start += count_padded_bytes(tensor)
    if ready is None:  # by numpy: torch would start threads of its own, which take the cores from the step
        for kind, name, tensor in iterate_checkpoint_tensors(contents):
            np.copyto(_bytes(copied[kind][name]), _bytes(tensor.detach().contiguous()))
        return copied
    stream = torch.cuda.Stream()
    stream.wait_event(ready)
    with torch.cuda.stream(stream):
        for kind, name, tensor in iterate_checkpoint_tensors(contents):
            copied[kind][name].copy_(tensor.detach(), non_blocking=True)
    stream.synchronize()
    return copied


def _bytes(tensor: Tensor) -> Any:
    return tensor.reshape(-1).view(torch.uint8).numpy()
