"""Stage of the patch gate: N real training steps, baseline and candidate, in the sandbox (``patch_session``).

Time. A run is timed from outside, from the reveal of its data to its weights, and ``patch_timing`` makes seconds of a step of it. Where new
code seems to gain in its first session, one run of each side's second is ``long`` times as long. Beside the wall clock the CPU seconds
of the sandbox's processes are read, at the same moments.
The sessions go baseline, candidate, baseline, candidate, so that a machine that slows down shows as noise of the baseline, and what one
process draws (where its memory lies, which code it is given) is not a side's. A gain that would promote is measured again, with the
candidate first: both must show it. Each side has its own compile cache; both begin with a copy of the
live code's. A baseline run of twice the steps is the control that is known to be slow. Where it does not look so, or where the
baseline's own runs differ too much, all is measured anew, on new data, a few times within a budget.

Result. Every run trains on data of its own (a fresh random seed), the same for a baseline and a candidate run, so that no
weights can be prepared or kept from an earlier run. The weights that the candidate leaves are its only testimony: they are
compared with the baseline's after the same steps on the same data (the next stage scores those that ended furthest apart).
How far apart they may be is measured too: one more baseline run leaves out as many steps as would be worth the
least gain that counts, and the candidate must end much nearer than that. No gain can be had by doing less.

The next segment goes on from what this code writes, and has more than weights to go on from. So every run must leave a whole
checkpoint, and of one pair of each two sessions, which of them nobody can know, the rest is compared by the same rule: the optimiser's
moments, where the data stands, the recipe, and what anomalies are told by.
"""

from __future__ import annotations

import json
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from factory.core import devices
from factory.core.progress import Progress
from factory.core.workspace import Workspace
from factory.gates.patch.judge import CPU_CLOCKS, judge_measurement, learns_otherwise, not_the_same
from factory.gates.patch.likeness import differs, drift, squares
from factory.gates.patch.policy import TrainingPolicy
from factory.gates.patch.session import WARM_STEPS, Session, TimedRun, Weights, timed_session
from factory.gates.patch.timing import BRIEF_STEPS, RunSeconds, cpu_overhead, long_timing, noise_of, timing, unsteady
from factory.gates.patience import baseline_stopped, patiently, stopped
from factory.gates.release.judge import PROMOTE
from factory.gates.training_start import Start
from trainer.contract.checkpoint import format as checkpoint_files


@dataclass(frozen=True)
class Side:
    """Baseline or candidate: its code, its recipe, and the folder that only its own runs write to."""

    code: Path
    recipe: dict[str, Any]
    folder: Path


@dataclass(frozen=True)
class Asked:
    """One run. ``whole``: its checkpoint is compared whole; ``early``: its weights are wanted after so many steps, too."""

    seed: int
    steps: int
    whole: bool = False
    early: int = 0

    def saves(self, step: int) -> dict[str, int]:
        """What of a recipe has the early weights saved, in a run from ``step``: its end comes before the next multiple."""
        return {"checkpoint_every": step + self.early, "keep_checkpoints": 2} if self.early else {}


Pair = tuple[TimedRun, TimedRun]  # candidate and baseline, on the same data


def compare_training(
    policy: TrainingPolicy,
    start: Start,
    baseline: Side,
    candidate: Side,
    workspace: Workspace,
    progress: Progress,
    new_code: bool = True,
    tries: int = 1,
) -> tuple[dict[str, Any], Pair | None]:
    """The stage's evidence, and the runs that ended furthest apart. Raises: IsolationError.

    ``new_code``: not all that the candidate runs was approved before, so that a gain is looked at in long runs too.
    ``tries``: on the same target, as the judge counts them.
    """
    known = devices.compiled(workspace.root)  # what approved code compiled while it trained
    origin = checkpoint_files.read_tensors(start.checkpoint, "model")
    measure = _Measurement(policy, start, baseline, candidate, new_code, known, origin)
    for side in (baseline, candidate):
        copy_cache(known, side.folder / "known" / "cache")
    found, pair = measure.steady(progress)
    if found["state"] != "passed" or judge_measurement(policy, found, tries).outcome != PROMOTE:
        return found, pair
    progress.line("  training: a gain; measured again, the candidate first")
    again, other = replace(measure, repeated_s=found["session_seconds"]).steady(progress)
    found["again"] = again
    if again["state"] != "passed":
        found |= {"state": again["state"], "reasons": [f"measured again: {reason}" for reason in again["reasons"]]}
    else:
        found["reasons"] = [f"{found['reasons'][0]}, and as many again"]
    if other is None or again["drift"] > found["drift"]:
        pair = other
    return found, pair


@dataclass(frozen=True)
class _Measurement:
    """Everything that is the same in each of the stage's measurements."""

    policy: TrainingPolicy
    start: Start
    baseline: Side
    candidate: Side
    new_code: bool
    known: Path
    origin: Weights
    repeated_s: float = (
        0.0  # of the baseline's first session in the measurement that this one repeats; 0: it repeats none
    )

    def steady(self, progress: Progress) -> tuple[dict[str, Any], Pair | None]:
        """``once``, and anew on new data while the baseline's own runs are no measure: ``tries`` times within the budget."""
        policy = self.policy
        discarded: list[dict[str, Any]] = []
        began, longest = time.monotonic(), 0.0
        while True:
            round_began = time.monotonic()
            found, pair = self.once(progress)
            judged = pair is None or learns_otherwise(policy, found)  # whatever its clock says
            doubt = "" if judged else unsteady(policy, found, 1 + len(discarded))
            if discarded:
                found["discarded"] = discarded
            now = time.monotonic()
            longest = max(longest, now - round_began)
            if not doubt or len(discarded) + 1 >= policy.tries or now - began + longest > policy.budget_seconds:
                if doubt and found["state"] == "missing":
                    found["reasons"] = [f"{doubt}; measured {len(discarded) + 1} of at most {policy.tries} times"]
                return found, pair
            progress.line(f"  training: {doubt}; measured anew")
            noise = noise_of(found) if "baseline_seconds" in found else None
            kept = {key: found[key] for key in ("total_seconds", "overhead_seconds")}
            discarded.append({"doubt": doubt, "noise": noise} | kept)

    def once(self, progress: Progress) -> tuple[dict[str, Any], Pair | None]:
        """Four sessions on data of their own: their evidence, and the pair that ended furthest apart; no pair where they broke off."""
        policy, start = self.policy, self.start
        half = policy.pairs // 2
        watched = (
            secrets.randbelow(half),
            half + secrets.randbelow(policy.pairs - half),
        )  # the pairs that are compared whole
        timed = [Asked(_seed(), policy.steps, whole=place in watched) for place in range(policy.pairs)]
        left_out = replace(timed[watched[0]], steps=policy.steps - policy.left_out)
        longest = policy.long * policy.steps
        long = Asked(_seed(), longest, early=longest - policy.worth(longest))
        plan: list[tuple[str, Asked, list[Asked]]] = [
            ("baseline", left_out, timed[:half]),
            ("candidate", Asked(_seed(), BRIEF_STEPS), timed[:half]),
            ("baseline", Asked(_seed(), 2 * policy.steps), timed[half:]),
            ("candidate", Asked(_seed(), BRIEF_STEPS), timed[half:]),
        ]
        if self.repeated_s:  # a machine that becomes quieter helps who is last
            plan = [plan[place] for place in (1, 0, 3, 2)]
        found: dict[str, list[TimedRun]] = {"baseline": [], "candidate": []}
        firsts: dict[str, list[TimedRun]] = {"baseline": [], "candidate": []}
        longs: dict[str, TimedRun] = {}
        overheads: list[float] = []
        before = self.repeated_s  # seconds of the last baseline session
        first_s = 0.0  # of the first, which is the most like a candidate's
        with progress.task("training steps, baseline and candidate", 2 * policy.pairs) as task:
            for number, (name, extra, runs) in enumerate(plan):
                seems = (
                    self.new_code
                    and number >= 2
                    and not self.repeated_s
                    and _total(found["baseline"][:half]) > _total(found["candidate"][:half])
                )
                asked = [extra, *runs, *([long] if seems else [])]
                session, folder, broken = self._session(name, asked, before)
                if broken is not None:
                    return broken, None
                firsts[name].append(session.runs[0])
                done = session.runs[1 : 1 + len(runs)]
                found[name] += done
                if seems:
                    longs[name] = session.runs[-1]
                if name == "baseline":
                    before = session.seconds
                    first_s = first_s or before
                    spans = [_recorded_span(folder / "runs" / f"{1 + n:02d}") for n in range(1, len(done) + 1)]
                    overheads += [run.seconds - span for run, span in zip(done, spans, strict=True)]
                shutil.rmtree(folder / "runs", ignore_errors=True)
                task.advance(len(done), f"{name}: {min(run.seconds for run in done):.1f} s a run")
                if number == 1:  # a pair of sessions is enough to see that
                    learnt, _ = _learnt_the_same(policy, firsts["baseline"][0], found, watched[0], self.origin)
                    if learns_otherwise(policy, learnt):
                        reason = not_the_same(policy, learnt["drift"], learnt["control_drift"])
                        return {"state": "failed", "reasons": [reason], **learnt}, None
        fewer, twice = firsts["baseline"]
        evidence, drifts = _learnt_the_same(policy, fewer, found, watched[0], self.origin)
        pairs = list(zip(found["candidate"], found["baseline"], strict=True))
        away = squares(fewer.rest, found["baseline"][watched[0]].rest)
        for ours, theirs in (pairs[place] for place in watched):
            if wrong := differs(ours.rest, theirs.rest, away, policy.max_drift):
                broken = _broken("candidate", f"the next would not go on from it as from the baseline's: {wrong}")
                return broken | evidence, None
        evidence |= _timed(policy, found, firsts["candidate"], twice, sum(overheads) / len(overheads))
        evidence |= {
            "steps": policy.steps,
            "new_code": self.new_code,
            "device": devices.kind(),
            "session_seconds": first_s,
        }
        furthest = pairs[drifts.index(max(drifts))]
        if doubt := evidence.get("doubt"):
            return evidence | {"state": "missing", "reasons": [doubt]}, furthest
        if longs:
            evidence["long"] = _long(
                longs["baseline"], longs["candidate"], longest, evidence["overhead_seconds"], self.origin
            )
        reason = f"{policy.pairs} runs of {policy.steps} steps a side, from step {start.step}"
        return evidence | {"state": "passed", "reasons": [reason]}, furthest

    def _session(self, name: str, asked: Sequence[Asked], before: float) -> tuple[Session, Path, dict[str, Any] | None]:
        """A session, its folder, and the evidence where it broke. A candidate's gets time by the ``before`` seconds of the baseline's."""
        policy, start, side = self.policy, self.start, self.baseline if name == "baseline" else self.candidate
        if name == "baseline":
            usual = (policy.pairs - policy.pairs // 2 + 2) * policy.steps  # steps that wall_seconds are for
            limits: tuple[float, ...] = (policy.wall_seconds * max(1.0, sum(run.steps for run in asked) / usual),)
        else:
            limits = policy.patience.limits(before)

        def attempt(number: int, limit: float) -> tuple[Session, Path]:
            if number:  # it has seen this data: nothing that it wrote then may be there now
                for written in side.folder.glob("*/cache"):
                    shutil.rmtree(written.parent, ignore_errors=True)
                copy_cache(self.known, side.folder / secrets.token_hex(4) / "cache")
            return _session(start, side, min(policy.steps, WARM_STEPS), asked, self.origin, limit)

        session, folder = patiently(limits, attempt, lambda ended: ended[0].out_of_time)
        if not session.failed:
            return session, folder, None
        broken = _broken(name, session.failed)
        if session.out_of_time:
            why = stopped("the candidate's training session", limits, before, "training.patience")
            if name == "baseline":
                why = baseline_stopped("a training session", limits[0], "training.wall_seconds")
            broken = {"state": "missing", "reasons": [why]}
        return session, folder, broken


def _learnt_the_same(
    policy: TrainingPolicy, fewer: TimedRun, found: Mapping[str, Sequence[TimedRun]], watched: int, origin: Weights
) -> tuple[dict[str, Any], list[float]]:
    """The evidence of weights, and how far each pair's are apart; ``fewer``: pair ``watched``'s baseline, but for the steps left out."""
    control = drift(fewer.weights, found["baseline"][watched].weights, origin, of_one=False)
    pairs = zip(found["candidate"], found["baseline"], strict=True)
    drifts = [drift(ours.weights, theirs.weights, origin) for ours, theirs in pairs]
    totals = {name: [run.seconds for run in runs] for name, runs in found.items()}
    evidence = {"total_seconds": totals, "drift": max(drifts), "control_drift": control, "left_out": policy.left_out}
    return evidence, drifts


def _timed(
    policy: TrainingPolicy,
    found: Mapping[str, Sequence[TimedRun]],
    briefs: Sequence[TimedRun],
    twice: TimedRun,
    overhead: float,
) -> dict[str, Any]:
    """The evidence of the wall clock, and in it ``cpu``: that of the whole tree's and the busiest thread's CPU seconds."""

    def by(clock: Callable[[TimedRun], float], overhead: float | None = None) -> dict[str, Any]:
        base, ours, first = ([clock(run) for run in runs] for runs in (found["baseline"], found["candidate"], briefs))
        slow = clock(twice)
        if overhead is None:
            overhead = cpu_overhead(policy, base, slow)
        return timing(policy, RunSeconds(base, ours, first, slow, overhead))

    evidence = by(lambda run: run.seconds, overhead)
    if all(run.cpu is not None for run in (*found["baseline"], *found["candidate"], *briefs, twice)):
        evidence["cpu"] = {clock: by(attrgetter(f"cpu.{clock}")) for clock in CPU_CLOCKS}
    return evidence


def _long(theirs: TimedRun, ours: TimedRun, steps: int, overhead: float, origin: Weights) -> dict[str, Any]:
    """What one run of each side over the same data shows, ``policy.long`` times as long as the others."""
    return long_timing(theirs.seconds, ours.seconds, steps, overhead) | {
        "drift": drift(ours.weights, theirs.weights, origin),
        "control_drift": drift(theirs.early, theirs.weights, origin, of_one=False),
    }


def _seed() -> int:
    return secrets.randbelow(1 << 31)


def _total(runs: Sequence[TimedRun]) -> float:
    return sum(run.seconds for run in runs)


def _session(
    start: Start, side: Side, warm_steps: int, runs: Sequence[Asked], origin: Weights, wall_seconds: float
) -> tuple[Session, Path]:
    """A warm-up, and the runs, in one process; and the folder of its own that they are in.

    What the side compiled before moves along. A folder that a candidate wrote in is not written in again, and its name tells nothing.
    """
    folder = side.folder / secrets.token_hex(4)
    folder.mkdir(parents=True)
    kernels = folder / "kernels.yaml"  # beside the runs: a side can change its own alone
    kernels.write_text(start.kernels_of(side.code))
    specs = [
        {
            "kind": "trunk",
            "recipe": alone(side.recipe) | run.saves(start.step),
            "data_plan": start.plan | {"seed": run.seed},
            "first_step": start.step,
            "last_step": start.step + run.steps,
            "initial_checkpoint": str(start.checkpoint),
            "restart_data": True,
            "code_commit": "",
            "kernels": str(kernels),
        }
        for run in (Asked(_seed(), warm_steps), *runs)
    ]
    shards = [Path(shard["path"]) for shard in start.plan["token_shards"]]
    for compiled in side.folder.glob("*/cache"):  # one, or none
        compiled.rename(folder / "cache")
    session = timed_session(
        folder,
        side.code,
        specs,
        [start.checkpoint, *shards],
        origin,
        wall_seconds,
        [number for number, run in enumerate(runs, 1) if run.whole],
        {number: start.step + run.early for number, run in enumerate(runs, 1) if run.early},
    )
    return session, folder


def alone(recipe: dict[str, Any]) -> dict[str, Any]:
    """The recipe for the one rank of the sandbox: nothing is split, and what is recomputed still is."""
    parallel = recipe.get("parallel") or {}
    return recipe | {"parallel": parallel | {"tensor": 1, "replicas": 1}}


def copy_cache(known: Path, cache: Path) -> None:
    """A side's own copy of what approved code compiled: what a candidate writes there is never read by anybody else."""
    if known.is_dir():
        shutil.copytree(known, cache / "inductor", symlinks=True)


def _broken(name: str, why: str) -> dict[str, Any]:
    # What breaks the baseline says nothing about the candidate.
    return {
        "state": "failed" if name == "candidate" else "missing",
        "reasons": [f"the {name}'s training run failed: {why}"],
    }


def _recorded_span(folder: Path) -> float:
    """Seconds from the end of the first step to the end of the last, as the baseline (approved code) recorded them."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return float(lines[-1]["time"] - lines[0]["time"])
