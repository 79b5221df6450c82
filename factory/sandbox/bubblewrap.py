"""The sandbox by bubblewrap (bwrap ≥ 0.8, which can forbid further user namespaces)."""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Callable

from factory.core.errors import IsolationError
from factory.sandbox import filter as sandbox_filter
from factory.sandbox.view import ETC, HOSTNAME, LAUNCHER, LAUNCHER_INSIDE, USER, View

NAMESPACES = ("--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL", "--die-with-parent")


def command(view: View, status: int, given: Callable[[bytes], int], held: int | None = None) -> list[str]:
    """bubblewrap's command line. It reports on ``status``, keeps ``held`` open while the sandbox is there, and inherits the files that
    ``given`` makes. Raises: IsolationError."""
    arguments = [_found(), *NAMESPACES, "--new-session", "--json-status-fd", str(status)]
    arguments += ["--sync-fd", str(held)] if held is not None else []
    arguments += ["--uid", str(USER), "--gid", str(USER), "--hostname", HOSTNAME]
    if program := sandbox_filter.program():
        arguments += ["--seccomp", str(given(program))]
    arguments += ["--proc", "/proc", "--dev", "/dev"]
    for folder in ("/dev/shm", "/tmp"):
        arguments += ["--size", str(view.tmp), "--tmpfs", folder]
    for path, target in view.links.items():
        arguments += ["--symlink", target, path]
    for path in view.system:
        arguments += ["--ro-bind-try", path, path]
    for path, text in ETC.items():
        arguments += ["--ro-bind-data", str(given(text.encode())), path]
    arguments += ["--ro-bind", str(LAUNCHER), LAUNCHER_INSIDE]
    for path in view.devices:
        arguments += ["--dev-bind", path, path]
    for path, place in view.given:
        arguments += ["--ro-bind", path, place]
    for path in view.writable:
        arguments += ["--bind", path, path]
    for path in ("/proc", "/dev", "/"):
        arguments += ["--remount-ro", path]
    arguments += ["--chdir", view.cwd, "--clearenv"]
    for key, value in view.environment.items():
        arguments += ["--setenv", key, value]
    return [*arguments, "--", *view.command]


def refusal() -> str:
    """Why bubblewrap cannot be used here; '': it can. It is tried once a process."""
    try:
        return _tried(_found())
    except IsolationError as error:
        return str(error)


def version() -> str:
    return subprocess.run([_found(), "--version"], capture_output=True, text=True, check=True).stdout.strip()


def _found() -> str:
    found = shutil.which("bwrap")
    if found is None:
        raise IsolationError("bubblewrap (bwrap) is missing; install it with your system's package manager")
    return found


@functools.cache
def _tried(bwrap: str) -> str:
    words = [bwrap, *NAMESPACES, "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--", "/bin/sh", "-c", ":"]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, env={}, check=False)
    return (
        "" if done.returncode == 0 else f"bubblewrap fails here: {done.stderr.decode(errors='replace').strip()[-300:]}"
    )
