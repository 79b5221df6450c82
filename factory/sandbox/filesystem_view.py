"""Defines the file system and the environment that a sandboxed command sees.

Paths inside are the same as outside, except for ``LAUNCHER`` (at ``LAUNCHER_INSIDE``) and paths that a caller mounts at another place. The command
sees files of the system, of the interpreter and of the caller, an empty root, ``/proc`` of its pid namespace, ``/dev`` with harmless devices,
the files ``ETC_FILES``, and ``/tmp`` and ``/dev/shm`` of limited size. Only the last two and the caller's writable folders can be written to.

``/proc`` is read-only: a sandbox that root started is user 0 to the kernel, and could escape by writing core_pattern. With a GPU, the folders of
the command's own processes in ``/proc`` are writable, because CUDA's driver writes the names of its threads there and otherwise does not start
(cuInit returns 304). The folder of the sandbox's init is then hidden, which protects init's memory even without Landlock.
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
USER = 1000  # number of the user and of the group
HOSTNAME = "sandbox"
# Files that are made in /etc. Ranks look up their own host by name, and the sandbox has no name server.
ETC_FILES = {
    "/etc/passwd": f"{HOSTNAME}:x:{USER}:{USER}::/tmp:/bin/sh\n",
    "/etc/hosts": f"127.0.0.1 localhost {HOSTNAME}\n",
}
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
INIT = "/proc/1"  # the folder of a sandbox's init
HIDDEN_PROC_ENTRIES = {"/proc/locks": "/dev/null"}  # the host's /proc/locks would list processes outside the sandbox
GPU_FACTS = ("/sys",)  # a GPU's driver reads facts about the machine there; visible only with a GPU
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives")

# Variables that change which instructions torch uses, or how it compiles, and so the class of the machine (kernels.contract.machine).
MACHINE_CLASS_VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", *devices.COMPILER_SETTINGS)


def list_writable_system_paths(nodes: Sequence[str]) -> list[str]:
    """Return the paths to which a command may write besides the caller's folders, for Landlock. ``nodes``: the device files of its GPUs."""
    return ["/tmp", "/dev", *(["/proc"] if nodes else [])]


def list_shared_proc_entries() -> list[str]:
    """Return the entries of ``/proc`` that belong to no process, without links (``/proc/self``, ``/proc/net``)."""
    return sorted(entry.path for entry in os.scandir("/proc") if not entry.name.isdigit() and not entry.is_symlink())


def list_readonly_system_paths() -> list[str]:
    """Return the paths that are read-only inside, besides ``SYSTEM``."""
    return [path for path in (*SYSTEM_FILES, *list_interpreter_paths()) if os.path.exists(path)]


@functools.cache
def list_interpreter_paths() -> tuple[str, ...]:
    """Return the interpreter's folders outside ``/usr``: its virtual environment, its base, and the targets of its links."""
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


def make_sandbox_environment(cache: Path) -> dict[str, str]:
    """Return the environment of every sandboxed command, independent of the factory's. Compilers keep their results in ``cache``."""
    return {
        "PATH": f"{os.path.dirname(sys.executable)}:/usr/local/bin:/usr/bin:/bin",
        "HOME": "/tmp",
        "TMPDIR": "/tmp",
        "USER": "sandbox",
        "LOGNAME": "sandbox",
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONNOUSERSITE": "1",
        **make_cache_variables(cache),
        # The class of the machine must be the same inside, because code that was compiled for one class may crash in another class.
        **{name: os.environ[name] for name in MACHINE_CLASS_VARIABLES if name in os.environ},
    }


def make_cache_variables(cache: Path) -> dict[str, str]:
    """Return the variables that name the folders in which compilers keep their results."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"), "TRITON_CACHE_DIR": str(cache / "triton")}


def _inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")
