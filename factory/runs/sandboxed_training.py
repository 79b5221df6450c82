"""Trains arms in sequence in one sandboxed trainer: arms of untrusted code, or of code that is replayed.

For a single arm, the folder is ready before the trainer starts, as for a segment. For several arms the trainer starts once with all folders
(``python -m trainer --wait …``). When it waits for an arm, it marks the folder. It gets the arm as ``segment.json`` when the caller
requests the arm. So start-up and compilation are not timed, and the trainer cannot compute an arm in advance. While the caller reads the files of
an arm, the trainer waits. Time is measured outside the sandbox: wall time, and the CPU time of the sandbox's processes.

Code in the sandbox may write to all arms' folders at any time. So the factory opens these folders before the code starts, reads through the
descriptors, and follows no link in them. The code starts with an empty compile cache, because the cache of live code is not trusted.
"""

from __future__ import annotations

import contextvars
import errno
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Collection, Generator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from factory.core import devices
from factory.core.faults import is_machine_fault_unrelated_to_files
from factory.core.path_removal import remove_path
from factory.runs.arm import Arm, Spec
from factory.runs.trainer_folder import write_spec_into_open_folder
from factory.sandbox import cpu_clock, sandbox
from factory.sandbox.cpu_clock import UsedCpuSeconds
from factory.sandbox.sandbox import SandboxLimits
from kernels.contract.message import Message
from trainer.contract.checkpoint.format import format_checkpoint_name

POLL_SECONDS = 0.003


@dataclass(frozen=True)
class ArmRunEnd:
    """How the training of an arm ended. ``failed``: why there is no last checkpoint; '' if ``folder`` has one."""

    folder: Path
    seconds: float = 0.0  # wall time since the trainer got the arm, or started with it
    failed: str = ""
    out_of_time: bool = False  # a time limit ended the arm, which says nothing about its code
    cpu: UsedCpuSeconds | None = None  # CPU time of the sandbox in this time; None: unknown, or there was only one arm
    opened: int = -1  # descriptor of ``folder`` if there are several arms, valid until the iterator is closed
    init: int = 0  # process number of the init of the sandbox, which runs until the iterator is closed; 0: there was only one arm


def train_sandboxed(
    output: Path, code: Path, arms: Mapping[Path, Arm], wall_seconds: float, allowed: Callable[[], float] | None = None
) -> Generator[ArmRunEnd, None, None]:
    """Train ``arms`` in their folders below ``output``, each arm when the iterator is asked for it. The trainer may write only there.

    The iterator ends after the first failed arm. The caller must close it, which ends the trainer. If the base of an arm has steps after the arm's
    last checkpoint, the trainer is ended at this checkpoint. ``wall_seconds``: the limit for all arms together. ``allowed``: returns, when an arm is
    requested, the seconds that it may take.
    Raises: IsolationError; OSError for a fault of the machine.
    """
    with ExitStack() as held:
        waiting = [_Waiting.made(folder, arm, held) for folder, arm in arms.items()]
        if len(waiting) == 1:
            write_spec_into_open_folder(waiting[0].opened, waiting[0].spec)
        held.enter_context(devices.hold_device())  # the wait for a device does not count
        trainer = _Trainer(held, output, code, arms, wall_seconds)
        for one in waiting:
            ended = trainer.train(one, shown=len(waiting) == 1, allowed=allowed() if allowed else math.inf)
            yield ended
            if ended.failed:
                return


@dataclass(frozen=True)
class _Waiting:
    """An arm's folder that has all files but its specification."""

    path: Path
    opened: int
    spec: Spec
    last: int
    holds: frozenset[str]  # names of its files, and of the waiting trainer's mark

    @classmethod
    def made(cls, path: Path, arm: Arm, held: ExitStack) -> _Waiting:
        remove_path(path)  # left by an earlier process
        path.mkdir(parents=True)
        if arm.resumed_checkpoint is not None:
            shutil.copytree(arm.resumed_checkpoint, path / "checkpoints" / arm.resumed_checkpoint.name)
        if arm.kernels:
            (path / "kernels.yaml").write_text(arm.kernels)
        opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        held.callback(os.close, opened)
        spec = arm.make_spec(path / "kernels.yaml" if arm.kernels else None)
        return cls(path, opened, spec, arm.last_step, frozenset(os.listdir(path)) | {"ready"})


class _Trainer:
    """Runs one trainer in the sandbox, and the thread that waits for its end."""

    def __init__(
        self, held: ExitStack, output: Path, code: Path, arms: Mapping[Path, Arm], wall_seconds: float
    ) -> None:
        self._enough, self._inits, self._late = threading.Event(), list[int](), False
        python = next(iter(arms.values())).environment
        command = [python or sys.executable, "-m", "trainer", *["--wait"][: len(arms) - 1], *map(str, arms)]
        reads = {path for arm in arms.values() for path in _read_by(arm) if not path.is_relative_to(output)}
        of_python = [Path(path).parent.parent for path in (python, os.path.realpath(python)) if python]
        limits = _limits(arms.values(), output, wall_seconds)
        self._process = Future[sandbox.SandboxResult]()
        context = contextvars.copy_context()  # contains the held device

        def run() -> None:
            try:
                result = context.run(
                    sandbox.run_in_sandbox, command, output=output, readonly=[code, *sorted(reads), *of_python], cwd=code, limits=limits,
                    begun=self._inits.append, enough=self._enough,
                )  # fmt: skip
                self._process.set_result(result)
            except BaseException as error:  # raised where the result is requested
                self._process.set_exception(error)

        thread = threading.Thread(target=run, daemon=True)  # a daemon, so that an interrupt does not wait for it
        held.callback(thread.join)
        held.callback(self._enough.set)
        thread.start()

    def train(self, arm: _Waiting, shown: bool, allowed: float) -> ArmRunEnd:
        """Train an arm. ``shown``: the trainer was started with this arm. ``allowed``: the seconds that it may take, with a start of the trainer.

        Raises: IsolationError if nothing was run; OSError.
        """
        used, began = cpu_clock.CpuReading(), time.monotonic()
        deadline = began + allowed
        if not shown:
            if not self._wait_for(arm.opened, "ready", deadline):
                return self._failed(arm.path, 0.0)
            try:
                if set(os.listdir(arm.opened)) - arm.holds:  # older files would be taken for the arm's own
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
                used, began = cpu_clock.read_cpu_seconds(self._inits[0]), time.monotonic()
                write_spec_into_open_folder(arm.opened, arm.spec)
            except OSError as error:  # code in the sandbox took the name
                if is_machine_fault_unrelated_to_files(error):
                    raise
                return ArmRunEnd(
                    arm.path, failed=Message("runs.not_begun", "the run could not begin: {error}", error=error.strerror)
                )
        goes_on = arm.last < arm.spec["last_step"]
        left = f"checkpoints/{format_checkpoint_name(arm.last)}/manifest.json" if goes_on else "result.json"
        there, seconds = self._wait_for(arm.opened, left, deadline), time.monotonic() - began
        if not there:
            return self._failed(arm.path, seconds)
        cpu = (
            cpu_clock.compute_cpu_seconds_between(used, cpu_clock.read_cpu_seconds(self._inits[0]))
            if not shown
            else None
        )
        if goes_on:
            self._enough.set()
            self._process.result()
        return ArmRunEnd(
            arm.path,
            seconds,
            cpu=cpu,
            opened=-1 if shown else arm.opened,
            init=0 if goes_on or shown else self._inits[0],
        )

    def _wait_for(self, folder: int, name: str, deadline: float) -> bool:
        """Wait until a file exists (then it is complete), the trainer has ended, or the deadline ends it. Returns whether the file exists."""
        while True:
            over = self._process.done()
            try:
                os.stat(name, dir_fd=folder, follow_symlinks=False)
                return True
            except OSError:
                if over:
                    return False
            if time.monotonic() > deadline:
                self._late = True
                self._enough.set()
            time.sleep(POLL_SECONDS)

    def _failed(self, path: Path, seconds: float) -> ArmRunEnd:
        result = self._process.result()
        early = Message("runs.ended_early", "the trainer ended before the run was done")
        why = early if result.ok else result.describe_ending()
        return ArmRunEnd(path, seconds, why, result.timed_out or self._late)


def _read_by(arm: Arm) -> list[Path]:
    """Return the token shards and the initial checkpoint. A resumed arm does not read the initial checkpoint, which may be missing."""
    spec = arm.make_spec()
    begins = None if arm.resumed_checkpoint else spec["initial_checkpoint"]
    return [Path(path) for path in (*(shard["path"] for shard in spec["data_plan"]["token_shards"]), begins) if path]


def _limits(arms: Collection[Arm], output: Path, wall_seconds: float) -> SandboxLimits:
    """Return limits that allow a checkpoint of each arm and seven more. The size of a checkpoint is that of the largest one at the start."""
    begins = {Path(path) for arm in arms if (path := arm.resumed_checkpoint or arm.make_spec()["initial_checkpoint"])}
    size = max(
        (sum(file.stat().st_size for file in path.iterdir()) for path in begins if not path.is_relative_to(output)),
        default=0,
    )
    return SandboxLimits(
        wall_seconds=wall_seconds,
        memory=max(SandboxLimits.memory, 8 * size),
        file=max(SandboxLimits.file, 2 * size),
        output=max(SandboxLimits.output, (7 + len(arms)) * size),
    )
