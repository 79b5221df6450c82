"""Times the runs of one side in one sandboxed trainer (``factory.runs.sandboxed_training``), one run when it is asked for.

The trainer warms up on a run that is not timed. A fresh random seed decides each run's data, so nothing can be computed before the run begins. The
clock stops when the result is there. The weights are read at that moment, so nothing can be computed afterwards. Start-up and compilation are not
timed.

Between its runs a session can stand still (``pause``): all its processes are stopped from outside, and a session that used a CPU meanwhile ends with
an error. So two sessions can take turns, a run each, and neither slows down the other.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from factory.runs import sandboxed_training
from factory.runs.arm import Arm
from factory.runs.trace import read_live_checkpoint
from factory.runs.untrusted_files import UntrustedFileError
from factory.sandbox import freezer
from factory.sandbox.cpu_clock import UsedCpuSeconds
from factory.sandbox.freezer import FrozenSandbox
from kernels.contract.message import Message
from trainer.contract.checkpoint.format import Checkpoint, Tensors

STILL_SECONDS = (
    0.002  # CPU time that a paused session may use: the clock of a thread that is stopped can be read a moment late
)


@dataclass(frozen=True)
class TimedRun:
    seconds: float  # from the moment when the data plan is revealed to the result, by this process's clock
    weights: Tensors
    rest: Checkpoint | None = None  # its whole checkpoint, for the runs that are compared whole
    early: Tensors = field(default_factory=dict)  # weights of an earlier step, where requested
    cpu: UsedCpuSeconds | None = None  # of the sandbox's processes during the same time; None: unreadable
    folder: Path | None = None  # where the run left its files, which a session's later runs may change


class SessionEndedError(Exception):
    """A session ended before its last run. ``why``: the error. ``out_of_time``: a time limit ended it. ``not_still``: it could not be paused.

    A limit and a pause that failed say nothing about the code.
    """

    def __init__(self, why: Message, *, out_of_time: bool = False, not_still: bool = False) -> None:
        super().__init__(why)
        self.why, self.out_of_time, self.not_still = why, out_of_time, not_still


class TimedSession:
    """The runs of ``arms``, one after the other in one sandboxed trainer. The first is the warm-up.

    Every run must leave a checkpoint from which training can continue. ``whole``: the numbers of the runs whose whole checkpoint is
    returned. ``early_steps``: number of a run → an earlier step; the weights after this step are returned too. ``wall_seconds``: the limit for the
    whole session, pauses included. ``close`` ends the trainer.
    """

    def __init__(
        self,
        folder: Path,
        code: Path,
        arms: Sequence[Arm],
        origin: Tensors,
        wall_seconds: float,
        whole: Collection[int],
        early_steps: Mapping[int, int],
    ) -> None:
        first = 1 + secrets.randbelow(90_000)  # the folders have names like those of live segments
        # The last arm is never requested: the trainer waits for it, and does not end while its last run is read.
        named = {
            folder / "segments" / f"{first + number:05d}-trunk": arm for number, arm in enumerate([*arms, arms[0]])
        }
        self.failed: str = ""  # why the session ended early
        self._allowed = wall_seconds  # of the next run
        self._arms, self._origin, self._whole, self._early_steps = list(arms), origin, whole, early_steps
        self._copies, self._next, self._init = folder.parent, 0, 0
        self._frozen: FrozenSandbox | None = None
        self._trained = sandboxed_training.train_sandboxed(folder, code, named, wall_seconds, lambda: self._allowed)

    @property
    def init(self) -> int:
        """The process number of the sandbox's init; 0 before the first run."""
        return self._init

    def train_next(self, allowed: float) -> TimedRun:
        """Train the next arm in at most ``allowed`` seconds, and return its run.

        Raises: SessionEndedError; IsolationError; OSError for a fault of the machine.
        """
        self._resume()
        number, self._allowed = self._next, allowed
        self._next += 1
        ended = next(self._trained)
        if ended.failed:
            raise self._ended(number, ended.failed, ended.out_of_time)
        self._init, last = ended.init, self._arms[number].last_step
        if not number:
            return TimedRun(ended.seconds, {}, folder=ended.folder)
        try:  # read everything of each run, so that code cannot know which runs are compared
            left = read_live_checkpoint(ended.opened, last, self._origin, self._copies)
            before: Tensors = {}
            if number in self._early_steps:
                step = self._early_steps[number]
                before = read_live_checkpoint(ended.opened, step, self._origin, self._copies).model
        except UntrustedFileError as error:
            raise self._ended(number, error.message) from None
        rest = left if number in self._whole else None
        return TimedRun(ended.seconds, left.model, rest, before, ended.cpu, ended.folder)

    def pause(self) -> None:
        """Stop all processes of the session until its next run. Raises: SessionEndedError if some cannot be stopped."""
        if self._init and self._frozen is None:
            self._frozen = freezer.freeze(self._init)
            if not self._frozen.still and not self._frozen.clocks:  # the trainer has died
                ended = next(self._trained)
                raise self._ended(self._next - 1, ended.failed, ended.out_of_time)
            if not self._frozen.still:
                raise self._not_still()

    def check_still(self) -> None:
        """Check that a paused session has stood still so far. Raises: SessionEndedError."""
        if self._frozen is not None and freezer.read_used_seconds(self._frozen) > STILL_SECONDS:
            raise self._not_still()

    def close(self) -> None:
        """End the trainer."""
        if self._frozen is not None:
            freezer.thaw(self._frozen)
            self._frozen = None
        self._trained.close()

    def _resume(self) -> None:
        if self._frozen is not None:
            used, self._frozen = freezer.thaw(self._frozen), None
            if used > STILL_SECONDS:
                raise self._not_still()

    def _ended(self, number: int, problem: str, out_of_time: bool = False) -> SessionEndedError:
        why = Message("patch.run_failed", "run {run} failed: {problem}", run=number, problem=problem)
        self.failed = why
        return SessionEndedError(why, out_of_time=out_of_time)

    def _not_still(self) -> SessionEndedError:
        self.failed = why = Message(
            "patch.not_still", "A process of the trainer did not stand still while the other side's run was timed."
        )
        return SessionEndedError(why, not_still=True)
