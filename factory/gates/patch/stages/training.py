"""N real training steps, baseline and candidate, in the sandbox (``session``): do they leave the same weights, and take less time?

Time. A run is timed from outside, from the reveal of its data to its weights; ``timing`` makes seconds a step of it. The CPU seconds of the
sandbox's processes are read at the same moments. The sessions alternate baseline, candidate, baseline, candidate, so that a machine that
slows down shows as noise of the baseline, and so that what one process happens to get (where its memory lies, how its code was compiled)
does not decide. Where new code looks faster in its first session, the second session of each side ends with a run that is ``long`` times as
long. A gain that would promote is measured again with the candidate first; both measurements must show it. A baseline run of twice the
steps is the control that is known to be slow. Where it does not look slow, or where the baseline's own runs differ too much, everything
is measured again on new data, a few times within a budget.

Result. Every run trains on data of its own (a fresh random seed), the same for a baseline and a candidate run, so that no weights can be
prepared or stored from an earlier run. The weights are the candidate's only testimony: they are compared with the baseline's after the same
steps on the same data, and the next stage scores those that are furthest apart. How far apart they may be is measured too: another
baseline run leaves out as many steps as would be worth the least gain that counts, and the candidate must end much nearer than
that. So no gain comes from doing less.

The next segment continues from a whole checkpoint, so every run must leave one. Of one pair in each two sessions, drawn at random, the
optimiser's moments, the position in the data, the recipe and the anomaly detector's state are compared by the same rule.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from factory.core import devices
from factory.core.removal import remove
from factory.gates.case import NO_START, PatchCase, StageEvidence, StageResult, failed, missing
from factory.gates.patch.judge import CPU_CLOCKS, judge_measurement, training_difference, training_differs
from factory.gates.patch.likeness import differs, drift, squares
from factory.gates.patch.policy import PatchPolicy, TrainingPolicy
from factory.gates.patch.session import PatchSession, TimedRun, timed_session
from factory.gates.patch.timing import BRIEF_STEPS, RunSeconds, cpu_overhead, long_timing, noise_of, timing, too_noisy
from factory.gates.patience import baseline_stopped, out_of_time, patiently, stopped
from factory.gates.recipe_changes import used_recipe
from factory.gates.release.judge import PROMOTE
from factory.gates.training_start import Start
from factory.runs.arm import Arm, for_one_rank
from factory.runs.compile_cache import copy_cache
from factory.runs.running import Runs
from factory.runs.trace import step_lines
from trainer.contract.checkpoint import format as checkpoint_files
from trainer.contract.checkpoint.format import Tensors
from trainer.contract.recipe import Recipe

BASELINE, CANDIDATE = "baseline", "candidate"
DRAWN = 5  # the number of steps is the policy's and up to one in so many more
WARM_STEPS = 20  # of a process, at most: until then its runs are some percent slower
Pair = tuple[TimedRun, TimedRun]  # candidate and baseline, on the same data


@dataclass(frozen=True)
class Side:
    """Baseline or candidate: its code, the commit that the code is, its recipe, and the folder that only its own runs write to."""

    code: Path
    commit: str
    recipe: dict[str, Any]
    folder: Path


def run(case: PatchCase[PatchPolicy]) -> StageResult:
    """Passes to the evals stage the pair of runs whose weights differ most."""
    if case.start is None:
        return StageResult(NO_START)
    baseline, candidate = (
        Side(code, commit, recipe_for(case, case.start, code), case.work / name)
        for name, code, commit in (
            (BASELINE, case.baseline, case.applied.base),
            (CANDIDATE, case.candidate, case.applied.commit),
        )
    )
    new_code = any(path.endswith(".py") for path in case.paths)
    policy = case.policy.training
    more = secrets.randbelow(1 + policy.steps // DRAWN)  # a fixed number would tell a run that it is judged
    policy = policy.model_copy(update={"steps": policy.steps + more})
    runs = Runs(case.plant, case.work, "patch gate", case.subject)
    return StageResult(*compare_training(runs, policy, case.start, baseline, candidate, new_code, case.tries))


def recipe_for(case: PatchCase[PatchPolicy], start: Start, code: Path) -> dict[str, Any]:
    """The trunk's recipe with the gate's batch; where the patch changes how the recipe's step is computed, as ``code`` has it.

    The trunk may be older than a change that was merged since, whose gain must not be credited to this patch.
    """
    recipe = dict(start.recipe)
    batch = dict(recipe["batch"])
    if case.policy.training.sequences:
        batch |= {"sequences": case.policy.training.sequences, "micro_sequences": None}
    changed = used_recipe(case.workspace)
    if changed in case.paths:
        own = Recipe.load(code / changed).model_dump()
        recipe["compile"] = own["compile"]
        micro = own["batch"]["micro_sequences"]
        batch["micro_sequences"] = micro if micro and batch["sequences"] % micro == 0 else None
    # The noise scale splits a step, whose new shapes would be compiled within one of the few steps that are timed.
    return recipe | {"batch": batch, "stability": recipe["stability"] | {"noise_scale_every": 0}}


def compare_training(
    runs: Runs,
    policy: TrainingPolicy,
    start: Start,
    baseline: Side,
    candidate: Side,
    new_code: bool,
    tries: int,
) -> tuple[StageEvidence, Pair | None]:
    """The stage's evidence, and the pair of runs whose weights are furthest apart. Raises: IsolationError.

    ``new_code``: some of the candidate's code was not approved before, so that its gain must show in long runs too.
    ``tries``: on the same target, as the judge counts them.
    """
    compiled = devices.compiled(runs.plant.workspace.root, start.commit)  # by approved code while it trained
    origin = checkpoint_files.read_tensors(start.checkpoint, "model")
    comparison = _Comparison(
        runs, policy, start, {BASELINE: baseline, CANDIDATE: candidate}, new_code, compiled, origin
    )
    for side in (baseline, candidate):
        copy_cache(compiled, side.folder / "known" / "cache")
    found, pair = comparison.measure_steadily()
    if found["state"] != "passed" or judge_measurement(policy, found, tries).outcome != PROMOTE:
        return found, pair
    runs.plant.say("  training: a gain; it is measured again, the candidate first")
    again, other = replace(comparison, repeated_s=found["session_seconds"]).measure_steadily()
    found["again"] = again
    if again["state"] != "passed":
        found |= {"state": again["state"], "reasons": [f"measured again: {reason}" for reason in again["reasons"]]}
    else:
        found["reasons"] = [f"{found['reasons'][0]}, and as many again"]
    return found, other if other is None or again["drift"] > found["drift"] else pair


# -- the plan of one measurement ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class PlannedRun:
    seed: int  # of its data
    steps: int
    whole: bool = False  # its whole checkpoint is compared, not its weights alone
    early: int = 0  # its weights after this many steps are wanted too; 0: they are not

    def saving(self, first_step: int) -> dict[str, int]:
        """The recipe's keys that have the early weights saved; the run ends before the next multiple."""
        return {"checkpoint_every": first_step + self.early, "keep_checkpoints": 2} if self.early else {}


@dataclass(frozen=True)
class Plan:
    """``sessions``: of each process its side and its runs, a control and then timed runs on the same data as the other side's."""

    sessions: Sequence[tuple[str, list[PlannedRun]]]  # two of each side, in the order in which they run
    whole: tuple[int, int]  # the timed runs whose checkpoints are compared whole, one of each half
    long: PlannedRun  # at the end of the second half's sessions, where new code looks faster

    @classmethod
    def draw(cls, policy: TrainingPolicy, candidate_first: bool) -> Plan:
        """The baseline's controls leave out steps and make twice the steps; the candidate's are brief, and show its own overhead."""
        half = policy.pairs // 2
        whole = (secrets.randbelow(half), half + secrets.randbelow(policy.pairs - half))
        timed = [PlannedRun(_seed(), policy.steps, whole=number in whole) for number in range(policy.pairs)]
        fewer = replace(timed[whole[0]], steps=policy.steps - policy.left_out)
        long_steps = policy.long * policy.steps
        long = PlannedRun(_seed(), long_steps, early=long_steps - policy.worth(long_steps))
        sessions: list[tuple[str, list[PlannedRun]]] = []
        for control, runs in ((fewer, timed[:half]), (PlannedRun(_seed(), 2 * policy.steps), timed[half:])):
            pair = [(BASELINE, [control, *runs]), (CANDIDATE, [PlannedRun(_seed(), BRIEF_STEPS), *runs])]
            sessions += reversed(pair) if candidate_first else pair  # a machine that becomes quieter helps who is last
        return cls(sessions, whole, long)


@dataclass
class SideRuns:
    """What the sessions of one side left so far."""

    controls: list[TimedRun] = field(default_factory=list)  # one a session
    timed: list[TimedRun] = field(default_factory=list)
    long: TimedRun | None = None
    overheads: list[float] = field(default_factory=list)  # seconds of a timed run besides its steps; the baseline's
    session_s: list[float] = field(default_factory=list)

    def total(self, runs: int) -> float:
        """Seconds of the first ``runs`` timed runs."""
        return sum(run.seconds for run in self.timed[:runs])


class _EndedEarly(Exception):
    """A session left no runs to compare, or runs that differ: ``evidence`` says why."""

    def __init__(self, evidence: StageEvidence) -> None:
        super().__init__(evidence["reasons"][0])
        self.evidence = evidence


@dataclass(frozen=True)
class _Comparison:
    """What is the same in all of the stage's measurements."""

    runs: Runs
    policy: TrainingPolicy
    start: Start
    sides: dict[str, Side]
    new_code: bool
    compiled: Path  # by approved code
    origin: Tensors
    repeated_s: float = 0.0  # of the baseline's first session in the measurement that this repeats; 0: it repeats none

    def measure_steadily(self) -> tuple[StageEvidence, Pair | None]:
        """``measure``, again on new data while the baseline's own runs differ too much: ``tries`` times within the budget."""
        policy = self.policy
        discarded: list[dict[str, Any]] = []
        began, longest = time.monotonic(), 0.0
        while True:
            round_began = time.monotonic()
            found, pair = self.measure()
            decided = pair is None or training_differs(policy, found)  # whatever its clock says
            doubt = "" if decided else too_noisy(policy, found, 1 + len(discarded))
            if discarded:
                found["discarded"] = discarded
            now = time.monotonic()
            longest = max(longest, now - round_began)
            if not doubt or len(discarded) + 1 >= policy.tries or now - began + longest > policy.budget_seconds:
                if doubt and found["state"] == "missing":
                    found["reasons"] = [f"{doubt}; measured {len(discarded) + 1} of at most {policy.tries} times"]
                return found, pair
            self.runs.plant.say(f"  training: {doubt}; measured again")
            noise = noise_of(found) if "baseline_seconds" in found else None
            seconds = {key: found[key] for key in ("total_seconds", "overhead_seconds")}
            discarded.append({"doubt": doubt, "noise": noise} | seconds)

    def measure(self) -> tuple[StageEvidence, Pair | None]:
        """Four sessions on data of their own: the evidence, and the pair that is furthest apart; no pair where they ended early."""
        plan = Plan.draw(self.policy, candidate_first=bool(self.repeated_s))
        runs = {BASELINE: SideRuns(), CANDIDATE: SideRuns()}
        try:
            self._run(plan, runs)
            return self._evidence(plan, runs)
        except _EndedEarly as ended:
            return ended.evidence, None

    def _run(self, plan: Plan, runs: dict[str, SideRuns]) -> None:
        """Raises: _EndedEarly."""
        half = self.policy.pairs // 2
        with self.runs.plant.progress.task("training steps, baseline and candidate", 2 * self.policy.pairs) as task:
            for number, (name, planned) in enumerate(plan.sessions):
                faster = number >= 2 and runs[BASELINE].total(half) > runs[CANDIDATE].total(half)
                long = [plan.long] if self.new_code and faster and not self.repeated_s else []
                before_s = (runs[BASELINE].session_s or [self.repeated_s])[-1]  # of the baseline's session before it
                session, folder = self._session(name, [*planned, *long], before_s)
                control, *done = session.runs[: len(planned)]
                left = runs[name]
                left.controls.append(control)
                left.timed += done
                left.long = session.runs[-1] if long else left.long
                left.session_s.append(session.seconds)
                if name == BASELINE:  # after the warm-up and the control
                    left.overheads += [run.seconds - _recorded_span(at) for run, at in zip(done, session.folders[2:])]
                remove(folder / "segments")
                task.advance(len(done), f"{name}: {min(run.seconds for run in done):.1f} s a run")
                if number == 1:  # a pair of sessions is enough to see a difference
                    found, _ = self._weights(plan, runs)
                    if training_differs(self.policy, found):
                        raise _EndedEarly(failed(training_difference(self.policy, found), **found))

    def _session(self, name: str, runs: Sequence[PlannedRun], before_s: float) -> tuple[PatchSession, Path]:
        """A session of one side, and its folder; a stopped candidate's is tried again, with a longer limit. Raises: _EndedEarly."""
        policy, side = self.policy, self.sides[name]
        if name == BASELINE:
            usual = (policy.pairs - policy.pairs // 2 + 2) * policy.steps  # steps that wall_seconds are for
            limits: tuple[float, ...] = (policy.wall_seconds * max(1.0, sum(run.steps for run in runs) / usual),)
        else:
            limits = policy.patience.limits(before_s)

        def attempt(number: int, limit: float) -> tuple[PatchSession, Path]:
            if number:  # the first attempt saw this data: nothing that it wrote may be there now
                for written in side.folder.glob("*/cache"):
                    remove(written.parent)
                copy_cache(self.compiled, side.folder / secrets.token_hex(4) / "cache")
            return self._train(name, [PlannedRun(_seed(), min(policy.steps, WARM_STEPS)), *runs], limit)

        session, folder = patiently(limits, attempt, lambda ended: ended[0].out_of_time)
        if session.out_of_time and name == BASELINE:
            raise _EndedEarly(out_of_time(baseline_stopped("a training session", limits[0], "training.wall_seconds")))
        if session.out_of_time:
            who = "the candidate's training session"
            raise _EndedEarly(out_of_time(stopped(who, limits, before_s, "training.patience")))
        if session.failed:
            says = failed if name == CANDIDATE else missing  # the baseline's failure says nothing about the candidate
            raise _EndedEarly(says(f"the {name}'s training run failed: {session.failed}"))
        return session, folder

    def _train(self, name: str, runs: Sequence[PlannedRun], wall_seconds: float) -> tuple[PatchSession, Path]:
        """A warm-up and the other runs in one process, and the new folder that they are in; one row in the ledger stands for them.

        What the side compiled before moves along. No folder that a candidate wrote in is used again, and the folder's name is random.
        """
        start, side = self.start, self.sides[name]
        folder = side.folder / secrets.token_hex(4)
        folder.mkdir(parents=True)
        for compiled in side.folder.glob("*/cache"):  # one, or none
            compiled.rename(folder / "cache")
        base = {
            "kind": "trunk", "recipe": for_one_rank(side.recipe), "data_plan": start.plan, "first_step": start.step,
            "initial_checkpoint": str(start.checkpoint), "restart_data": True, "code_commit": side.commit,
        }  # fmt: skip
        kernels, title = start.kernels_of(side.code), f"{name}, {len(runs)} runs, the longest"
        arms = [
            Arm(title, base | {"last_step": start.step + run.steps}, side.commit, run.saving(start.step), seed=run.seed, kernels=kernels)
            for run in runs
        ]  # fmt: skip
        whole = [number for number, run in enumerate(runs) if run.whole]
        early = {number: start.step + run.early for number, run in enumerate(runs) if run.early}
        longest = max(arms, key=lambda arm: arm.last)
        with self.runs.noted({folder: longest}) as ends:
            session = timed_session(folder, side.code, arms, self.origin, wall_seconds, whole, early)
            ends[longest.key] = session.failed
        return session, folder

    def _evidence(self, plan: Plan, runs: dict[str, SideRuns]) -> tuple[StageEvidence, Pair]:
        """From all four sessions. Raises: _EndedEarly, when a checkpoint is not one that training could continue from."""
        policy, baseline, candidate = self.policy, runs[BASELINE], runs[CANDIDATE]
        evidence, drifts = self._weights(plan, runs)
        pairs = list(zip(candidate.timed, baseline.timed, strict=True))
        away = squares(baseline.controls[0].rest, baseline.timed[plan.whole[0]].rest)
        for number in plan.whole:
            ours, theirs = pairs[number]
            if wrong := differs(ours.rest, theirs.rest, away, policy.max_drift):
                reason = f"the candidate's checkpoint would not continue training as the baseline's would: {wrong}"
                raise _EndedEarly(failed(reason, **evidence))
        evidence |= _times(policy, baseline, candidate)
        evidence |= {"steps": policy.steps, "new_code": self.new_code, "device": devices.kind()}
        evidence |= {"session_seconds": baseline.session_s[0]}
        furthest = pairs[drifts.index(max(drifts))]
        if doubt := evidence.get("doubt"):
            return missing(doubt, **evidence), furthest
        if baseline.long and candidate.long:
            overhead = evidence["overhead_seconds"]
            evidence["long"] = long_timing(baseline.long.seconds, candidate.long.seconds, plan.long.steps, overhead) | {
                "drift": drift(candidate.long.weights, baseline.long.weights, self.origin),
                "control_drift": drift(baseline.long.early, baseline.long.weights, self.origin, of_one=False),
            }
        reason = f"{policy.pairs} runs of {policy.steps} steps a side, from step {self.start.step}"
        return {"state": "passed", "reasons": [reason], **evidence}, furthest

    def _weights(self, plan: Plan, runs: dict[str, SideRuns]) -> tuple[dict[str, Any], list[float]]:
        """How far apart the weights are, as evidence, and each pair's distance."""
        baseline, candidate = runs[BASELINE], runs[CANDIDATE]
        fewer, all_steps = baseline.controls[0], baseline.timed[plan.whole[0]]  # the same data, but for some steps
        control = drift(fewer.weights, all_steps.weights, self.origin, of_one=False)
        pairs = zip(candidate.timed, baseline.timed, strict=True)
        drifts = [drift(ours.weights, theirs.weights, self.origin) for ours, theirs in pairs]
        totals = {name: [run.seconds for run in side.timed] for name, side in runs.items()}
        evidence = {"total_seconds": totals, "drift": max(drifts), "control_drift": control}
        return evidence | {"left_out": self.policy.left_out}, drifts


def _times(policy: TrainingPolicy, baseline: SideRuns, candidate: SideRuns) -> dict[str, Any]:
    """The evidence of the wall clock, and as ``cpu`` that of the CPU seconds of the whole tree and of the busiest thread."""
    twice = baseline.controls[1]

    def by(clock: Callable[[TimedRun], float], overhead: float | None = None) -> dict[str, Any]:
        base, ours, brief = ([clock(r) for r in runs] for runs in (baseline.timed, candidate.timed, candidate.controls))
        if overhead is None:
            overhead = cpu_overhead(policy, base, clock(twice))
        return timing(policy, RunSeconds(base, ours, brief, clock(twice), overhead))

    evidence = by(lambda run: run.seconds, sum(baseline.overheads) / len(baseline.overheads))
    if all(run.cpu is not None for run in (*baseline.timed, *candidate.timed, *candidate.controls, twice)):
        evidence["cpu"] = {clock: by(attrgetter(f"cpu.{clock}")) for clock in CPU_CLOCKS}
    return evidence


def _seed() -> int:
    return secrets.randbelow(1 << 31)


def _recorded_span(folder: Path) -> float:
    """Seconds from the end of the first step to the end of the last, as the baseline (approved code) recorded them."""
    lines = step_lines(folder, "metrics.jsonl")
    return float(lines[-1]["time"] - lines[0]["time"])
