"""Times the runs of one side in one sandboxed trainer (``factory.runs.sandboxed_training``).

The trainer warms up on a run that is not timed. A fresh random seed decides each run's data, so nothing can be computed before the run begins. The
clock stops when the result is there. The weights are read at that moment, so nothing can be computed afterwards. Start-up and compilation are not
timed. Only one side runs at a time, so neither side can slow down the other.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from factory.runs import sandboxed_training
from factory.runs.arm import Arm
from factory.runs.trace import read_live_checkpoint
from factory.runs.untrusted_files import UntrustedFileError
from factory.sandbox.cpu_clock import UsedCpuSeconds
from kernels.contract.message import Message
from trainer.contract.checkpoint.format import Checkpoint, Tensors


@dataclass(frozen=True)
class TimedRun:
    seconds: float  # from the moment when the data plan is revealed to the result, by this process's clock
    weights: Tensors
    rest: Checkpoint | None = None  # its whole checkpoint, for the runs that are compared whole
    early: Tensors = field(default_factory=dict)  # weights of an earlier step, where requested
    cpu: UsedCpuSeconds | None = None  # of the sandbox's processes during the same time; None: unreadable


@dataclass
class PatchSession:
    """The runs of one sandboxed trainer. ``failed``: the error; '': no error."""

    runs: list[TimedRun] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)  # of all runs; the first is the warm-up's
    failed: str = ""
    seconds: float = 0.0  # of the whole session, with the start-up
    out_of_time: bool = False  # the time limit ended the session, which says nothing about the code


def train_timed_session(
    folder: Path,
    code: Path,
    arms: Sequence[Arm],
    origin: Tensors,
    wall_seconds: float,
    runs_with_whole_checkpoint: Collection[int],
    early_steps: Mapping[int, int],
) -> PatchSession:
    """Train ``arms`` one after the other in one sandboxed trainer. The first run is the warm-up.

    Every run must leave a checkpoint from which training can continue. ``runs_with_whole_checkpoint``: the numbers of the runs whose
    whole checkpoint is returned. ``early_steps``: number of a run → an earlier step; the weights after this step are returned too. Raises:
    IsolationError; OSError for a fault of the machine.
    """
    first = 1 + secrets.randbelow(90_000)  # the folders have names like those of live segments
    named = {folder / "segments" / f"{first + number:05d}-trunk": arm for number, arm in enumerate(arms)}
    session, began = PatchSession(folders=list(named)), time.monotonic()
    with closing(sandboxed_training.train_sandboxed(folder, code, named, wall_seconds)) as trained:
        for number, (arm, ended) in enumerate(zip(arms, trained, strict=False)):
            if ended.failed:
                session.failed, session.out_of_time = ended.failed, ended.out_of_time
            elif number:
                try:  # read everything of each run, so that code cannot know which runs are compared
                    left = read_live_checkpoint(ended.opened, arm.last_step, origin, folder.parent)
                    before = {}
                    if number in early_steps:
                        before = read_live_checkpoint(ended.opened, early_steps[number], origin, folder.parent).model
                except UntrustedFileError as error:
                    session.failed = error.message
                    break
                rest = left if number in runs_with_whole_checkpoint else None
                session.runs.append(TimedRun(ended.seconds, left.model, rest, before, ended.cpu))
        if session.failed:
            session.failed = Message(
                "patch.run_failed", "run {run} failed: {problem}", run=number, problem=session.failed
            )
    session.seconds = time.monotonic() - began
    return session
