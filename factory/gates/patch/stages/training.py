"""Trains N real steps with baseline and candidate in the sandbox (``timed_session``), and compares their weights and times.

Time. A run is timed from outside, from the moment when its data are revealed until its weights are there. The CPU seconds of the sandbox's processes
are read at the same moments. ``make_step_seconds_evidence`` computes the seconds of a step. The sessions alternate: baseline, candidate, baseline,
candidate. So a machine that slows down shows as noise of the baseline, and properties of one process (its memory layout, its compilation) do not
decide. If new code looks faster in its first session, the second session of each side ends with a run that is ``long`` times as long. A gain that
would promote is measured again with the candidate first, and both measurements must show it. A baseline run of twice the steps is a control that must
look slow. If it does not, or if the baseline's own runs differ too much, everything is measured again on new data, a few times within a budget.

Result. A fresh random seed decides the data of each pair of runs, so no weights can be prepared or stored from an earlier run. The gate reads nothing
but the checkpoint from a candidate's run. The weights are compared with the baseline's after the same steps on the same data, and the next stage
scores the pair of runs that is furthest apart. The allowed distance is measured too. Another baseline run leaves out as many steps as would save the
smallest time that counts as a gain. The candidate's weights must be much nearer to the baseline's than the weights of that run. So code that computes
less gains nothing.

The next segment continues from a whole checkpoint, so every run must leave one. In each half of a measurement, one pair of runs is drawn at random.
Its optimiser moments, position in the data, recipe and state of the anomaly detector are compared as well.
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
from factory.core.path_removal import remove_path
from factory.gates.patch.checkpoint_difference import (
    compute_squared_moment_distances,
    compute_weight_drift,
    find_checkpoint_difference,
)
from factory.gates.patch.judge import (
    CPU_CLOCKS,
    are_training_results_different,
    judge_measurement,
    make_training_difference_message,
)
from factory.gates.patch.policy import PatchPolicy, TrainingPolicy
from factory.gates.patch.step_timing import (
    BRIEF_RUN_STEPS,
    MeasurementTimes,
    compute_baseline_noise,
    compute_long_run_gain,
    estimate_cpu_overhead,
    find_timing_problem,
    make_step_seconds_evidence,
)
from factory.gates.patch.timed_session import PatchSession, TimedRun, train_timed_session
from factory.gates.recipe_changes import get_used_recipe_path
from factory.gates.release.judge import PROMOTE
from factory.gates.stage_interface import (
    NO_START,
    PatchCase,
    StageEvidence,
    StageResult,
    make_failed_evidence,
    make_missing_evidence,
)
from factory.gates.time_limits import (
    make_baseline_stopped_message,
    make_out_of_time_evidence,
    make_stopped_message,
    run_attempts_with_limits,
)
from factory.gates.training_start import TrainingStart
from factory.runs.arm import Arm, make_recipe_for_one_rank
from factory.runs.arm_runner import ArmRunner
from factory.runs.compile_cache import copy_cache
from factory.runs.trace import read_step_lines
from kernels.contract.message import Message
from trainer.contract.checkpoint import format as checkpoint_files
from trainer.contract.checkpoint.format import Tensors
from trainer.contract.recipe import Recipe

BASELINE, CANDIDATE = "baseline", "candidate"
DRAWN = 5  # a random number of steps, at most steps / DRAWN, is added to the policy's steps
WARM_STEPS = 20  # the most warm-up steps of a process; without them the runs are some percent slower
RunPair = tuple[TimedRun, TimedRun]  # candidate and baseline, on the same data


@dataclass(frozen=True)
class TrainingSide:
    """The baseline or the candidate: its code with the commit, its recipe, and the folder that only its own runs write."""

    code: Path
    commit: str
    recipe: dict[str, Any]
    folder: Path


def run(case: PatchCase[PatchPolicy]) -> StageResult:
    """Return the result. It hands the pair of runs whose weights differ most to the evals stage."""
    if case.start is None:
        return StageResult(NO_START)
    baseline, candidate = (
        TrainingSide(code, commit, make_gate_recipe(case, case.start, code), case.work / name)
        for name, code, commit in (
            (BASELINE, case.baseline, case.applied.base),
            (CANDIDATE, case.candidate, case.applied.commit),
        )
    )
    new_code = any(path.endswith(".py") for path in case.changed_paths)
    policy = case.policy.training
    more = secrets.randbelow(1 + policy.steps // DRAWN)  # a fixed number would tell a run that it is being judged
    policy = policy.model_copy(update={"steps": policy.steps + more})
    runs = ArmRunner(case.plant, case.work, "patch gate", case.subject)
    return StageResult(*compare_training(runs, policy, case.start, baseline, candidate, new_code, case.tries))


def make_gate_recipe(case: PatchCase[PatchPolicy], start: TrainingStart, code: Path) -> dict[str, Any]:
    """Return the trunk's recipe with the gate's batch. If the patch changes the recipe, the settings that compute a step are those of ``code``.

    Otherwise they are the trunk's. The trunk may be older than a merged change, and this patch must not be credited with the gain of that change.
    """
    recipe = dict(start.recipe)
    batch = dict(recipe["batch"])
    if case.policy.training.sequences:
        batch |= {"sequences": case.policy.training.sequences, "micro_sequences": None}
    changed = get_used_recipe_path(case.workspace)
    if changed in case.changed_paths:
        own = Recipe.load(code / changed).model_dump()
        recipe["compile"] = own["compile"]
        micro = own["batch"]["micro_sequences"]
        batch["micro_sequences"] = micro if micro and batch["sequences"] % micro == 0 else None
    # To measure the noise scale, a step is split. The new shapes would be compiled during one of the few timed steps.
    return recipe | {"batch": batch, "stability": recipe["stability"] | {"noise_scale_every": 0}}


def compare_training(
    runs: ArmRunner,
    policy: TrainingPolicy,
    start: TrainingStart,
    baseline: TrainingSide,
    candidate: TrainingSide,
    new_code: bool,
    tries: int,
) -> tuple[StageEvidence, RunPair | None]:
    """Return the stage's evidence, and the pair of runs whose weights are furthest apart. Raises: IsolationError.

    ``new_code``: the candidate has code that was not approved before, so long runs must show its gain too. ``tries``: the number of tries on this
    target, this one included.
    """
    compiled = devices.get_compiled_code_folder(
        runs.plant.workspace.root, start.commit
    )  # by approved code during training
    origin = checkpoint_files.read_tensors(start.checkpoint, "model")
    comparison = _Comparison(
        runs, policy, start, {BASELINE: baseline, CANDIDATE: candidate}, new_code, compiled, origin
    )
    for side in (baseline, candidate):
        copy_cache(compiled, side.folder / "known" / "cache")
    found, pair = comparison.measure_steadily()
    if found["state"] != "passed" or judge_measurement(policy, found, tries).outcome != PROMOTE:
        return found, pair
    runs.plant.print_line(
        Message(
            "patch.measure_again",
            "  training: the first measurement showed a gain. The factory measures again, with the candidate first",
        )
    )
    again, other = replace(comparison, repeated_s=found["session_seconds"]).measure_steadily()
    found["again"] = again
    if again["state"] != "passed":
        reasons = [Message("patch.second_time", "Second measurement: {reason}", reason=one) for one in again["reasons"]]
        found |= {"state": again["state"], "reasons": reasons}
    else:
        found["reasons"] = [
            Message(
                "patch.trained_twice",
                "{trained} Then the factory measured again with as many new runs.",
                trained=found["reasons"][0],
            )
        ]
    return found, other if other is None or again["drift"] > found["drift"] else pair


# -- the plan of one measurement ----------------------------------------------------------------------------------------
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
class MeasurementPlan:
    """The runs of one measurement. ``sessions``: (side, runs) of each process. The runs are a control, then timed runs on the other side's data."""

    sessions: Sequence[tuple[str, list[PlannedRun]]]  # in order, two sessions of each side
    whole: tuple[int, int]  # the numbers of the timed runs whose whole checkpoints are compared, one in each half
    long: PlannedRun  # the last run of the third and the fourth session, if new code looks faster

    @classmethod
    def make_random_plan(cls, policy: TrainingPolicy, candidate_first: bool) -> MeasurementPlan:
        """Draw a plan. The baseline's first control leaves out steps, and its second control makes twice the steps.

        The candidate's controls are brief, to show its overhead.
        """
        half = policy.pairs // 2
        whole = (secrets.randbelow(half), half + secrets.randbelow(policy.pairs - half))
        timed = [PlannedRun(_seed(), policy.steps, whole=number in whole) for number in range(policy.pairs)]
        fewer = replace(timed[whole[0]], steps=policy.steps - policy.left_out_step_count)
        long_steps = policy.long * policy.steps
        long = PlannedRun(
            _seed(), long_steps, early=long_steps - policy.count_steps_to_leave_out_for_min_gain(long_steps)
        )
        sessions: list[tuple[str, list[PlannedRun]]] = []
        for control, runs in ((fewer, timed[:half]), (PlannedRun(_seed(), 2 * policy.steps), timed[half:])):
            pair = [(BASELINE, [control, *runs]), (CANDIDATE, [PlannedRun(_seed(), BRIEF_RUN_STEPS), *runs])]
            sessions += (
                reversed(pair) if candidate_first else pair
            )  # on a machine that becomes quieter, the last side gains
        return cls(sessions, whole, long)


@dataclass
class SideRuns:
    """The runs of one side's sessions so far."""

    controls: list[TimedRun] = field(default_factory=list)  # one per session
    timed: list[TimedRun] = field(default_factory=list)
    long: TimedRun | None = None
    overheads: list[float] = field(default_factory=list)  # of the baseline: seconds of each timed run without its steps
    session_s: list[float] = field(default_factory=list)

    def sum_timed_seconds(self, run_count: int) -> float:
        """Return the seconds of the first ``run_count`` timed runs together."""
        return sum(run.seconds for run in self.timed[:run_count])


class _EndedEarly(Exception):
    """The measurement ended early: a session left no runs to compare, or runs that differ. ``evidence`` has the reason."""

    def __init__(self, evidence: StageEvidence) -> None:
        super().__init__(evidence["reasons"][0])
        self.evidence = evidence


@dataclass(frozen=True)
class _Comparison:
    """The values that all measurements of the stage share."""

    runs: ArmRunner
    policy: TrainingPolicy
    start: TrainingStart
    sides: dict[str, TrainingSide]
    new_code: bool
    compiled: Path  # by approved code
    origin: Tensors
    repeated_s: float = (
        0.0  # seconds of the baseline's first session in the first measurement; 0: this is the first measurement
    )

    def measure_steadily(self) -> tuple[StageEvidence, RunPair | None]:
        """Measure, and measure again on new data while the baseline's own runs differ too much: at most ``tries`` times, within the budget."""
        policy = self.policy
        discarded: list[dict[str, Any]] = []
        began, longest = time.monotonic(), 0.0
        while True:
            round_began = time.monotonic()
            found, pair = self.measure()
            decided = pair is None or are_training_results_different(
                policy, found
            )  # a decision that does not depend on the clock
            doubt = None if decided else find_timing_problem(policy, found, 1 + len(discarded))
            if discarded:
                found["discarded"] = discarded
            now = time.monotonic()
            longest = max(longest, now - round_began)
            if not doubt or len(discarded) + 1 >= policy.tries or now - began + longest > policy.budget_seconds:
                if doubt and found["state"] == "missing":
                    found["reasons"] = [
                        Message(
                            "patch.still_noisy",
                            "In measurement {measurements} of at most {tries}, {doubt}.",
                            measurements=len(discarded) + 1, tries=policy.tries, doubt=doubt,
                        )
                    ]  # fmt: skip
                return found, pair
            self.runs.plant.print_line(
                Message("patch.measured_again", "  training: {doubt}. The factory measures again", doubt=doubt)
            )
            noise = compute_baseline_noise(found) if "baseline_seconds" in found else None
            seconds = {key: found[key] for key in ("total_seconds", "overhead_seconds")}
            discarded.append({"doubt": doubt, "noise": noise} | seconds)

    def measure(self) -> tuple[StageEvidence, RunPair | None]:
        """Run four sessions on new data. Returns the evidence, and the pair of runs that is furthest apart (None: the sessions ended early)."""
        plan = MeasurementPlan.make_random_plan(self.policy, candidate_first=bool(self.repeated_s))
        runs = {BASELINE: SideRuns(), CANDIDATE: SideRuns()}
        try:
            self._run(plan, runs)
            return self._evidence(plan, runs)
        except _EndedEarly as ended:
            return ended.evidence, None

    def _run(self, plan: MeasurementPlan, runs: dict[str, SideRuns]) -> None:
        """Run the sessions of ``plan`` in order, and add their runs to ``runs``. Raises: _EndedEarly."""
        half = self.policy.pairs // 2
        title = Message("patch.training_task", "timing training steps of baseline and candidate")
        with self.runs.plant.progress.task(title, 2 * self.policy.pairs) as task:
            for number, (name, planned) in enumerate(plan.sessions):
                faster = number >= 2 and runs[BASELINE].sum_timed_seconds(half) > runs[CANDIDATE].sum_timed_seconds(
                    half
                )
                long = [plan.long] if self.new_code and faster and not self.repeated_s else []
                before_s = (runs[BASELINE].session_s or [self.repeated_s])[
                    -1
                ]  # seconds of the baseline's previous session
                session, folder = self._session(name, [*planned, *long], before_s)
                control, *done = session.runs[: len(planned)]
                left = runs[name]
                left.controls.append(control)
                left.timed += done
                left.long = session.runs[-1] if long else left.long
                left.session_s.append(session.seconds)
                if name == BASELINE:  # the first two folders are those of the warm-up and the control
                    left.overheads += [run.seconds - _recorded_span(at) for run, at in zip(done, session.folders[2:])]
                remove_path(folder / "segments")
                task.advance(len(done), f"{name}: {min(run.seconds for run in done):.1f} s a run")
                if number == 1:  # the first two sessions are enough to show a difference
                    found, _ = self._weights(plan, runs)
                    if are_training_results_different(self.policy, found):
                        raise _EndedEarly(
                            make_failed_evidence(make_training_difference_message(self.policy, found), **found)
                        )

    def _session(self, name: str, runs: Sequence[PlannedRun], before_s: float) -> tuple[PatchSession, Path]:
        """Run a session of one side. Returns the session and its folder. A session of the candidate that a limit stopped is run again with a longer
        limit. Raises: _EndedEarly."""
        policy, side = self.policy, self.sides[name]
        if name == BASELINE:
            usual = (
                policy.pairs - policy.pairs // 2 + 2
            ) * policy.steps  # wall_seconds is the limit for this number of steps
            limits: tuple[float, ...] = (policy.wall_seconds * max(1.0, sum(run.steps for run in runs) / usual),)
        else:
            limits = policy.patience.compute_attempt_limits(before_s)

        def attempt(number: int, limit: float) -> tuple[PatchSession, Path]:
            if number:  # the first attempt saw these data, so its files must not remain
                for written in side.folder.glob("*/cache"):
                    remove_path(written.parent)
                copy_cache(self.compiled, side.folder / secrets.token_hex(4) / "cache")
            return self._train(name, [PlannedRun(_seed(), min(policy.steps, WARM_STEPS)), *runs], limit)

        session, folder = run_attempts_with_limits(limits, attempt, lambda ended: ended[0].out_of_time)
        if session.out_of_time and name == BASELINE:
            raise _EndedEarly(
                make_out_of_time_evidence(
                    make_baseline_stopped_message("training session", limits[0], "training.wall_seconds")
                )
            )
        if session.out_of_time:
            raise _EndedEarly(
                make_out_of_time_evidence(
                    make_stopped_message("training session", limits, before_s, "training.patience")
                )
            )
        if session.failed:
            says = (
                make_failed_evidence if name == CANDIDATE else make_missing_evidence
            )  # a failure of the baseline is no evidence about the candidate
            failure = Message(
                "patch.training_failed", "The {side}'s training failed: {problem}", side=name, problem=session.failed
            )
            raise _EndedEarly(says(failure))
        return session, folder

    def _train(self, name: str, runs: Sequence[PlannedRun], wall_seconds: float) -> tuple[PatchSession, Path]:
        """Train the runs in one process; the first is the warm-up. Returns the session and its folder. One row of the ledger stands for all runs.

        Each session has a new folder with a random name, because the candidate can write in it. The side's compiled files move from folder to folder.
        """
        start, side = self.start, self.sides[name]
        folder = side.folder / secrets.token_hex(4)
        folder.mkdir(parents=True)
        for compiled in side.folder.glob("*/cache"):  # at most one
            compiled.rename(folder / "cache")
        base = {
            "kind": "trunk", "recipe": make_recipe_for_one_rank(side.recipe), "data_plan": start.plan, "first_step": start.step,
            "initial_checkpoint": str(start.checkpoint), "restart_data": True, "code_commit": side.commit,
        }  # fmt: skip
        kernels, title = start.resolve_kernels(side.code), f"{name}, {len(runs)} runs, the longest"
        arms = [
            Arm(title, base | {"last_step": start.step + run.steps}, side.commit, run.make_early_save_keys(start.step),
            seed=run.seed, kernels=kernels)
            for run in runs
        ]  # fmt: skip
        whole = [number for number, run in enumerate(runs) if run.whole]
        early = {number: start.step + run.early for number, run in enumerate(runs) if run.early}
        longest = max(arms, key=lambda arm: arm.last_step)
        with self.runs.record_arm_states({folder: longest}) as ends:
            session = train_timed_session(folder, side.code, arms, self.origin, wall_seconds, whole, early)
            ends[longest.key] = session.failed
        return session, folder

    def _evidence(self, plan: MeasurementPlan, runs: dict[str, SideRuns]) -> tuple[StageEvidence, RunPair]:
        """Return the evidence of all four sessions, and the pair of runs that is furthest apart. Raises: _EndedEarly if a checkpoint differs."""
        policy, baseline, candidate = self.policy, runs[BASELINE], runs[CANDIDATE]
        evidence, drifts = self._weights(plan, runs)
        pairs = list(zip(candidate.timed, baseline.timed, strict=True))
        away = compute_squared_moment_distances(baseline.controls[0].rest, baseline.timed[plan.whole[0]].rest)
        for number in plan.whole:
            ours, theirs = pairs[number]
            if wrong := find_checkpoint_difference(ours.rest, theirs.rest, away, policy.max_drift):
                reason = Message(
                    "patch.checkpoint_differs",
                    "Training from the candidate's checkpoint would differ from training from the baseline's checkpoint: {difference}",
                    difference=wrong,
                )
                raise _EndedEarly(make_failed_evidence(reason, **evidence))
        evidence |= _times(policy, baseline, candidate)
        evidence |= {"steps": policy.steps, "new_code": self.new_code, "device": devices.get_device_kind()}
        evidence |= {"session_seconds": baseline.session_s[0]}
        furthest = pairs[drifts.index(max(drifts))]
        if doubt := evidence.get("doubt"):
            return make_missing_evidence(
                Message("patch.doubt", "The times cannot be used: {doubt}.", doubt=doubt), **evidence
            ), furthest
        if baseline.long and candidate.long:
            overhead = evidence["overhead_seconds"]
            evidence["long"] = compute_long_run_gain(
                baseline.long.seconds, candidate.long.seconds, plan.long.steps, overhead
            ) | {
                "drift": compute_weight_drift(candidate.long.weights, baseline.long.weights, self.origin),
                "control_drift": compute_weight_drift(
                    baseline.long.early, baseline.long.weights, self.origin, include_worst_tensor=False
                ),
            }
        reason = Message(
            "patch.trained",
            "Candidate and baseline each made {runs} training runs of {steps} steps, from step {step}.",
            runs=policy.pairs, steps=policy.steps, step=self.start.step,
        )  # fmt: skip
        return {"state": "passed", "reasons": [reason], **evidence}, furthest

    def _weights(self, plan: MeasurementPlan, runs: dict[str, SideRuns]) -> tuple[dict[str, Any], list[float]]:
        """Return evidence with the distances of the weights, and the distance of each pair of runs."""
        baseline, candidate = runs[BASELINE], runs[CANDIDATE]
        fewer, all_steps = (
            baseline.controls[0],
            baseline.timed[plan.whole[0]],
        )  # runs on the same data; the first leaves out some steps
        control = compute_weight_drift(fewer.weights, all_steps.weights, self.origin, include_worst_tensor=False)
        pairs = zip(candidate.timed, baseline.timed, strict=True)
        drifts = [compute_weight_drift(ours.weights, theirs.weights, self.origin) for ours, theirs in pairs]
        totals = {name: [run.seconds for run in side.timed] for name, side in runs.items()}
        evidence = {"total_seconds": totals, "drift": max(drifts), "control_drift": control}
        return evidence | {"left_out": self.policy.left_out_step_count}, drifts


def _times(policy: TrainingPolicy, baseline: SideRuns, candidate: SideRuns) -> dict[str, Any]:
    """Return the evidence of the wall clock, and in ``cpu`` the evidence of the CPU seconds of all processes and of the busiest thread."""
    twice = baseline.controls[1]

    def by(clock: Callable[[TimedRun], float], overhead: float | None = None) -> dict[str, Any]:
        base, ours, brief = ([clock(r) for r in runs] for runs in (baseline.timed, candidate.timed, candidate.controls))
        if overhead is None:
            overhead = estimate_cpu_overhead(policy, base, clock(twice))
        return make_step_seconds_evidence(policy, MeasurementTimes(base, ours, brief, clock(twice), overhead))

    evidence = by(lambda run: run.seconds, sum(baseline.overheads) / len(baseline.overheads))
    if all(run.cpu is not None for run in (*baseline.timed, *candidate.timed, *candidate.controls, twice)):
        evidence["cpu"] = {clock: by(attrgetter(f"cpu.{clock}")) for clock in CPU_CLOCKS}
    return evidence


def _seed() -> int:
    return secrets.randbelow(1 << 31)


def _recorded_span(folder: Path) -> float:
    """Return the seconds from the end of the first step to the end of the last step. The baseline, which is approved code, recorded them."""
    lines = read_step_lines(folder, "metrics.jsonl")
    return float(lines[-1]["time"] - lines[0]["time"])
