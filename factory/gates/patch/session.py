"""One side's timed runs in one sandboxed trainer (``factory.runs.sandboxed``).

The trainer warms up on a run that is not timed. Each run's fresh random seed decides its data, so that nothing can be computed before it is
shown; the clock stops when its result is there, and the weights are read at that moment, so that nothing can be computed after. Start-up
and compilation are not timed on either side. Only one side runs at a time, so that neither can slow the other.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from factory.runs import sandboxed
from factory.runs.arm import Arm
from factory.runs.trace import read_alive
from factory.runs.untrusted_files import UntrustedFileError
from factory.sandbox.clock import CpuSeconds
from trainer.contract.checkpoint.format import Checkpoint, Tensors


@dataclass(frozen=True)
class TimedRun:
    seconds: float  # from the reveal of the data plan to the result, by this process's clock
    weights: Tensors
    rest: Checkpoint | None = None  # all that it left, of the runs that are compared whole
    early: Tensors = field(default_factory=dict)  # of an earlier step, where it was asked for
    cpu: CpuSeconds | None = None  # of the sandbox's processes over the same seconds; None: it could not be read


@dataclass
class PatchSession:
    """The runs of one sandboxed trainer. ``failed``: what went wrong; '': nothing."""

    runs: list[TimedRun] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)  # of all runs, the warm-up's first
    failed: str = ""
    seconds: float = 0.0  # all of it, start-up included
    out_of_time: bool = False  # its time limit ended it, which says nothing about its code


def timed_session(
    folder: Path,
    code: Path,
    arms: Sequence[Arm],
    origin: Tensors,
    wall_seconds: float,
    whole: Collection[int],
    early: Mapping[int, int],
) -> PatchSession:
    """Train ``arms`` one after the other in one sandboxed trainer; the first is the warm-up. Raises: IsolationError; OSError for a fault of
    the machine.

    Every run must leave a checkpoint that training can continue from. ``whole``: the numbers of the runs whose checkpoint is returned
    besides the weights; ``early``: number → an earlier step whose weights are returned too.
    """
    first = 1 + secrets.randbelow(90_000)  # named as live segments are
    named = {folder / "segments" / f"{first + number:05d}-trunk": arm for number, arm in enumerate(arms)}
    session, began = PatchSession(folders=list(named)), time.monotonic()
    with closing(sandboxed.train(folder, code, named, wall_seconds)) as trained:
        for number, (arm, ended) in enumerate(zip(arms, trained, strict=False)):
            if ended.failed:
                session.failed, session.out_of_time = ended.failed, ended.out_of_time
            elif number:
                try:  # all of each run, so that code cannot know which are compared
                    left = read_alive(ended.opened, arm.last, origin, folder.parent)
                    before = {}
                    if number in early:
                        before = read_alive(ended.opened, early[number], origin, folder.parent).model
                except UntrustedFileError as error:
                    session.failed = str(error)
                    break
                rest = left if number in whole else None
                session.runs.append(TimedRun(ended.seconds, left.model, rest, before, ended.cpu))
        if session.failed:
            session.failed = f"run {number}: {session.failed}"
    session.seconds = time.monotonic() - began
    return session
