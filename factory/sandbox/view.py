"""What a sandboxed command sees: its file system and its environment.

Paths are the same inside, except ``LAUNCHER``, which is at ``LAUNCHER_INSIDE``, and those that a caller gives another place. Besides the
system's, the interpreter's and the caller's: an empty root, ``/proc`` of the pid namespace, ``/dev`` with the harmless devices, the files ``ETC``,
and ``/tmp`` and ``/dev/shm`` of a limited size. Only these two and the caller's writable folders are writable. ``/proc`` is not, because a sandbox
that root started is user 0 to the kernel, and writing core_pattern would be a way out. With a GPU the folders of the command's own processes are
writable in it, and nothing else there: CUDA's driver names its threads in them, and does not start where it cannot (cuInit answers 304). The folder
of the sandbox's init is hidden then, so that its memory is out of reach without Landlock, too. What the command can change there (its OOM score, say)
is its own.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from factory.core import devices

LAUNCHER = Path(__file__).with_name("launch.py")
LAUNCHER_INSIDE = "/run/launch.py"
USER = 1000  # and group
HOSTNAME = "sandbox"
# The files of /etc that are made: ranks look themselves up by name, and there is no name server.
ETC = {
    "/etc/passwd": f"{HOSTNAME}:x:{USER}:{USER}::/tmp:/bin/sh\n",
    "/etc/hosts": f"127.0.0.1 localhost {HOSTNAME}\n",
}
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
INIT = "/proc/1"  # of a sandbox: the process that ends with it
HIDDEN_IN_PROC = {
    "/proc/locks": "/dev/null"
}  # it would name processes outside: by the pid namespace of the /proc that is bound
GPU_FACTS = ("/sys",)  # where a GPU's driver reads about the machine; visible only with a GPU
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives")

# These change which of the processor's instructions torch uses, and so the class of the machine (kernels.contract.machine), or what it compiles.
VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", *devices.COMPILER)


def writable_system(nodes: Sequence[str]) -> list[str]:
    """Where a command may write besides the caller's folders, as Landlock is told; ``nodes``: the device files of its GPUs."""
    return ["/tmp", "/dev", *(["/proc"] if nodes else [])]


def shared_proc_entries() -> list[str]:
    """The entries of ``/proc`` that belong to no process, without links (``/proc/self``, ``/proc/net``)."""
    return sorted(entry.path for entry in os.scandir("/proc") if not entry.name.isdigit() and not entry.is_symlink())


def system_files() -> list[str]:
    """What is read-only inside besides ``SYSTEM``."""
    return [path for path in (*SYSTEM_FILES, *interpreter_paths()) if os.path.exists(path)]


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


def clean_environment(cache: Path) -> dict[str, str]:
    """What every sandboxed command gets, whatever the factory's own environment is; compile caches go to ``cache``."""
    return {
        "PATH": f"{os.path.dirname(sys.executable)}:/usr/local/bin:/usr/bin:/bin",
        "HOME": "/tmp",
        "TMPDIR": "/tmp",
        "USER": "sandbox",
        "LOGNAME": "sandbox",
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONNOUSERSITE": "1",
        **cache_variables(cache),
        # The class of the machine must be the same inside: code compiled for one class crashes in a process of another.
        **{name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def cache_variables(cache: Path) -> dict[str, str]:
    """Where compilers keep what they made."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"), "TRITON_CACHE_DIR": str(cache / "triton")}


def _inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")
