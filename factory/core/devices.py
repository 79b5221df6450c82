"""The machine's devices, one holder each: what is timed has its device alone, whatever else this process does meanwhile.

Agents that run in parallel wait here for a device: one of the GPUs, or the CPU as one device.
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
# torch.compile precompiles a header of 160 MB into /tmp, which every sandbox has empty: 4 to 8 s of each of its processes, for 1 s less
# of a kernel's compilation. With an empty cache it also compiles a program for each vector extension of the processor, to test the compiler:
# 6 to 9 s of a core. Every x86 compiler that builds the rest builds AVX2 and AVX-512, so that test is skipped on x86 (newer extensions are
# still tested); an ARM compiler may lack SVE2. Both are set outside sandboxes too: names in the cache contain the flags.
PRECOMPILED = "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"
COMPILER = {PRECOMPILED: "0"} | ({"TORCHINDUCTOR_VEC_ISA_OK": "1"} if platform.machine() == "x86_64" else {})
Found = TypeVar("Found")
_first = threading.Lock()
_held: ContextVar[str | None] = ContextVar("device", default=None)


@contextmanager
def one() -> Iterator[None]:
    """Hold a device until the block ends; waits for a free one. A caller that holds one already keeps it."""
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


def kind() -> str:
    """Where training runs on this machine, as kernels.yaml names it: 'cuda' or 'cpu'."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def compiled(root: Path, commit: str) -> Path:
    """Where the approved code of ``commit`` in the workspace ``root`` keeps what compilers made: ``inductor/`` and ``triton/``
    (``factory.sandbox.view.cache_variables``).

    By class of machine, as a compiler of one may use instructions that another does not have; and by commit, as code that reads what other
    code compiled runs it.
    """
    from kernels.contract.machine import here

    return root / "cache" / f"code-{commit[:12]}-{here().name}"


def environment() -> dict[str, str]:
    """The environment that restricts a process to the held device; empty on a CPU, or while none is held."""
    name = _held.get()
    return {"CUDA_VISIBLE_DEVICES": name} if name else {}


def label() -> str:
    """A suffix for folders that holders of another device may not share; empty for the CPU."""
    return f"-{_held.get()}" if _held.get() else ""


def nodes(every: bool = False) -> list[str]:
    """The files in ``/dev`` that a process needs for the held GPU; none on a CPU, or while none is held (``every``: also then).

    ``environment`` selects one of several GPUs: NVIDIA's driver numbers all that it sees.
    """
    found = [path for pattern in GPU_FILES for path in Path("/dev").glob(pattern)] if every or _held.get() else []
    return sorted(str(path) for path in found if not path.is_dir())


def side_by_side(jobs: Sequence[Callable[[], Found]]) -> list[Found]:
    """Run ``jobs`` at once, a thread each, and wait for all; their results in order.

    The first error among them is raised after all have ended. An interrupt is raised at once: the threads end with the process.
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
def names() -> list[str]:
    """Of the devices that this process may use, a GPU each; the CPU's is empty."""
    import torch

    count = torch.cuda.device_count()
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return (visible[:count] if visible else [str(number) for number in range(count)]) or [""]


@functools.cache
def _free() -> queue.SimpleQueue[str]:
    """The names of the devices that are free."""
    free: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in names():
        free.put(name)
    return free
