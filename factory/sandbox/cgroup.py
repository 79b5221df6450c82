"""Limits the tasks (processes and threads) of a sandbox by a control group, if this process may make one.

A fork bomb grows faster than the watch checks, and the kernel exempts root from RLIMIT_NPROC: only a control group stops it in time. Versions 1
and 2 are tried. Without either, only the rlimit and the watch limit tasks. A group has the name of the thread that made it, and a thread uses
one group at a time: any thread can therefore find unused groups.
Source: kernel documentation, admin-guide/cgroup-v1/pids.rst and admin-guide/cgroup-v2.rst.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from factory.core.errors import IsolationError

MOUNT = Path("/sys/fs/cgroup")
PREFIX = "factory-sandbox-"


@contextlib.contextmanager
def make_task_group(tasks: int) -> Iterator[Path | None]:
    """Make a control group of at most ``tasks`` processes and threads. Yields None if that is impossible. Removed after the block."""
    group = next((made for parent in _parents() if (made := _make(parent, tasks))), None)
    try:
        yield group
    finally:
        if group is not None:
            _remove(group)  # the kernel refuses while the last process ends; a later call then removes the group
            _clear(group.parent)


def move_into_group(group: Path, init: int) -> None:
    """Move a namespace's init and its child, the waiting launcher, into the group. Their later children start in the group.

    Raises: IsolationError.
    """
    members = group / "cgroup.procs"
    try:
        members.write_text(str(init))  # first, so that its next child starts in the group
        for child in _children(init):
            members.write_text(child)
    except ProcessLookupError:
        pass  # the process ended at once; the caller's wait reports why
    except OSError as error:
        raise IsolationError(
            "sandbox.no_control_group",
            "The sandbox cannot be put into its control group {group}: {why}",
            group=group,
            why=str(error),
        ) from error


def _children(process: int) -> list[str]:
    try:
        return Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except FileNotFoundError:
        return []


def _parents() -> list[Path]:
    """Return the folders to try for a new group: below our own group, and (version 2) at the top, where controllers are usually on."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    own = {controllers: path.lstrip("/") for _, controllers, path in (line.split(":", 2) for line in lines)}
    old = [MOUNT / "pids" / own["pids"]] if "pids" in own else []
    return [*old, MOUNT / own.get("", ""), MOUNT]


def _make(parent: Path, tasks: int) -> Path | None:
    group = parent / f"{PREFIX}{os.getpid()}-{threading.get_native_id()}-{secrets.token_hex(4)}"
    try:
        group.mkdir(mode=0o700)
        if not (group / "pids.max").exists():  # not a control group, or one without this controller
            raise FileNotFoundError
        (group / "pids.max").write_text(str(tasks))
        return group
    except OSError:
        _remove(group)
        return None


def _remove(group: Path) -> None:
    for _ in range(20):
        with contextlib.suppress(OSError):
            group.rmdir()
        if not group.exists():
            break
        time.sleep(0.005)


def _clear(parent: Path) -> None:
    """Remove the groups of ended threads, and groups that this thread could not remove earlier."""
    for group in parent.glob(f"{PREFIX}*"):
        process, *thread, _ = group.name.removeprefix(PREFIX).split("-")  # groups of older versions name no thread
        maker = Path("/proc", process, "task", *thread)
        if maker == _this_thread() or not maker.exists():
            with contextlib.suppress(OSError):
                group.rmdir()


def _this_thread() -> Path:
    return Path(f"/proc/{os.getpid()}/task/{threading.get_native_id()}")
