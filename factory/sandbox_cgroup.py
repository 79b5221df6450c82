"""A kernel limit on how many tasks a sandbox may have, where this process may make control groups.

A fork bomb doubles faster than any watch looks, and the kernel exempts root from RLIMIT_NPROC: only a control group
stops it before the machine is full. Both hierarchies are tried; without either, the rlimit and the watch stand alone.
Source: kernel documentation, admin-guide/cgroup-v1/pids.rst and admin-guide/cgroup-v2.rst.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from factory.errors import IsolationError

MOUNT = Path("/sys/fs/cgroup")
PREFIX = "factory-sandbox-"


@contextlib.contextmanager
def task_limit(tasks: int) -> Iterator[Path | None]:
    """A new group that holds at most ``tasks`` processes and threads; None where none can be made. Removed at the end."""
    group = next((made for parent in _parents() if (made := _make(parent, tasks))), None)
    try:
        yield group
    finally:
        if group is not None:
            _remove(group)  # refused while the kernel has not buried its last process: a later factory clears it away
            _clear(group.parent)


def put(group: Path, init: int) -> None:
    """Move a namespace's init and its child, the launcher that waits, into the group; what they start later is born there.

    Raises: IsolationError.
    """
    try:
        (group / "cgroup.procs").write_text(str(init))  # first, so that a child it has not started yet is born there
        for child in Path(f"/proc/{init}/task/{init}/children").read_text().split():
            (group / "cgroup.procs").write_text(child)
    except (ProcessLookupError, FileNotFoundError):
        pass  # it ended at once: whoever waits for it finds out why
    except OSError as error:
        raise IsolationError(f"the sandbox cannot be put into its control group {group}: {error}") from error


def _parents() -> list[Path]:
    """Where a group may be made: below our own, and (version 2) at the top, where controllers are usually on."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    own = {controllers: path.lstrip("/") for _, controllers, path in (line.split(":", 2) for line in lines)}
    old = [MOUNT / "pids" / own["pids"]] if "pids" in own else []
    return [*old, MOUNT / own.get("", ""), MOUNT]


def _make(parent: Path, tasks: int) -> Path | None:
    try:
        group = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=parent))
    except OSError:
        return None
    try:
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
    """Remove the groups that dead factories left."""
    for group in parent.glob(f"{PREFIX}*"):
        maker = group.name.removeprefix(PREFIX).partition("-")[0]
        if maker.isdigit() and not Path(f"/proc/{maker}").exists():
            with contextlib.suppress(OSError):
                group.rmdir()
