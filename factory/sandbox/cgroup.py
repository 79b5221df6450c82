"""Limits the tasks (processes and threads) of a sandbox with a control group, if this process may make one.

A fork bomb grows between two checks of the watch, and the kernel exempts root from RLIMIT_NPROC, so only a control group stops it in time.
Control groups of versions 1 and 2 are tried. Without them, only the rlimit and the watch limit tasks. The name of a group contains the thread that
made it, and a thread uses one group at a time, so any thread can find unused groups.
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
def make_limited_control_group(max_tasks: int) -> Iterator[Path | None]:
    """Yield a new control group for at most ``max_tasks`` processes and threads; None if that is impossible. It is removed after the block."""
    group = next((made for parent in _parents() if (made := _make(parent, max_tasks))), None)
    try:
        yield group
    finally:
        if group is not None:
            _remove(group)  # the kernel refuses while the last process is ending; then a later call removes the group
            _clear(group.parent)


def move_sandbox_into_group(group: Path, init_pid: int) -> None:
    """Move the init of a sandbox and its child (the launcher, which waits) into the group. Processes that they start later begin in the group.

    Raises: IsolationError.
    """
    members = group / "cgroup.procs"
    try:
        members.write_text(str(init_pid))  # init first, so that a child that it starts now begins in the group
        for child in _children(init_pid):
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
    """Return the folders in which to try to make a group: this process's own group and, for version 2, the root with its enabled controllers."""
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
    """Remove the groups of threads that have ended, and groups that this thread could not remove earlier."""
    for group in parent.glob(f"{PREFIX}*"):
        process, *thread, _ = group.name.removeprefix(PREFIX).split("-")  # groups of older versions name no thread
        maker = Path("/proc", process, "task", *thread)
        if maker == _this_thread() or not maker.exists():
            with contextlib.suppress(OSError):
                group.rmdir()


def _this_thread() -> Path:
    return Path(f"/proc/{os.getpid()}/task/{threading.get_native_id()}")
