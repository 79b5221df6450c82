"""What a sandboxed command sees: its file system and its environment. Both mechanisms build exactly this."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from factory.core import devices

LAUNCHER = Path(__file__).with_name("launch.py")
LAUNCHER_INSIDE = "/run/launch.py"
PASSWD = "sandbox:x:1000:1000::/tmp:/bin/sh\n"
USER = 1000  # and group
HOSTNAME = "sandbox"
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
GPU_FACTS = ("/sys",)  # where a GPU's driver reads about the machine; visible only with a GPU
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives")

# These change which of the processor's instructions torch uses, and so the class of the machine (kernels.contract.machine), or what it compiles.
VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", *devices.COMPILER)


@dataclass(frozen=True)
class View:
    """Paths are the same inside, except ``LAUNCHER``, which is at ``LAUNCHER_INSIDE``.

    Besides them: an empty root, ``/proc`` of the pid namespace, ``/dev`` with the harmless devices, ``PASSWD`` at ``/etc/passwd``, and
    ``/tmp`` and ``/dev/shm`` of ``tmp`` bytes each. Only these two and ``output`` are writable. ``/proc`` is not, because a sandbox that
    root started is user 0 to the kernel, and writing core_pattern would be a way out.
    """

    links: Mapping[str, str]  # path → where it points
    system: Sequence[str]  # read-only
    given: Sequence[str]  # read-only; a missing one is an error
    devices: Sequence[str]  # files in /dev, besides the harmless ones
    output: str
    tmp: int
    cwd: str
    environment: Mapping[str, str]
    command: Sequence[str]


def view(
    command: Sequence[str], output: Path, given: Sequence[Path], cwd: Path, extra: Mapping[str, str], tmp: int
) -> View:
    """The system's, the interpreter's and the given paths; a clean environment with ``extra``; the GPU that the caller holds."""
    there = [path for path in SYSTEM if os.path.lexists(path)]
    links = {path: os.readlink(path) for path in there if os.path.islink(path)}
    system = [path for path in there if path not in links]
    system += [path for path in (*SYSTEM_FILES, *interpreter_paths()) if os.path.exists(path)]
    nodes = devices.nodes()
    system += [path for path in GPU_FACTS if nodes and os.path.exists(path)]
    environment = {**_environment(output), **devices.environment(), **extra}
    return View(links, system, list(map(str, given)), nodes, str(output), tmp, str(cwd), environment, command)


@functools.cache
def interpreter_paths() -> tuple[str, ...]:
    """The interpreter's folders outside ``/usr``: the environment, its base, and those that its links go through."""
    folders = [sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix]
    paths = [*folders, *map(os.path.realpath, folders)]
    link = sys.executable
    for _ in range(40):
        if not any(_inside(link, path) for path in (*paths, "/usr")):
            paths.append(link)
        if not os.path.islink(link):
            break
        link = os.path.join(os.path.dirname(link), os.readlink(link))
    return tuple(dict.fromkeys(path for path in paths if not _inside(path, "/usr")))


def _environment(output: Path) -> dict[str, str]:
    cache = output / "cache"
    return {
        "PATH": f"{os.path.dirname(sys.executable)}:/usr/local/bin:/usr/bin:/bin",
        "HOME": "/tmp",
        "TMPDIR": "/tmp",
        "USER": "sandbox",
        "LOGNAME": "sandbox",
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONNOUSERSITE": "1",
        # Idle OpenMP threads that spin slow a busy machine down many times and spoil its timings.
        "OMP_WAIT_POLICY": "PASSIVE",
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        # The class of the machine must be the same inside: code compiled for one class crashes in a process of another.
        **{name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def _inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")
