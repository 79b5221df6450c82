"""Trains arms in one sandboxed trainer, one after the other, with code that is not trusted, or that is run again to see what it does.

A single arm finds its folder ready when its trainer starts, as a segment does. A trainer of several is started once, with all their folders
(``python -m trainer --wait …``), says in each that it waits for it, and is shown an arm by its ``segment.json`` when the caller asks for it:
start-up and compilation are not timed, and nothing of an arm can be computed before. While the caller reads what an arm left, the
trainer waits. Time is taken here, outside: of the clock, and of the CPU by the sandbox's processes.

What runs in the sandbox may write in all of its folders at any time, so that they are entered through descriptors of folders that were made
before it began, and no link in them is followed. It compiles for itself: what live code compiled is not trusted.
"""

from __future__ import annotations

import contextvars
import errno
import os
import shutil
import sys
import threading
import time
from collections.abc import Collection, Generator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from factory.core import devices
from factory.core.faults import is_of_no_file
from factory.core.removal import remove
from factory.runs.arm import Arm, Spec
from factory.runs.folders import reveal
from factory.sandbox import clock, sandbox
from factory.sandbox.clock import CpuSeconds
from factory.sandbox.sandbox import Limits
from trainer.contract.checkpoint.format import name_of

POLL_SECONDS = 0.003


@dataclass(frozen=True)
class Ended:
    """How an arm ended. ``failed``: why there is no last checkpoint; '': there is one in ``folder``."""

    folder: Path
    seconds: float = 0.0  # from when it was shown to the trainer, or the trainer was started with it
    failed: str = ""
    out_of_time: bool = False  # a time limit ended it, which says nothing about its code
    cpu: CpuSeconds | None = None  # of the sandbox over the same seconds; None: of a single arm, or not known
    opened: int = -1  # of one of several: the descriptor of ``folder``, until the iterator is closed


def train(output: Path, code: Path, arms: Mapping[Path, Arm], wall_seconds: float) -> Generator[Ended, None, None]:
    """Train ``arms``, by their folders below ``output``, which is all that their trainer may write in; each when it is asked for.

    The iterator ends after the first that fails. Close it: that ends the trainer. Of an arm that would go on the trainer ends at its last
    checkpoint. ``wall_seconds``: of all together. Raises: IsolationError; OSError for a fault of the machine.
    """
    with ExitStack() as held:
        waiting = [_Waiting.made(folder, arm, held) for folder, arm in arms.items()]
        if len(waiting) == 1:
            reveal(waiting[0].opened, waiting[0].spec)
        held.enter_context(devices.one())  # others may hold it for long, which does not count
        trainer = _Trainer(held, output, code, arms, wall_seconds)
        for one in waiting:
            ended = trainer.train(one, shown=len(waiting) == 1)
            yield ended
            if ended.failed:
                return


@dataclass(frozen=True)
class _Waiting:
    """An arm's folder, with all but the specification that shows it."""

    path: Path
    opened: int
    spec: Spec
    last: int
    holds: frozenset[str]  # names, with the one that says that the trainer waits for it

    @classmethod
    def made(cls, path: Path, arm: Arm, held: ExitStack) -> _Waiting:
        remove(path)  # of a process before this one
        path.mkdir(parents=True)
        if arm.resumes is not None:
            shutil.copytree(arm.resumes, path / "checkpoints" / arm.resumes.name)
        if arm.kernels:
            (path / "kernels.yaml").write_text(arm.kernels)
        opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        held.callback(os.close, opened)
        spec = arm.spec(path / "kernels.yaml" if arm.kernels else None)
        return cls(path, opened, spec, arm.last, frozenset(os.listdir(path)) | {"ready"})


class _Trainer:
    """One process tree in the sandbox, which a thread of its own waits for."""

    def __init__(
        self, held: ExitStack, output: Path, code: Path, arms: Mapping[Path, Arm], wall_seconds: float
    ) -> None:
        self._enough, self._inits = threading.Event(), list[int]()
        python = next(iter(arms.values())).environment
        command = [python or sys.executable, "-m", "trainer", *["--wait"][: len(arms) - 1], *map(str, arms)]
        reads = {path for arm in arms.values() for path in _read_by(arm) if not path.is_relative_to(output)}
        of_python = [Path(path).parent.parent for path in (python, os.path.realpath(python)) if python]
        limits = _limits(arms.values(), output, wall_seconds)
        self._process = Future[sandbox.Result]()
        context = contextvars.copy_context()  # with the device that is held

        def run() -> None:
            try:
                result = context.run(
                    sandbox.run, command, output=output, readonly=[code, *sorted(reads), *of_python], cwd=code, limits=limits,
                    begun=self._inits.append, enough=self._enough,
                )  # fmt: skip
                self._process.set_result(result)
            except BaseException as error:  # raised where its end is asked for
                self._process.set_exception(error)

        thread = threading.Thread(target=run, daemon=True)  # an interrupt does not wait for it
        held.callback(thread.join)
        held.callback(self._enough.set)
        thread.start()

    def train(self, arm: _Waiting, shown: bool) -> Ended:
        """``shown``: the trainer was started with it. Raises: IsolationError when nothing was run; OSError."""
        used, began = clock.Reading(), time.monotonic()
        if not shown:
            if not self._wait_for(arm.opened, "ready"):
                return self._failed(arm.path, 0.0)
            try:
                if set(os.listdir(arm.opened)) - arm.holds:  # what was there before would be taken for its own
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
                used, began = clock.read(self._inits[0]), time.monotonic()
                reveal(arm.opened, arm.spec)
            except OSError as error:  # code in the sandbox took the name
                if is_of_no_file(error):
                    raise
                return Ended(arm.path, failed=f"it could not be begun: {error.strerror}")
        goes_on = arm.last < arm.spec["last_step"]
        left = f"checkpoints/{name_of(arm.last)}/manifest.json" if goes_on else "result.json"
        there, seconds = self._wait_for(arm.opened, left), time.monotonic() - began
        if not there:
            return self._failed(arm.path, seconds)
        cpu = clock.between(used, clock.read(self._inits[0])) if not shown else None
        if goes_on:
            self._enough.set()
            self._process.result()
        return Ended(arm.path, seconds, cpu=cpu, opened=-1 if shown else arm.opened)

    def _wait_for(self, folder: int, name: str) -> bool:
        """Is the file there? Each is renamed into place, so it is whole; the trainer may have ended right after."""
        while True:
            over = self._process.done()
            try:
                os.stat(name, dir_fd=folder, follow_symlinks=False)
                return True
            except OSError:
                if over:
                    return False
            time.sleep(POLL_SECONDS)

    def _failed(self, path: Path, seconds: float) -> Ended:
        result = self._process.result()
        why = "the trainer ended before it was done" if result.ok else result.why()
        return Ended(path, seconds, why, result.timed_out)


def _read_by(arm: Arm) -> list[Path]:
    """The shards, and the checkpoint that it begins with: one that resumes does not read it, and it may be gone."""
    spec = arm.spec()
    begins = None if arm.resumes else spec["initial_checkpoint"]
    return [Path(path) for path in (*(shard["path"] for shard in spec["data_plan"]["token_shards"]), begins) if path]


def _limits(arms: Collection[Arm], output: Path, wall_seconds: float) -> Limits:
    """Room for a checkpoint of each arm, and a few being written, by the size of what they begin with."""
    begins = {Path(path) for arm in arms if (path := arm.resumes or arm.spec()["initial_checkpoint"])}
    size = max(
        (sum(file.stat().st_size for file in path.iterdir()) for path in begins if not path.is_relative_to(output)),
        default=0,
    )
    return Limits(
        wall_seconds=wall_seconds,
        memory=max(Limits.memory, 8 * size),
        file=max(Limits.file, 2 * size),
        output=max(Limits.output, (7 + len(arms)) * size),
    )
