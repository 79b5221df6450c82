"""The plan of a round of paired runs: what each side's process trains, and whose turn it is."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace

from factory.gates.patch.policy import TrainingPolicy
from factory.gates.patch.step_timing import BRIEF_RUN_STEPS

BASELINE, CANDIDATE = "baseline", "candidate"


@dataclass(frozen=True)
class PlannedRun:
    seed: int  # of its data
    steps: int
    whole: bool = False  # its whole checkpoint is compared, not only its weights
    early: int = 0  # the run also keeps its weights after this number of steps; 0: it does not

    def make_early_save_keys(self, first_step: int) -> dict[str, int]:
        """Return the changes of the recipe with which the run saves its early weights. The run ends before the next checkpoint after these."""
        return {"checkpoint_every": first_step + self.early, "keep_checkpoints": 2} if self.early else {}


@dataclass(frozen=True)
class RoundPlan:
    """The runs of one round: the controls of each side, then pairs of timed runs on the same data, then a pair of long runs.

    The sides alternate who is first in a pair and in a round, so that on a machine that becomes quieter no side gains.
    """

    number: int  # from 0
    controls: dict[str, list[PlannedRun]]
    timed: list[PlannedRun]
    long: PlannedRun | None

    @classmethod
    def draw(cls, policy: TrainingPolicy, number: int, new_code: bool, faster: bool) -> RoundPlan:
        """Draw a round. The baseline's control leaves out steps in round 0, and makes twice the steps in round 1. Later rounds have none.

        The candidate's controls are brief, to show the overhead of new code. ``faster``: new code has looked faster so far.
        """
        compared = secrets.randbelow(policy.pairs) if number < 2 else -1
        timed = [PlannedRun(draw_seed(), policy.steps, whole=one == compared) for one in range(policy.pairs)]
        controls: dict[str, list[PlannedRun]] = {BASELINE: [], CANDIDATE: []}
        if number == 0:
            controls[BASELINE] = [replace(timed[compared], steps=policy.steps - policy.left_out_step_count)]
        elif number == 1:
            controls[BASELINE] = [PlannedRun(draw_seed(), 2 * policy.steps)]
        if new_code and number < 2:
            controls[CANDIDATE] = [PlannedRun(draw_seed(), BRIEF_RUN_STEPS)]
        steps = policy.long * policy.steps
        long = PlannedRun(draw_seed(), steps, early=steps - policy.count_steps_to_leave_out_for_min_gain(steps))
        return cls(number, controls, timed, long if number and new_code and faster else None)

    @property
    def order(self) -> tuple[str, str]:
        """The sides in the order in which they begin the round."""
        return (BASELINE, CANDIDATE) if self.number % 2 == 0 else (CANDIDATE, BASELINE)

    def list_runs(self, side: str) -> list[PlannedRun]:
        """Return all runs of a side's process but its warm-up, in order."""
        return [*self.controls[side], *self.timed, *([self.long] if self.long else [])]

    def list_turns(self, interleaved: bool) -> list[tuple[str, PlannedRun]]:
        """Return whose turn it is for which run, without the warm-ups. ``interleaved``: both processes are there; else one comes after the other."""
        if not interleaved:
            return [(side, run) for side in self.order for run in self.list_runs(side)]
        turns = [(side, run) for side in self.order for run in self.controls[side]]
        for place, run in enumerate([*self.timed, *([self.long] if self.long else [])]):
            turns += [(side, run) for side in (self.order if place % 2 == 0 else self.order[::-1])]
        return turns


def draw_seed() -> int:
    """Return a random seed of a run's data."""
    return secrets.randbelow(1 << 31)
