"""Stage of the patch gate: N real training steps, baseline and candidate, in the sandbox (``patch_session``).

Time. A run is timed from outside, from the reveal of its data to its weights. What is subtracted is the *baseline's* overhead
(total less the span of its own steps, which approved code recorded), the same for both sides, so that a slower way to the
first step counts against a candidate. A quicker one earns nothing: of two estimates the longer counts, and the other is
what a candidate's runs take beyond runs of its own of two steps (which it may slow down; that helps it in this one only).
Code that makes its start quicker and slows those two steps down could pass the one off as the other. A second is a second however
many steps there are: where new code seems to gain in its first session, one run of each side's second is ``long`` times as long, and
must show more than all of the baseline's start could hide there.
The sessions go baseline, candidate, baseline, candidate, so that a machine that slows down shows as noise of the baseline, and what one
process draws (where its memory lies, which code it is given) is not a side's. Each side has its own compile cache; both begin with a copy of the
live code's. A baseline run of twice the steps is the control that is
known to be slow: where it does not look so, the clock is wrong and nothing is judged.

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
import math
import secrets
import shutil
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import sqlalchemy as sa
import torch

from factory.gates.patch_judge import not_the_same
from factory.gates.patch_policy import TrainingPolicy
from factory.gates.patch_session import WARM_STEPS, Rest, Session, TimedRun, Weights, timed_session
from factory.ledger import Ledger, checkpoints, data_plans, segments
from factory.progress import Progress
from factory.workspace import Workspace
from trainer import checkpoint as checkpoint_files

BRIEF_STEPS = 2  # of the runs that a candidate's own overhead is seen in
# Of state.json: what a later run goes on with, to the bit, and but for rounding.
GOES_ON = ("step", "kind", "first_step", "data_plan", "sampler", "skipped")
FOLLOWS = ("detector",)
ROUNDED = 0.1  # share by which a loss or a gradient's norm may be another
SLOW_CONTROL = 1.5  # a run of twice the steps must take more than this many times as long, or nothing is measured here


@dataclass(frozen=True)
class Start:
    """Where the comparison begins: the trunk's last checkpoint, with the recipe and data plan that made it."""

    checkpoint: Path
    step: int
    recipe: dict[str, Any]
    plan: dict[str, Any]


def find_start(ledger: Ledger) -> Start | None:
    """None while no trunk segment has finished."""
    row = ledger.one(
        sa.select(checkpoints.c.path, checkpoints.c.step, segments.c.recipe_json, data_plans.c.plan)
        .join(segments, segments.c.id == checkpoints.c.segment)
        .join(data_plans, data_plans.c.id == segments.c.data_plan)
        .where(segments.c.kind == "trunk", segments.c.state == "done")
        .order_by(checkpoints.c.step.desc(), segments.c.id.desc())
        .limit(1)
    )
    return Start(Path(row["path"]), row["step"], row["recipe_json"], row["plan"]) if row else None


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
) -> tuple[dict[str, Any], Pair | None]:
    """The stage's evidence, and the runs that ended furthest apart. Raises: IsolationError.

    ``new_code``: not all that the candidate runs was approved before, so that a gain is looked at in long runs too.
    """
    origin = checkpoint_files.read_tensors(start.checkpoint, "model")  # of however many ranks
    half = policy.pairs // 2
    watched = (
        secrets.randbelow(half),
        half + secrets.randbelow(policy.pairs - half),
    )  # the pairs that are compared whole
    timed = [Asked(_seed(), policy.steps, whole=place in watched) for place in range(policy.pairs)]
    left_out = replace(timed[watched[0]], steps=policy.steps - policy.left_out)
    longest = policy.long * policy.steps
    long = Asked(_seed(), longest, early=longest - policy.worth(longest))
    plan: tuple[tuple[Side, str, Asked, list[Asked]], ...] = (
        (baseline, "baseline", left_out, timed[:half]),
        (candidate, "candidate", Asked(_seed(), BRIEF_STEPS), timed[:half]),
        (baseline, "baseline", Asked(_seed(), 2 * policy.steps), timed[half:]),
        (candidate, "candidate", Asked(_seed(), BRIEF_STEPS), timed[half:]),
    )
    found: dict[str, list[TimedRun]] = {"baseline": [], "candidate": []}
    firsts: list[TimedRun] = []
    longs: dict[str, TimedRun] = {}
    overheads: list[float] = []
    for side in (baseline, candidate):
        _copy_cache(workspace, side)
    with progress.task("training steps, baseline and candidate", 2 * policy.pairs) as task:
        for number, (side, name, extra, runs) in enumerate(plan):
            seems = new_code and number >= 2 and _total(found["baseline"][:half]) > _total(found["candidate"][:half])
            session, folder = _session(policy, start, side, [extra, *runs, *([long] if seems else [])], origin)
            if session.failed:
                return _broken(name, session.failed), None
            firsts.append(session.runs[0])
            done = session.runs[1 : 1 + len(runs)]
            found[name] += done
            if seems:
                longs[name] = session.runs[-1]
            if name == "baseline":
                spans = [_recorded_span(folder / "runs" / f"{1 + n:02d}") for n in range(1, len(done) + 1)]
                overheads += [run.seconds - span for run, span in zip(done, spans, strict=True)]
            task.advance(len(done), f"{name}: {min(run.seconds for run in done):.1f} s a run")
            if number == 1:  # a pair of sessions is enough to see that
                learnt, _ = _learnt_the_same(policy, firsts[0], found, watched[0], origin)
                if learnt["drift"] > policy.max_drift * learnt["control_drift"]:
                    return {
                        "state": "failed",
                        "reasons": [not_the_same(policy, learnt["drift"], learnt["control_drift"])],
                        **learnt,
                    }, None
    fewer, first_brief, twice, second_brief = firsts
    evidence, drifts = _learnt_the_same(policy, fewer, found, watched[0], origin)
    pairs = list(zip(found["candidate"], found["baseline"], strict=True))
    overhead = evidence["overhead_seconds"] = sum(overheads) / len(overheads)
    totals = evidence["total_seconds"]
    away = squares(fewer.rest, found["baseline"][watched[0]].rest)
    for ours, theirs in (pairs[place] for place in watched):
        if wrong := differs(ours.rest, theirs.rest, away, policy.max_drift):
            broken = _broken("candidate", f"the next would not go on from it as from the baseline's: {wrong}")
            return broken | evidence, None
    shortest = min(*totals["baseline"], *totals["candidate"])
    if shortest <= overhead:
        reason = f"{policy.steps} steps drown in the overhead of a run, {overhead:.2f} s: raise training.steps"
        return {"state": "missing", "reasons": [reason], **evidence}, None
    counted = policy.steps - 1  # the first step belongs to the overhead
    usual = statistics.median(totals["baseline"])
    slow = evidence["slow_control"] = (twice.seconds - overhead) / (usual - overhead)
    if slow <= SLOW_CONTROL:
        reason = f"no time can be trusted here: twice the steps took {slow:.2f}× the time"
        return {"state": "missing", "reasons": [reason], **evidence}, None
    steps_alone = counted / (policy.steps - BRIEF_STEPS)
    longest_brief = max(first_brief.seconds, second_brief.seconds)
    candidate_seconds = [
        max(total - overhead, (total - longest_brief) * steps_alone) / counted for total in totals["candidate"]
    ]
    evidence |= {
        "state": "passed",
        "reasons": [f"{policy.pairs} runs of {policy.steps} steps a side, from step {start.step}"],
        "steps": policy.steps,
        "new_code": new_code,
        "baseline_seconds": [(total - overhead) / counted for total in totals["baseline"]],
        "candidate_seconds": candidate_seconds,
    }
    if longs:
        evidence["long"] = _long(longs["baseline"], longs["candidate"], longest, overhead, origin)
    return evidence, pairs[drifts.index(max(drifts))]


def _learnt_the_same(
    policy: TrainingPolicy, fewer: TimedRun, found: Mapping[str, Sequence[TimedRun]], watched: int, origin: Weights
) -> tuple[dict[str, Any], list[float]]:
    """The evidence of weights, and how far each pair's are apart; ``fewer``: pair ``watched``'s baseline, but for the steps left out."""
    control = _drift(fewer.weights, found["baseline"][watched].weights, origin, of_one=False)
    pairs = zip(found["candidate"], found["baseline"], strict=True)
    drifts = [_drift(ours.weights, theirs.weights, origin) for ours, theirs in pairs]
    totals = {name: [run.seconds for run in runs] for name, runs in found.items()}
    evidence = {"total_seconds": totals, "drift": max(drifts), "control_drift": control, "left_out": policy.left_out}
    return evidence, drifts


def _long(theirs: TimedRun, ours: TimedRun, steps: int, overhead: float, origin: Weights) -> dict[str, Any]:
    """What one run of each side over the same data shows, ``policy.long`` times as long as the others."""
    return {
        "steps": steps,
        "ratio": (theirs.seconds - overhead) / max(ours.seconds - overhead, 1e-3),
        "hideable": _hideable(overhead, theirs.seconds - overhead, steps - 1),
        "drift": _drift(ours.weights, theirs.weights, origin),
        "control_drift": _drift(theirs.early, theirs.weights, origin, of_one=False),
    }


def _seed() -> int:
    return secrets.randbelow(1 << 31)


def _total(runs: Sequence[TimedRun]) -> float:
    return sum(run.seconds for run in runs)


def _session(
    policy: TrainingPolicy, start: Start, side: Side, runs: Sequence[Asked], origin: Weights
) -> tuple[Session, Path]:
    """A warm-up, and the runs, in one process; and the folder of its own that they are in.

    What the side compiled before moves along. A folder that a candidate wrote in is not written in again, and its name tells nothing.
    """
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
            "kernels": None,
        }
        for run in (Asked(_seed(), min(policy.steps, WARM_STEPS)), *runs)
    ]
    shards = [Path(shard["path"]) for shard in start.plan["token_shards"]]
    folder = side.folder / secrets.token_hex(4)
    folder.mkdir(parents=True)
    for compiled in side.folder.glob("*/cache"):  # one, or none
        compiled.rename(folder / "cache")
    usual = (policy.pairs - policy.pairs // 2 + 2) * policy.steps  # steps that wall_seconds are for
    session = timed_session(
        folder,
        side.code,
        specs,
        [start.checkpoint, *shards],
        origin,
        policy.wall_seconds * max(1.0, sum(run.steps for run in runs) / usual),
        [number for number, run in enumerate(runs, 1) if run.whole],
        {number: start.step + run.early for number, run in enumerate(runs, 1) if run.early},
    )
    return session, folder


def alone(recipe: dict[str, Any]) -> dict[str, Any]:
    """The recipe for the one rank of the sandbox: nothing is split, and what is recomputed still is."""
    parallel = recipe.get("parallel") or {}
    return recipe | {"parallel": parallel | {"tensor": 1, "replicas": 1}}


def _copy_cache(workspace: Workspace, side: Side) -> None:
    """What approved code compiled while it trained. A copy: what a candidate writes there is never read by anybody else."""
    known, own = workspace.root / "cache" / "inductor", side.folder / "known" / "cache" / "inductor"
    if known.is_dir() and not own.exists():
        shutil.copytree(known, own, symlinks=True)


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


def _hideable(overhead: float, steps_alone: float, steps: int) -> float:
    """The gain that the baseline's own steps would show after a start that took no time but for the first step."""
    avoidable = max(0.0, overhead - steps_alone / steps)
    return steps_alone / max(steps_alone - avoidable, steps_alone / 1e6)


def _drift(candidate: Weights, baseline: Weights, origin: Weights, of_one: bool = True) -> float:
    """‖candidate − baseline‖ / ‖baseline − origin‖; ``of_one``: or half that of the worst tensor, if it is more."""
    worst = 0.0
    apart = moved = 0.0
    for name, tensor in origin.items():
        a = float((candidate[name].double() - baseline[name].double()).square().sum())
        m = float((baseline[name].double() - tensor.double()).square().sum())
        apart, moved = apart + a, moved + m
        if a:
            worst = max(worst, (a / m) ** 0.5 if m else 1e9)
    whole = (apart / moved) ** 0.5 if moved else (1e9 if apart else 0.0)
    return max(whole, worst / 2) if of_one else whole


def squares(one: Rest | None, other: Rest | None) -> dict[str, float]:
    """Squared distance of two runs' optimiser states by kind (``exp_avg``, ``exp_avg_sq``, ``momentum``)."""
    assert one is not None and other is not None
    apart: dict[str, float] = defaultdict(float)
    for name, tensor in other.optimizer.items():
        if name != "rng":
            apart[name.partition(".")[0]] += float((one.optimizer[name].double() - tensor.double()).square().sum())
    return apart


def differs(candidate: Rest | None, baseline: Rest | None, away: Mapping[str, float], max_drift: float) -> str:
    """What a run that goes on from the candidate's checkpoint would find otherwise than in the baseline's; empty: nothing.

    Moments are told by kind, as their sizes have nothing to do with each other, and may be apart by a share of ``away``: the squares of
    what steps that are left out make.
    """
    assert candidate is not None and baseline is not None
    if lost := sorted(baseline.state.keys() - candidate.state.keys()):
        return f"state.json has no {', '.join(lost)}"
    if other := [key for key in GOES_ON if candidate.state.get(key) != baseline.state.get(key)]:
        return f"state.json has another {', '.join(other)}"
    if other := [key for key in FOLLOWS if not _alike(candidate.state.get(key), baseline.state.get(key))]:
        return f"state.json has another {', '.join(other)}"
    if _learnt(candidate.state.get("recipe")) != _learnt(baseline.state.get("recipe")):
        return "state.json has another recipe"
    for name, tensor in sorted(baseline.optimizer.items()):
        found = candidate.optimizer.get(name)
        if found is None or found.shape != tensor.shape or found.dtype != tensor.dtype:
            return f"the optimiser's {name} is not there, or of another shape or dtype"
        if name.startswith("step.") and not torch.equal(found, tensor):
            return f"the optimiser's {name} is another"
    for kind, square in sorted(squares(candidate, baseline).items()):
        allowed = away.get(kind, 0.0)
        share = (square / allowed) ** 0.5 if allowed else math.inf
        if square and not share <= max_drift:
            return f"the optimiser's {kind} is {share:.2g} of what the steps left out make away, {max_drift:g} may be"
    return ""


def _alike(one: object, other: object) -> bool:
    """The same but for rounding: numbers of a loss or a gradient's norm."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= ROUNDED * max(abs(one), abs(other))
    return one == other


def _learnt(recipe: object) -> object:
    """What a recipe says but for how a step is computed."""
    if not isinstance(recipe, dict) or not isinstance(recipe.get("batch"), dict):
        return recipe
    return recipe | {"compile": None, "batch": recipe["batch"] | {"micro_sequences": None}}
