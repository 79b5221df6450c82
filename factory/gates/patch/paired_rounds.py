"""Measures baseline and candidate in rounds of paired runs.

A round has a new process of each side, because one process can be faster than another by its place in memory alone. The processes take turns, a
run each on the same data, and the one that waits is stopped from outside. So both sides see the same neighbours, and neither can slow down the other.
(On a GPU, and where memory is short, a round is one process after the other.) After each round the judge looks at the gain's interval, and after
``rounds`` rounds after each pair: the interval holds at every moment. If new code looks faster, the later rounds also have a pair of runs that are
``long`` times as long. Baseline runs of twice the steps are a control that must look slow.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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
    judge_training,
    make_training_difference_message,
)
from factory.gates.patch.policy import TrainingPolicy
from factory.gates.patch.round_plan import BASELINE, CANDIDATE, PlannedRun, RoundPlan, draw_seed
from factory.gates.patch.step_timing import (
    MeasurementTimes,
    compute_long_run_gain,
    estimate_cpu_overhead,
    make_step_seconds_evidence,
)
from factory.gates.patch.timed_session import SessionEndedError, TimedRun, TimedSession
from factory.gates.release.judge import HOLD
from factory.gates.stage_interface import (
    StageEvidence,
    make_failed_evidence,
    make_missing_evidence,
)
from factory.gates.time_limits import (
    make_baseline_stopped_message,
    make_out_of_time_evidence,
    make_stopped_message,
)
from factory.gates.training_start import TrainingStart
from factory.runs.arm import Arm, make_recipe_for_one_rank
from factory.runs.arm_runner import ArmRunner
from factory.runs.compile_cache import copy_cache
from factory.runs.trace import read_step_lines
from factory.sandbox.usage import read_process_tree
from kernels.contract.message import Message
from trainer.contract.checkpoint.format import Tensors

WARM_STEPS = 5  # the most warm-up steps of a process: the first steps are slower, and every pair has both sides
MOST_PROCESSES = 512  # of a trainer, whose memory is read
PERHAPS_FASTER = 0.95  # ratio of the time of all runs, from which new code also makes a long run
MOST_LONG_PAIRS = 4  # after so many, a gain that a quicker start could cause is not measured further
ROOM = 1.5  # free memory that a second trainer needs beside the first, as a multiple of what the first one uses
RunPair = tuple[TimedRun, TimedRun]  # candidate and baseline, on the same data


@dataclass(frozen=True)
class TrainingSide:
    """The baseline or the candidate: its code with the commit, its recipe, and the folder that only its own runs write."""

    code: Path
    commit: str
    recipe: dict[str, Any]
    folder: Path


@dataclass(frozen=True)
class Suspicions:
    """What the stage expects of a patch before it measures.

    ``new_code``: the candidate has code that was not approved before, so long runs must show its gain too. ``bits_expected``: its weights must equal
    the baseline's to the bit.
    """

    new_code: bool
    bits_expected: bool = False


class EndedEarlyError(Exception):
    """The measurement ended early: a session left no runs to compare, or runs that differ. ``evidence`` has the reason."""

    def __init__(self, evidence: StageEvidence) -> None:
        super().__init__(evidence["reasons"][0])
        self.evidence = evidence


class _RoundStopped(Exception):
    """A limit stopped the candidate in a round, which is made again with a longer limit."""


@dataclass
class PairedRounds:
    """One measurement with what it has seen so far. Weights are kept of the pair that is furthest apart, not of each run."""

    runs: ArmRunner
    policy: TrainingPolicy
    start: TrainingStart
    sides: dict[str, TrainingSide]
    suspicions: Suspicions
    tries: int
    compiled: Path  # by approved code
    origin: Tensors

    round_pairs: list[int] = field(default_factory=list)  # the number of pairs in each round
    totals: dict[str, list[TimedRun]] = field(default_factory=lambda: {BASELINE: [], CANDIDATE: []})  # without weights
    briefs: list[TimedRun] = field(default_factory=list)
    twice: list[TimedRun] = field(default_factory=list)
    long: list[tuple[float, float]] = field(default_factory=list)  # seconds of baseline and candidate
    overheads: list[float] = field(default_factory=list)  # of the baseline: seconds of each timed run without its steps
    furthest: RunPair | None = None
    drift: float = 0.0
    same_bits: bool = True
    long_drifts: dict[str, float] = field(default_factory=dict)
    control_drift: float | None = None
    left_out: TimedRun | None = None  # the run that leaves out steps
    moment_distances: dict[str, float] = field(default_factory=dict)  # of the optimiser of that run, squared, by kind
    longest_s: float = 0.0  # of the baseline's runs, for the same number of steps
    attempts: int = 0  # rounds that a limit stopped

    def measure(self) -> StageEvidence:
        """Add rounds until the gain is clear or the time is used. Raises: EndedEarlyError."""
        policy, began, longest = self.policy, time.monotonic(), 0.0
        title = Message("patch.training_task", "timing training steps of baseline and candidate")
        with self.runs.plant.progress.task(title, policy.pairs * policy.rounds) as task:
            while True:
                round_began = time.monotonic()
                try:
                    self._round(lambda note: task.advance(1, note))
                except _RoundStopped:
                    self.attempts += 1
                    continue
                now = time.monotonic()
                longest = max(longest, now - round_began)
                found = self.make_evidence()
                if self._is_clear(found) or self._is_hopeless(found):
                    return found
                if len(self.round_pairs) >= policy.rounds and now - began + longest > policy.budget_seconds:
                    return self._undecided(found, now - began)

    def _is_clear(self, found: StageEvidence) -> bool:
        """Whether more pairs would not change the decision."""
        if len(self.round_pairs) < self.policy.rounds or found["state"] != "passed":
            return False
        return judge_training(self.policy, found, self.tries).outcome != HOLD or (
            found["bits_expected"] and not found["same_bits"]
        )

    def _is_hopeless(self, found: StageEvidence) -> bool:
        """Whether more rounds would not help, though nothing is decided: a person has to change the policy."""
        if len(self.round_pairs) < self.policy.rounds:
            return False
        if found["state"] != "passed":
            return bool(found["doubt"].code == "patch.too_short")
        reasons = judge_training(self.policy, found, self.tries).reasons
        return len(self.long) >= MOST_LONG_PAIRS and reasons[0].code == "patch.quicker_start"

    def _undecided(self, found: StageEvidence, seconds: float) -> StageEvidence:
        """Return the evidence of a measurement that ran out of time."""
        if found["state"] == "passed":
            found["reasons"] = list(judge_training(self.policy, found, self.tries).reasons)
        more = Message(
            "patch.judged_again",
            "The measurement ended after {seconds:.0f} s, because another round would not end within {budget:.0f} s (training.budget_seconds). The "
            "factory judges the patch again when the machine is quiet.",
            seconds=seconds, budget=self.policy.budget_seconds,
        )  # fmt: skip
        return found | {"state": "missing", "undecided": True, "reasons": [*found["reasons"], more]}

    # -- a round -------------------------------------------------------------------------------------------------------
    def _round(self, advance: Callable[[str], None]) -> None:
        """Make one round. Raises: _RoundStopped, after which nothing of the round counts; EndedEarlyError."""
        number = len(self.round_pairs)
        plan = RoundPlan.draw(self.policy, number, self.suspicions.new_code, self._looks_faster())
        before = self._count()
        try:
            with devices.hold_device(), ExitStack() as opened:
                self._make_turns(plan, _OpenSessions(self, plan, opened), advance)
        except _RoundStopped:
            self._forget_after(before)
            for written in self.sides[CANDIDATE].folder.glob(
                "*/cache"
            ):  # the candidate has seen these data, so its files must not remain
                remove_path(written.parent)
            copy_cache(self.compiled, self.sides[CANDIDATE].folder / secrets.token_hex(4) / "cache")
            raise

    def _make_turns(self, plan: RoundPlan, sessions: _OpenSessions, advance: Callable[[str], None]) -> None:
        first, second = plan.order
        sessions.begin(first)
        interleaved = devices.get_device_kind() == "cpu" and sessions.has_room_beside(first)
        if interleaved:
            sessions.pause(first)
            sessions.begin(second)
            sessions.pause(second)
        waiting: dict[PlannedRun, TimedRun] = {}
        for side, run in plan.list_turns(interleaved):
            if side not in sessions:
                sessions.end(first)
                sessions.begin(side)
            done = sessions.train(side, run)
            if interleaved:
                sessions.pause(side)
            if run in plan.controls[side]:
                self._keep_control(plan, side, done)
            elif run not in waiting:
                waiting[run] = done
            else:
                other = waiting.pop(run)
                ours, theirs = (done, other) if side == CANDIDATE else (other, done)
                self._keep_pair(plan, run, ours, theirs)
                advance(f"{theirs.seconds:.1f} s and {ours.seconds:.1f} s a run")
                if plan.number >= self.policy.rounds and self._is_clear(self.make_evidence()):
                    return

    def _count(self) -> dict[str, int]:
        return {name: len(kept) for name, kept in self._kept().items()}

    def _forget_after(self, count: dict[str, int]) -> None:
        for name, kept in self._kept().items():
            del kept[count[name] :]

    def _kept(self) -> dict[str, list[Any]]:
        """What a round adds to."""
        return {
            "rounds": self.round_pairs, BASELINE: self.totals[BASELINE], CANDIDATE: self.totals[CANDIDATE], "briefs": self.briefs,
            "twice": self.twice, "long": self.long, "overheads": self.overheads,
        }  # fmt: skip

    def _keep_control(self, plan: RoundPlan, side: str, done: TimedRun) -> None:
        if side == CANDIDATE:
            self.briefs.append(_without_weights(done))
        elif plan.number == 0:
            self.left_out = done
        else:
            self.twice.append(_without_weights(done))

    def _keep_pair(self, plan: RoundPlan, run: PlannedRun, ours: TimedRun, theirs: TimedRun) -> None:
        """Compare the weights of a pair, and keep its times. Raises: EndedEarlyError if its checkpoints differ."""
        drift = compute_weight_drift(ours.weights, theirs.weights, self.origin)
        self.same_bits = self.same_bits and drift == 0
        if run == plan.long:
            self.long.append((theirs.seconds, ours.seconds))
            of = compute_weight_drift(theirs.early, theirs.weights, self.origin, include_worst_tensor=False)
            self.long_drifts = {"drift": max(drift, self.long_drifts.get("drift", 0.0)), "control_drift": of}
            return
        if self.furthest is None or drift > self.drift:
            self.furthest, self.drift = (replace(ours, rest=None), replace(theirs, rest=None)), drift
        if len(self.round_pairs) == plan.number:
            self.round_pairs.append(0)
        self.round_pairs[-1] += 1
        self.totals[BASELINE].append(_without_weights(theirs))
        self.totals[CANDIDATE].append(_without_weights(ours))
        assert theirs.folder is not None
        self.overheads.append(theirs.seconds - _recorded_span(theirs.folder))
        if run.whole:
            self._compare_whole(plan, ours, theirs)

    def _compare_whole(self, plan: RoundPlan, ours: TimedRun, theirs: TimedRun) -> None:
        """Compare the checkpoints of a pair whole. Raises: EndedEarlyError."""
        if plan.number == 0:
            assert self.left_out is not None
            self.control_drift = compute_weight_drift(
                self.left_out.weights, theirs.weights, self.origin, include_worst_tensor=False
            )
            self.moment_distances = compute_squared_moment_distances(self.left_out.rest, theirs.rest)
            self.left_out = _without_weights(self.left_out)
        wrong = find_checkpoint_difference(ours.rest, theirs.rest, self.moment_distances, self.policy.max_drift)
        if wrong:
            reason = Message(
                "patch.checkpoint_differs",
                "Training from the candidate's checkpoint would differ from training from the baseline's checkpoint: {difference}",
                difference=wrong,
            )
            raise EndedEarlyError(make_failed_evidence(reason, **self._weights()))

    def _looks_faster(self) -> bool:
        """Whether new code may be faster: it is not slower by more than what noise explains."""
        seconds = [sum(run.seconds for run in self.totals[side]) for side in (BASELINE, CANDIDATE)]
        return seconds[0] > PERHAPS_FASTER * seconds[1]

    # -- limits --------------------------------------------------------------------------------------------------------
    def compute_limit(self, side: str, steps: int) -> float:
        """Return the seconds that the next run of a side may take."""
        limits = self._attempt_limits()
        usual = self.policy.wall_seconds if side == BASELINE else limits[min(self.attempts, len(limits) - 1)]
        return usual * max(1.0, steps / self.policy.steps)

    def _attempt_limits(self) -> tuple[float, ...]:
        return self.policy.patience.compute_attempt_limits(self.longest_s)

    def note_seconds(self, side: str, steps: int, seconds: float) -> None:
        """Note how long a run took, with a start of its trainer."""
        if side == BASELINE:
            self.longest_s = max(self.longest_s, seconds * min(1.0, self.policy.steps / steps))

    def explain_end(self, side: str, error: SessionEndedError) -> Exception:
        """Return the error that a session's end means for the measurement."""
        if error.not_still:
            return EndedEarlyError(make_missing_evidence(error.why, undecided=True, **self._weights()))
        if error.out_of_time and side == BASELINE:
            limit = self.policy.wall_seconds
            return EndedEarlyError(
                make_out_of_time_evidence(make_baseline_stopped_message("training run", limit, "training.wall_seconds"))
            )
        if error.out_of_time:
            limits = self._attempt_limits()
            if self.attempts + 1 < len(limits):
                return _RoundStopped()
            stopped = make_stopped_message("training run", limits, self.longest_s, "training.patience")
            return EndedEarlyError(make_out_of_time_evidence(stopped))
        says = (
            make_failed_evidence if side == CANDIDATE else make_missing_evidence
        )  # a failure of the baseline is no evidence about the candidate
        failure = Message(
            "patch.training_failed", "The {side}'s training failed: {problem}", side=side, problem=error.why
        )
        return EndedEarlyError(says(failure))

    # -- evidence ------------------------------------------------------------------------------------------------------
    def make_evidence(self) -> StageEvidence:
        """Return the evidence of the pairs so far. Raises: EndedEarlyError if the weights differ."""
        policy = self.policy
        evidence = self._weights()
        if are_training_results_different(policy, evidence):
            raise EndedEarlyError(make_failed_evidence(make_training_difference_message(policy, evidence), **evidence))
        evidence |= {"round_pairs": list(self.round_pairs)} | self._times()
        evidence |= {"steps": policy.steps, "device": devices.get_device_kind(), "new_code": self.suspicions.new_code}
        if doubt := evidence.get("doubt"):
            return make_missing_evidence(
                Message("patch.doubt", "The times cannot be used: {doubt}.", doubt=doubt), **evidence
            )
        if self.long:
            steps = policy.long * policy.steps
            evidence["long"] = compute_long_run_gain(self.long, steps, evidence["overhead_seconds"]) | self.long_drifts
        reason = Message(
            "patch.trained",
            "Candidate and baseline each made {runs} training runs of {steps} steps, from step {step}, in {rounds} rounds.",
            runs=len(self.totals[BASELINE]), steps=policy.steps, step=self.start.step, rounds=len(self.round_pairs),
        )  # fmt: skip
        return {"state": "passed", "reasons": [reason], **evidence}

    def _weights(self) -> dict[str, Any]:
        """Return evidence with the distances of the weights."""
        totals = {name: [run.seconds for run in runs] for name, runs in self.totals.items()}
        bits = {"same_bits": self.same_bits, "bits_expected": self.suspicions.bits_expected}
        evidence = {"total_seconds": totals, "drift": self.drift, "control_drift": self.control_drift, **bits}
        return evidence | {"left_out": self.policy.left_out_step_count}

    def _times(self) -> dict[str, Any]:
        """Return the evidence of the wall clock, and in ``cpu`` the evidence of the CPU seconds of all processes and of the busiest thread."""
        policy, baseline, candidate = self.policy, self.totals[BASELINE], self.totals[CANDIDATE]

        def by(clock: Callable[[TimedRun], float], overhead: float | None = None) -> dict[str, Any]:
            base, ours, brief, twice = (
                [clock(run) for run in runs] for runs in (baseline, candidate, self.briefs, self.twice)
            )
            if overhead is None:
                overhead = estimate_cpu_overhead(policy, base, twice)
            return make_step_seconds_evidence(policy, MeasurementTimes(base, ours, brief, twice, overhead))

        evidence = by(lambda run: run.seconds, sum(self.overheads) / len(self.overheads))
        if all(run.cpu is not None for run in (*baseline, *candidate, *self.briefs, *self.twice)):
            evidence["cpu"] = {clock: by(attrgetter(f"cpu.{clock}")) for clock in CPU_CLOCKS}
        return evidence


class _OpenSessions:
    """The sessions of a round that are open."""

    def __init__(self, measured: PairedRounds, plan: RoundPlan, opened: ExitStack) -> None:
        self._measured, self._plan, self._opened = measured, plan, opened
        self._sessions: dict[str, TimedSession] = {}

    def __contains__(self, side: str) -> bool:
        return side in self._sessions

    def begin(self, side: str) -> None:
        """Start the trainer of a side, and let it warm up."""
        self._sessions[side] = self._opened.enter_context(self._open(side))
        self.train(side, PlannedRun(0, self._warm_steps))

    def train(self, side: str, run: PlannedRun) -> TimedRun:
        """Let a side make its next run. Raises: _RoundStopped, EndedEarlyError."""
        measured, began = self._measured, time.monotonic()
        with self._explained(side):
            done = self._sessions[side].train_next(measured.compute_limit(side, run.steps))
        measured.note_seconds(side, run.steps, time.monotonic() - began)
        for other, session in self._sessions.items():
            with self._explained(other):
                session.check_still()
        return done

    def pause(self, side: str) -> None:
        """Stop a side's processes until its next run. Raises: EndedEarlyError."""
        with self._explained(side):
            self._sessions[side].pause()

    def end(self, side: str) -> None:
        """End the trainer of a side."""
        self._sessions[side].close()

    def has_room_beside(self, side: str) -> bool:
        """Whether the memory is enough for another trainer beside that of a side."""
        import psutil

        used = read_process_tree(self._sessions[side].init, MOST_PROCESSES).memory
        return bool(psutil.virtual_memory().available > ROOM * used)

    @property
    def _warm_steps(self) -> int:
        return min(self._measured.policy.steps, WARM_STEPS)

    @contextmanager
    def _explained(self, side: str) -> Iterator[None]:
        try:
            yield
        except SessionEndedError as error:
            raise self._measured.explain_end(side, error) from error

    @contextmanager
    def _open(self, name: str) -> Iterator[TimedSession]:
        """Open a session of one side in a new folder with a random name, because the candidate can write in it. One row of the ledger stands for
        all its runs. The side's compiled files move from folder to folder."""
        measured = self._measured
        start, side = measured.start, measured.sides[name]
        folder = side.folder / secrets.token_hex(4)
        folder.mkdir(parents=True)
        for compiled in side.folder.glob("*/cache"):  # at most one
            compiled.rename(folder / "cache")
        base = {
            "kind": "trunk", "recipe": make_recipe_for_one_rank(side.recipe), "data_plan": start.plan, "first_step": start.step,
            "initial_checkpoint": str(start.checkpoint), "restart_data": True, "code_commit": side.commit,
        }  # fmt: skip
        planned = [PlannedRun(draw_seed(), self._warm_steps), *self._plan.list_runs(name)]
        kernels, title = start.resolve_kernels(side.code), f"{name}, {len(planned)} runs, the longest"
        arms = [
            Arm(title, base | {"last_step": start.step + run.steps}, side.commit, run.make_early_save_keys(start.step),
            seed=run.seed, kernels=kernels)
            for run in planned
        ]  # fmt: skip
        whole = [number for number, run in enumerate(planned) if run.whole]
        early = {number: start.step + run.early for number, run in enumerate(planned) if run.early}
        longest = max(arms, key=lambda arm: arm.last_step)
        most = sum(measured.compute_limit(of, run.steps) for run in planned for of in (BASELINE, CANDIDATE))
        session = TimedSession(folder, side.code, arms, measured.origin, most, whole, early)
        ended: Exception | None = None
        with measured.runs.record_arm_states({folder: longest}) as ends:
            try:
                yield session
            except (EndedEarlyError, _RoundStopped) as error:
                ended = error
            finally:
                session.close()
                remove_path(folder / "segments")
            ends[longest.key] = session.failed
        if ended is not None:
            raise ended


def _without_weights(run: TimedRun) -> TimedRun:
    return replace(run, weights={}, rest=None, early={})


def _recorded_span(folder: Path) -> float:
    """Return the seconds from the end of the first step to the end of the last step. The baseline, which is approved code, recorded them."""
    lines = read_step_lines(folder, "metrics.jsonl")
    return float(lines[-1]["time"] - lines[0]["time"])
