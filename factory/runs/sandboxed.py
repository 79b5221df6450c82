"""Trains arms in the sandbox, with code that is not trusted, or that is run again to see what it does.

``SandboxedTrainer`` trains arms of one code, one after the other. The first finds its folder ready, as a segment's trainer does; where more
may follow, the process waits for them (``python -m trainer --wait``), and each is revealed when it is asked for. It compiles for itself: what
live code compiled is not trusted. What runs in the sandbox may write in all of its folders at any time, so that they are entered through
descriptors of folders that were made before it began, and no link in them is followed.
"""

from __future__ import annotations

import contextvars
import errno
import os
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from factory.core import devices
from factory.core.faults import is_of_no_file
from factory.core.removal import remove
from factory.runs.arm import Arm
from factory.runs.folders import reveal
from factory.sandbox import sandbox
from factory.sandbox.sandbox import Limits, Result
from trainer.contract.checkpoint.format import name_of

POLL_SECONDS = 0.02
AHEAD = 16  # arms that one process waits for
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class Ended:
    """How an arm ended. ``failed``: why there is no last checkpoint; '': there is one in ``folder``."""

    folder: Path
    seconds: float = 0.0
    failed: str = ""
    out_of_time: bool = False


class SandboxedTrainer:
    """Of one code, which sees what its arms need and writes in ``output`` alone.

    names: of the arms' folders below ``output``, in order; no more arms can be trained. python: the interpreter of another environment.
    """

    def __init__(self, output: Path, code: Path, names: Sequence[str], python: str = "") -> None:
        self.output, self.code, self.python = output, code, python
        self._folders = [output / name for name in names]
        self._reads: set[Path] = set()
        self._process: _Process | None = None

    def train(self, arm: Arm, wall_seconds: float) -> Ended:
        """Until there is a checkpoint of the arm's last step. Raises: IsolationError; OSError for a fault of the machine."""
        spec = arm.spec()
        shards = [shard["path"] for shard in spec["data_plan"]["token_shards"]]
        begins = (
            None if arm.resumes else spec["initial_checkpoint"]
        )  # which one that resumes does not read, and may be gone
        reads = {Path(path) for path in (*shards, begins) if path}
        if self._process is None or not self._process.waits or not reads <= self._reads:
            self.close()
            self._reads |= reads
            self._process = _Process(self._folders[:AHEAD])
        folder, process = self._folders.pop(0), self._process
        try:
            process.reveal(arm, spec)
        except OSError as error:  # code in the sandbox took the name
            if is_of_no_file(error):
                raise
            self.close()
            return Ended(folder, failed=f"it could not be begun: {error.strerror}")
        if not process.began:
            process.begin(self, arm, wall_seconds)
            process.holds.wait()  # a device, which others may hold for long
        began = time.monotonic()
        goes_on = arm.last < spec["last_step"]
        there = process.wait_for(folder / ("checkpoints" if goes_on else ""), arm, began + wall_seconds)
        seconds, late = time.monotonic() - began, not process.over.is_set()
        result = self.close() if goes_on or not there else None
        if there:
            return Ended(folder, seconds)
        if late or result is None:
            return Ended(folder, seconds, f"stopped: over its wall limit after {seconds:.1f} s", True)
        return Ended(folder, seconds, result.why(), result.timed_out)

    def close(self) -> Result | None:
        """End the process; returns how it ended. Raises: IsolationError when nothing was run."""
        process, self._process = self._process, None
        return process.end() if process is not None else None

    def command(self, folders: Sequence[Path]) -> list[str]:
        """What trains in ``folders``."""
        wait = ["--wait"] if len(folders) > 1 else []
        return [self.python or sys.executable, "-m", "trainer", *wait, *map(str, folders)]

    def readonly(self) -> list[Path]:
        """What its process sees."""
        of_python = (self.python, os.path.realpath(self.python)) if self.python else ()
        return [self.code, *sorted(self._reads), *(Path(path).parent.parent for path in of_python)]


class _Process:
    """One process, and the folders that it was told of."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders, self.began = list(folders), False
        self.holds, self.over = threading.Event(), threading.Event()
        self._revealed, self._enough = 0, threading.Event()
        self._result: Result | None = None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._opened = []
        for folder in folders:
            remove(folder)  # of a process before this one
            folder.mkdir(parents=True)
            self._opened.append(os.open(folder, FOLDER))

    @property
    def waits(self) -> bool:
        """May another arm be revealed?"""
        return not self.over.is_set() and self._revealed < len(self.folders)

    def reveal(self, arm: Arm, spec: dict[str, Any]) -> None:
        """Fill the next folder. Raises: OSError."""
        path, folder = self.folders[self._revealed], self._opened[self._revealed]
        self._revealed += 1
        if set(os.listdir(folder)) - {"ready"}:  # what waits for it may say so there, and no more
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        if arm.resumes is not None:
            _copy(arm.resumes, folder)
        if arm.kernels:
            _write(folder, "kernels.yaml", arm.kernels.encode())
            spec = spec | {"kernels": str(path / "kernels.yaml")}
        reveal(folder, spec)

    def begin(self, of: SandboxedTrainer, arm: Arm, wall_seconds: float) -> None:
        """Start it. Its own limits are for a caller that does not end it."""
        begins = arm.resumes or arm.base["initial_checkpoint"]
        size = sum(file.stat().st_size for file in Path(begins).iterdir()) if begins else 0
        limits = Limits(
            wall_seconds=wall_seconds * len(self.folders),
            memory=max(Limits.memory, 8 * size),
            file=max(Limits.file, 2 * size),
            output=max(Limits.output, 8 * size),
        )

        def work() -> None:
            try:
                with devices.one():
                    self.holds.set()
                    self._result = sandbox.run(
                        of.command(self.folders), output=of.output, readonly=of.readonly(), cwd=of.code, limits=limits, enough=self._enough
                    )  # fmt: skip
            except BaseException as error:  # raised where its end is waited for
                self._error = error
            finally:
                self.over.set()
                self.holds.set()

        self.began = True
        context = contextvars.copy_context()  # with a device that the caller holds
        self._thread = threading.Thread(target=context.run, args=(work,), daemon=True)
        self._thread.start()

    def wait_for(self, where: Path, arm: Arm, deadline: float) -> bool:
        """Is the last checkpoint there? What is looked for is renamed into place, so it is whole. ``where``: ``checkpoints`` of an arm that would go
        on, else its folder."""
        left = where / name_of(arm.last) / "manifest.json" if where.name == "checkpoints" else where / "result.json"
        while not os.path.lexists(left):
            if self.over.wait(POLL_SECONDS) or time.monotonic() > deadline:
                break  # it may have ended right after it wrote the file
        return os.path.lexists(left)

    def end(self) -> Result | None:
        """Raises: IsolationError when nothing was run."""
        self._enough.set()
        if self._thread is not None:
            self._thread.join()
        for descriptor in self._opened:
            os.close(descriptor)
        if self._error is not None:
            raise self._error
        return self._result


def _copy(checkpoint: Path, folder: int) -> None:
    """A copy of a checkpoint in ``checkpoints`` of an opened folder. Raises: OSError."""
    opened = [folder]
    try:
        for name in ("checkpoints", checkpoint.name):
            os.mkdir(name, dir_fd=opened[-1])
            opened.append(os.open(name, FOLDER, dir_fd=opened[-1]))
        for file in sorted(checkpoint.iterdir()):
            with (
                open(file, "rb") as held,
                os.fdopen(os.open(file.name, NEW_FILE, 0o644, dir_fd=opened[-1]), "wb") as out,
            ):
                shutil.copyfileobj(held, out)
    finally:
        for descriptor in opened[1:]:
            os.close(descriptor)


def _write(folder: int, name: str, content: bytes) -> None:
    with os.fdopen(os.open(name, NEW_FILE, 0o644, dir_fd=folder), "wb") as out:
        out.write(content)
