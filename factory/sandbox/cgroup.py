"""Puts a sandbox into control groups, if this process may make them: they limit its tasks (processes and threads) and memory, and can freeze it.

A fork bomb grows between two checks of the watch, and the kernel exempts root from RLIMIT_NPROC, so only a control group stops it in time.
Control groups of versions 1 and 2 are tried. Without them, only the rlimit and the watch limit tasks. The name of a group contains the thread that
made it, and a thread uses one sandbox's groups at a time, so any thread can find unused groups.
Source: kernel documentation, admin-guide/cgroup-v1/pids.rst, admin-guide/cgroup-v1/memory.rst and admin-guide/cgroup-v2.rst.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from factory.core.errors import IsolationError

MOUNT = Path("/sys/fs/cgroup")
HYBRID = MOUNT / "unified"  # where version 2 is mounted beside the controllers of version 1
PREFIX = "factory-sandbox-"
TASKS, FREEZE = "pids.max", "cgroup.freeze"  # the files that set a limit of tasks and that freeze
MEMORY = ("memory.max", "memory.limit_in_bytes")  # the file that sets a limit of memory, in version 2 and 1
SWAP = ("memory.swap.max", "memory.memsw.limit_in_bytes")  # of swapped memory alone; of memory and swapped memory
# Where the kernel counts what it refused: (file, first word of the line).
DENIED_TASKS = (("pids.events", "max"),)
OOM_KILLS = (("memory.events", "oom_kill"), ("memory.oom_control", "oom_kill"))


@dataclass(frozen=True)
class ControlGroups:
    """New groups of one sandbox, at most one in each hierarchy, and the files that work in them: ``TASKS``, ``FREEZE`` and one of ``MEMORY``."""

    folders: tuple[Path, ...] = ()
    files: frozenset[str] = frozenset()

    @property
    def limits_tasks(self) -> bool:
        return TASKS in self.files

    @property
    def limits_memory(self) -> bool:
        return not self.files.isdisjoint(MEMORY)

    def count_denied_tasks(self) -> int:
        """Return how often the kernel refused a new process or thread."""
        return self._count(DENIED_TASKS)

    def count_oom_kills(self) -> int:
        """Return how many processes the kernel killed because the group's memory was used up."""
        return self._count(OOM_KILLS)

    def _count(self, places: Iterable[tuple[str, str]]) -> int:
        found = 0
        for group in self.folders:
            for name, word in places:
                with contextlib.suppress(OSError):
                    lines = (line.split() for line in (group / name).read_text().splitlines())
                    found += sum(int(count) for key, count in lines if key == word)
        return found


@contextlib.contextmanager
def make_control_groups(max_tasks: int, max_memory: int | None = None) -> Iterator[ControlGroups]:
    """Yield new control groups for at most ``max_tasks`` processes and threads and ``max_memory`` bytes. They are removed after the block.

    The memory includes files in ``/tmp`` and ``/dev/shm``, and nothing is swapped out. What this machine does not allow is missing in
    ``ControlGroups.files``.
    """
    wanted = {TASKS: str(max_tasks), FREEZE: "0"}
    if max_memory is not None:
        wanted |= dict.fromkeys(MEMORY, str(max_memory)) | {SWAP[0]: "0", SWAP[1]: str(max_memory)}
    made = dict[Path, frozenset[str]]()
    for parents in _list_hierarchies():
        missing = {name: value for name, value in wanted.items() if not any(name in found for found in made.values())}
        tried = {group: found for parent in parents for group, found in [_make(parent, missing)] if found}
        best = max(tried, key=lambda group: len(tried[group]), default=None)
        for group, found in tried.items():
            if group == best:
                made[group] = found
            else:
                _remove(group)
    try:
        yield ControlGroups(tuple(made), frozenset[str]().union(*made.values()))
    finally:
        for group in made:
            _remove(group)  # the kernel refuses while the last process is ending; then a later call removes the group
            _clear(group.parent)


def move_sandbox_into_groups(groups: ControlGroups, init_pid: int) -> None:
    """Move the init of a sandbox and its child (the launcher, which waits) into the groups. Processes that they start later begin there.

    Raises: IsolationError.
    """
    for group in groups.folders:
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


def find_freezer(init_pid: int) -> Path | None:
    """Return the group of ``make_control_groups`` that can freeze the sandbox of ``init_pid``; None if there is none."""
    try:
        lines = Path(f"/proc/{init_pid}/cgroup").read_text().splitlines()
    except OSError:
        return None
    paths = [line.removeprefix("0::").lstrip("/") for line in lines if line.startswith("0::")]
    found = [mount / path for path in paths if Path(path).name.startswith(PREFIX) for mount in (MOUNT, HYBRID)]
    return next((group for group in found if (group / FREEZE).exists()), None)


def read_machine_memory() -> int:
    """Return the bytes of memory that this process may use: the machine's, or less if a control group above it, as of a container, allows less."""
    own = _read_own_groups()
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for mount, path in ((MOUNT, own.get("", "")), (MOUNT / "memory", own.get("memory", ""))):
        for folder in (Path(path), *Path(path).parents):
            for name in MEMORY:
                with contextlib.suppress(OSError, ValueError):  # no such group, or its limit is 'max'
                    found.append(int((mount / folder / name).read_text()))
    return min(found)


def _children(process: int) -> list[str]:
    try:
        return Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except FileNotFoundError:
        return []


def _list_hierarchies() -> list[list[Path]]:
    """Return the folders in which to try to make a group, for each hierarchy of which a process is in one group.

    Tried are this process's own group and, for version 2, also the root with its enabled controllers.
    """
    own = _read_own_groups()
    old = [[MOUNT / name / own[name]] for name in ("pids", "memory") if name in own]
    return [*old, [mount / path for mount in (MOUNT, HYBRID) for path in dict.fromkeys((own.get("", ""), ""))]]


def _read_own_groups() -> dict[str, str]:
    """Return the path of this process's group for each controller of version 1, and for version 2 (under '')."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return {}
    return {controllers: path.lstrip("/") for _, controllers, path in (line.split(":", 2) for line in lines)}


def _make(parent: Path, wanted: Mapping[str, str]) -> tuple[Path, frozenset[str]]:
    """Make a group, and write each value of ``wanted`` to its file. Returns the files that took it; none if there is no new group."""
    group = parent / f"{PREFIX}{os.getpid()}-{threading.get_native_id()}-{secrets.token_hex(4)}"
    try:
        group.mkdir(mode=0o700)
    except OSError:
        return group, frozenset()
    taken = set()
    for name, value in wanted.items():
        with contextlib.suppress(OSError):
            if (group / name).exists():  # else it is not a control group, or one without this controller
                (group / name).write_text(value)
                taken.add(name)
    if not taken:
        _remove(group)
    return group, frozenset(taken)


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
