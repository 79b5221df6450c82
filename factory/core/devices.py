"""Gives each device of the machine to one thread at a time, so that nothing disturbs a timing.

Agents that run in parallel wait here for a device: one of the GPUs, or the whole CPU as one device.
"""

from __future__ import annotations

import functools
import os
import platform
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TypeVar

GPU_FILES = ("nvidia*", "nvidia-caps/*", "kfd", "dri/*", "dxg")  # of NVIDIA, AMD, WSL
# torch.compile precompiles a header of 160 MB into /tmp. Each sandbox starts with an empty /tmp: the header costs each process 4 to 8 s and
# saves 1 s of a kernel's compilation. With an empty cache torch.compile also tests the compiler with a program for each vector extension
# of the processor: 6 to 9 s of a core. On x86 that test is skipped, since compilers there have AVX2 and AVX-512 (newer extensions are still
# tested). An ARM compiler may lack SVE2. Both variables are set outside sandboxes too: names in the cache contain the flags.
PRECOMPILE_HEADERS = "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"
COMPILER_SETTINGS = {PRECOMPILE_HEADERS: "0"} | (
    {"TORCHINDUCTOR_VEC_ISA_OK": "1"} if platform.machine() == "x86_64" else {}
)
Found = TypeVar("Found")
_first = threading.Lock()
_held: ContextVar[str | None] = ContextVar("device", default=None)


@contextmanager
def hold_device() -> Iterator[None]:
    """Wait for a free device and hold it until the block ends. A caller that already holds a device keeps it."""
    if _held.get() is not None:
        yield
        return
    with _first:
        free = _free()
    name = free.get()
    token = _held.set(name)
    try:
        yield
    finally:
        _held.reset(token)
        free.put(name)


def get_device_kind() -> str:
    """Return the kind of device that trains on this machine, as kernels.yaml names it: 'cuda' or 'cpu'."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def get_compiled_code_folder(root: Path, commit: str) -> Path:
    """Return the folder of compiled kernels for the approved code of ``commit`` in the workspace ``root``: ``inductor/`` and ``triton/``.

    Each class of machine has its own folder, since compilers use instructions that other machines lack. Each commit has its own folder, so that
    code never runs the compiled kernels of another commit. See ``factory.sandbox.filesystem_view.make_cache_variables``.
    """
    from kernels.contract.machine import describe_this_machine

    return root / "cache" / f"code-{commit[:12]}-{describe_this_machine().name}"


def make_device_environment() -> dict[str, str]:
    """Return the environment variables that restrict a process to the held device; none on a CPU, or while no device is held."""
    name = _held.get()
    return {"CUDA_VISIBLE_DEVICES": name} if name else {}


def get_device_folder_suffix() -> str:
    """Return a suffix for the names of folders that belong to the held device alone; '' for the CPU."""
    return f"-{_held.get()}" if _held.get() else ""


def list_gpu_device_files(all_gpus: bool = False) -> list[str]:
    """Return the files in ``/dev`` that a process needs for the held GPU; none on a CPU, or while no GPU is held (unless ``all_gpus``).

    The list has the files of all GPUs, since NVIDIA's driver numbers the GPUs that it sees. ``make_device_environment`` selects one GPU.
    """
    found = [path for pattern in GPU_FILES for path in Path("/dev").glob(pattern)] if all_gpus or _held.get() else []
    return sorted(str(path) for path in found if not path.is_dir())


def run_in_parallel(jobs: Sequence[Callable[[], Found]]) -> list[Found]:
    """Run ``jobs`` in parallel, each in a thread, and wait for all. Returns their results in order.

    If jobs failed, raises the error of the first of them, after all jobs have ended. An interrupt is raised at once: the threads end with the
    process.
    """
    if len(jobs) == 1:
        return [jobs[0]()]
    found: dict[int, Found] = {}
    errors: dict[int, BaseException] = {}

    def work(number: int) -> None:
        try:
            found[number] = jobs[number]()
        except BaseException as error:
            errors[number] = error

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[min(errors)]
    return [found[number] for number in range(len(jobs))]


@functools.cache
def list_device_names() -> list[str]:
    """Return the names of the devices that this process may use: one for each GPU, or '' for the CPU."""
    import torch

    count = torch.cuda.device_count()
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return (visible[:count] if visible else [str(number) for number in range(count)]) or [""]


@functools.cache
def _free() -> queue.SimpleQueue[str]:
    """Return the queue of the names of free devices."""
    free: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in list_device_names():
        free.put(name)
    return free
