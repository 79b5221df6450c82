"""One diagnosis: the episode that an anomaly belongs to, its replays in the sandbox, the cause, the report, what the policy does.

Anomalies that belong together have one cause, which shows as a spike here, a jump of the norm there, and again some steps later. Killed at any
moment, the same call goes on: replays that ended are read again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.core.untrusted import visible
from agents.loss_doctor.arms import rate_arms
from agents.loss_doctor.causes import HARDWARE, LAYOUT, UNKNOWN
from agents.loss_doctor.curves import KINDS, StepPoint, onset, points
from agents.loss_doctor.doctor import Diagnosis, diagnose
from factory.audit.keeping import ladder_of
from factory.code_loop.agent_runs import has_endpoint
from factory.core import devices
from factory.core.errors import ConfigError, FactoryError, InputError
from factory.core.faults import is_of_no_file
from factory.core.launching import ranks
from factory.core.policy_file import policy_sha256
from factory.core.progress import Progress
from factory.core.removal import remove
from factory.core.workspace import Workspace
from factory.diagnosis import acting
from factory.diagnosis.bench import Episode, WindowBench
from factory.gates.release.anomaly_policy import AnomalyPolicy
from factory.git import repository
from factory.ledger.anomalies import CLOSED, DIAGNOSED, DIAGNOSIS, REPLICAS_APART, AnomalyRow, newest_about, settled
from factory.ledger.ledger import Ledger, record
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow, Subject
from factory.ledger.writing import record_verdict
from factory.runs.arm import Arm, for_one_rank
from factory.runs.running import Runs
from factory.runs.sandboxed import Ended
from factory.runs.trace import step_lines
from factory.runs.untrusted_files import UntrustedFileError
from factory.training.planning import plan_of
from factory.training.segment_folder import spec_of
from kernels.contract.files import finite
from trainer.contract.checkpoint import format as checkpoints
from trainer.contract.data.data_plan import DataPlan
from trainer.contract.errors import TrainerError

GAP = 8  # steps without an anomaly end an episode
LONGEST = 32  # steps of an episode, whatever comes after them
MOST_STEPS = 6  # of an episode, from its onset on, that are replayed; what follows is another diagnosis
NEAR = 6  # steps before the doctor's own onset of something sudden that the trainer's may lie: its search is early by up to 16
SLOW = (
    "divergence",
    "activation_jump",
    "attention_logits",
    "update_jump",
)  # begin long before they are noticed: the trainer's counts
REACH = 128  # steps before an anomaly that its onset, as the trainer has it, may lie


@dataclass(frozen=True)
class Noted:
    """An anomaly as the trainer noted it. ``began``: its own search for the onset; ``where``: domain/<name> or layer/<name>."""

    number: int
    step: int
    kind: str
    began: int | None = None
    where: str = ""

    @classmethod
    def of(cls, number: int, step: int, kind: str, detail: Mapping[str, Any] | None) -> Noted:
        """``detail``: its line of anomalies.jsonl, which patchable code wrote: what is no onset before the step is left out."""
        began, where = (detail or {}).get("onset"), (detail or {}).get("where", "")
        possible = type(began) is int and step - REACH <= began <= step
        return cls(number, step, kind, began if possible else None, where if isinstance(where, str) else "")


@dataclass(frozen=True)
class EpisodeSpan:
    """``kind``: of its anomalies the one that tells most, and ``where`` it was; steps [onset, last], both included, are replayed; ``noted``:
    the first and the last step with an anomaly."""

    kind: str
    onset: int
    last: int
    anomalies: tuple[int, ...]  # their numbers
    where: str = ""
    noted: tuple[int, int] = (0, 0)


def spans(anomalies: Sequence[Noted], lines: Sequence[StepPoint], begins: int = 0) -> list[EpisodeSpan]:
    """The episodes of a segment's anomalies, oldest first. What is not about the loss, the gradient or a layer is left out.

    What tells most in an episode says where it is. It begins where the doctor's own search says, or earlier, where the trainer's does and
    it is not far off; never before step ``begins``.

    >>> noted = [Noted(1, 50, "grad_norm_jump", 48), Noted(2, 51, "loss_spike"), Noted(3, 90, "plateau"), Noted(4, 200, "divergence", 150)]
    >>> [(s.kind, s.onset, s.last) for s in spans(noted, [])]
    [('loss_spike', 48, 51), ('plateau', 90, 90), ('divergence', 150, 200)]
    >>> [s.noted for s in spans([Noted(n, 8 * n, "loss_spike") for n in range(1, 9)], [])]  # a chain is cut
    [(8, 32), (40, 64)]
    """
    found: list[list[Noted]] = []
    for anomaly in sorted((a for a in anomalies if a.kind in KINDS), key=lambda a: (a.step, a.number)):
        near = found and anomaly.step - found[-1][-1].step <= GAP
        if near and anomaly.step - found[-1][0].step < LONGEST:
            found[-1].append(anomaly)
        else:
            found.append([anomaly])
    made: list[EpisodeSpan] = []
    for group in found:
        lead = min(group, key=lambda a: KINDS.index(a.kind))
        least = made[-1].last + 1 if made else begins
        first = own = onset(lines, lead.step)
        for anomaly in (a for a in group if own - NEAR <= a.step <= lead.step and a.kind != "plateau"):
            tells = anomaly.began is not None and (anomaly.kind in SLOW or anomaly.began >= own - NEAR)
            first = min(first, anomaly.began if tells and anomaly.began is not None else anomaly.step)
        first = min(lead.step, max(first, least))
        last = max(a.step for a in group if a.step < max(lead.step + 1, first + MOST_STEPS))
        noted = (group[0].step, group[-1].step)
        made.append(EpisodeSpan(lead.kind, first, last, tuple(a.number for a in group), lead.where, noted))
    return made


PATIENCE_SECONDS = 600.0  # beyond many times what the longest replay took
AROUND = 40  # steps before the onset, and after the last step, that are drawn
CURVES = 4  # of arms, besides the live run's
NEW_FOR = 16  # steps after a change in which an anomaly's onset may be its effect


def diagnose_and_act(plant: Plant, number: int, steps: int | None = None) -> dict[str, Any]:
    """Diagnose the episode of an anomaly, record it, and do what the policy says; returns what was recorded.

    What cannot be replayed is recorded as ``unknown`` with the reason, so that a person is asked and the daemon does not begin again.
    ``steps``: another budget than the policy's. Raises: InputError for an anomaly that there is not, or is not of the loss; ConfigError;
    CheckoutError, and what a fault of the machine makes of it: nothing is recorded then, and the same call goes on.
    """
    policy = AnomalyPolicy.load(plant.workspace.policy("anomalies.yaml"))
    budget = policy.steps if steps is None else steps
    if budget < 1:
        raise ConfigError(
            f"a budget of {budget} replayed steps finds nothing: set 'steps' in policies/anomalies.yaml, or --steps, to 1 or more"
        )
    row = AnomalyRow.get(plant.ledger, number)
    recorded = newest_about(plant.ledger, DIAGNOSED).get(number)
    if recorded and number not in settled(plant.ledger):  # killed before anything was done about it
        return recorded | {"done": _done(plant.ledger, policy, recorded, plant.progress)}
    if end := newest_about(plant.ledger, CLOSED).get(number):
        raise InputError(f"anomaly {number} is closed: {end['how']} by {end['by']}")
    segment = SegmentRow.get(plant.ledger, row.segment)
    lines: list[StepPoint] = []
    unreadable = ""
    try:
        lines = live_lines(plant.ledger, segment)
    except InputError as error:
        unreadable = str(error)
    span = _span(plant.ledger, row, segment.first_step, lines)
    lead = span.anomalies[0]
    folder = plant.workspace.root / "diagnoses" / f"{lead:05d}"
    found: Diagnosis | None = None
    keys: dict[str, Any] = {}  # of the recipe, that clear it
    causes, why = [UNKNOWN], ""
    title = f"diagnosis of anomaly {lead} ({span.kind}, step {span.onset} of segment {segment.id}), replayed steps"
    with plant.progress.task(title, budget) as told:
        try:
            if row.kind == REPLICAS_APART:
                causes = [HARDWARE, LAYOUT]
                raise FactoryError(_apart(row))
            if unreadable:
                raise InputError(unreadable)
            episode, notes = _episode(plant, segment, span, lines)
            trainers = _Trainers(
                Runs(plant, folder, "diagnosis", Subject("anomaly", lead)), episode, policy.wall_seconds
            )
            bench = WindowBench(episode, folder, trainers, budget, told=told.advance)
            if policy.previous_python and not os.access(policy.previous_python, os.X_OK):
                notes.append(f"previous_python in policies/anomalies.yaml, {policy.previous_python}, cannot be run")
            elif policy.previous_python and episode.environment_changed:
                bench.before = policy.previous_python
            found = diagnose(bench)
            keys = next((dict(arm.recipe) for arm in rate_arms(bench.case()) if arm.name == found.remedy), {})
            why = "; ".join([found.why, *notes])
        except (FactoryError, TrainerError, UntrustedFileError, OSError) as error:
            if isinstance(error, repository.CheckoutError) or is_of_no_file(error):
                raise  # the machine's fault says nothing about the anomaly: another try may tell
            why = str(error)
        finally:
            repository.remove_worktree(plant.workspace.repository, _worktree(plant.workspace, segment, ""))
            repository.remove_worktree(plant.workspace.repository, _worktree(plant.workspace, segment, "-previous"))
    told_of = found or Diagnosis(tuple(causes), why, (), (), (), (), 0)
    detail: dict[str, Any] = told_of.to_json() | {
        "why": why, "anomalies": list(span.anomalies), "segment": segment.id, "kind": span.kind, "onset": span.onset, "last": span.last,
        "noted": list(span.noted),
        "budget": budget, "override": {"keys": keys, "until": span.last + 1 + policy.rate_steps} if keys else None,
        "to_word": has_endpoint(plant.workspace),
    }  # fmt: skip
    undo = _blamed(plant, segment, detail["causes"])
    page = plant.workspace.reports / f"anomaly-{lead}.html"
    detail |= {"report": plant.ledger.inside(page), "drawn": _drawn(detail, lines, told_of), "undo": undo}
    with plant.ledger.begin() as tx:
        record(tx, DIAGNOSED, Subject("anomaly", lead), finite(detail))
        if undo:
            record_verdict(
                tx, DIAGNOSIS, Subject("segment", segment.id), against=None, policy_sha256=policy_sha256(policy), subject_sha256=segment.code_commit,
                outcome="reject", reasons=[f"anomaly {lead}, {' or '.join(detail['causes'])}: {why}"], evidence={"anomaly": lead, "undo": undo},
            )  # fmt: skip
    done = _done(plant.ledger, policy, detail | {"lead": lead}, plant.progress)
    if found is not None:
        remove(folder)
    return detail | {"done": done}


def _done(ledger: Ledger, policy: AnomalyPolicy, detail: Mapping[str, Any], progress: Progress) -> str:
    """What the policy does about a diagnosis that is recorded."""
    done = acting.act(ledger, policy, detail["lead"])
    where = f"{detail['kind']}, segment {detail['segment']}, steps {detail['onset']}–{detail['last']}"
    progress.line(f"  anomaly {detail['lead']} ({where}): {' or '.join(detail['causes'])}; {done}")
    return done


def _apart(row: AnomalyRow) -> str:
    """Nothing is replayed for it: what a step computes was not wrong, the copies of its result were."""
    weights = ", ".join(str(name) for name in (row.detail or {}).get("weights", ())) or "their names were not told"
    return f"after step {row.step} the ranks held other bits of the same weights: {visible(weights, 600)}"


def _blamed(plant: Plant, segment: SegmentRow, causes: list[str]) -> list[int]:
    try:
        return acting.blamed_patches(plant, causes, segment.code_commit, previous_commit(plant.ledger, segment, 0))
    except FactoryError as error:
        if is_of_no_file(error):
            raise
        plant.progress.line(f"  which patch is to blame cannot be told: {error}")
        return []


def _drawn(detail: Mapping[str, Any], lines: Sequence[StepPoint], found: Diagnosis) -> dict[str, Any]:
    """The curves of its page: (step, value) of the live run around the window, and of some arms without the anomaly."""
    live = [point for point in lines if detail["onset"] - AROUND <= point.step <= detail["last"] + AROUND]
    loss = {"live": [(float(p.step), p.loss) for p in live]}
    for outcome in found.outcomes:
        if outcome.curve and len(loss) <= CURVES and outcome.fires is not True:
            loss[outcome.arm] = [(float(p.step), p.loss) for p in outcome.curve]
    return {"loss": loss, "grad_norm": {"live": [(float(p.step), p.grad_norm) for p in live]}}


def live_lines(ledger: Ledger, segment: SegmentRow) -> list[StepPoint]:
    """Of a segment and those that it goes on from: all that is still on disk, by step. Raises: InputError."""
    lines: list[dict[str, Any]] = []
    for row in SegmentRow.lineage(ledger, segment.id):
        if row.kind != "average" and Path(row.folder).is_dir():
            try:
                lines += [
                    line for line in step_lines(Path(row.folder), "metrics.jsonl") if line["step"] < row.last_step
                ]
            except (UntrustedFileError, OSError) as error:
                if is_of_no_file(error):
                    raise
                raise InputError(f"segment {row.id}: {error}") from error
    return points(lines)


def _span(ledger: Ledger, row: AnomalyRow, begins: int, lines: list[StepPoint]) -> EpisodeSpan:
    if row.kind == REPLICAS_APART:
        return EpisodeSpan(row.kind, row.step, row.step, (row.id,), noted=(row.step, row.step))
    others = AnomalyRow.select(ledger, "WHERE segment = :segment ORDER BY id", segment=row.segment)
    for span in spans([Noted.of(other.id, other.step, other.kind, other.detail) for other in others], lines, begins):
        if row.id in span.anomalies:
            return span
    raise InputError(
        f"anomaly {row.id} is a {row.kind}: the loss doctor diagnoses what is about the loss or the gradient"
    )


def _episode(plant: Plant, segment: SegmentRow, span: EpisodeSpan, lines: list[StepPoint]) -> tuple[Episode, list[str]]:
    """(the episode, ready to be replayed; notes for a person). Raises: InputError that says what is missing; RepositoryError."""
    if segment.state not in ("done", "rewound"):
        raise InputError(f"segment {segment.id} is {segment.state}: only what is done is diagnosed")
    if segment.computing is not None and segment.computing["machine"]["device"] != devices.kind():
        name = segment.computing["machine"]["name"]
        raise InputError(
            f"segment {segment.id} was trained on {name}, and this machine has no such device: diagnose it there"
        )
    spec = spec_of(plant.ledger, segment)
    if gone := [shard["path"] for shard in spec["data_plan"]["token_shards"] if not Path(shard["path"]).is_dir()]:
        raise InputError(
            f"the token shard {gone[0]} is gone, so its documents cannot be replayed: they were erased since"
        )
    notes = []
    if ranks(plant.workspace) > 1:
        spec["recipe"] = for_one_rank(spec["recipe"])
        notes.append("replayed on one rank")
    every: dict[int, Path] = {}
    for row in SegmentRow.lineage(plant.ledger, segment.id):
        for folder in (ladder_of(plant.workspace, row.id), Path(row.folder) / "checkpoints"):
            every |= dict(checkpoints.steps_in(folder))
    sound = [
        (step, path) for step, path in sorted(every.items()) if step <= span.onset and not checkpoints.find_fault(path)
    ]
    if not sound:
        later = min(every, default=None)
        oldest = f"the oldest that is left is of step {later}" if later is not None else "none is left"
        raise InputError(
            f"no checkpoint from before step {span.onset} is left to replay from; {oldest} (keep_checkpoints in the recipe)"
        )
    if span.onset - sound[-1][0] > segment.recipe_json["checkpoint_every"]:
        notes.append(f"the checkpoints between steps {sound[-1][0]} and {span.onset} are gone")
    parent = SegmentRow.get(plant.ledger, segment.parent) if segment.parent else None
    code = repository.checkout(plant.workspace.repository, segment.code_commit, _worktree(plant.workspace, segment, ""))
    previous = None
    if (commit := previous_commit(plant.ledger, segment, sound[0][0])) is not None:
        previous = repository.checkout(
            plant.workspace.repository, commit, _worktree(plant.workspace, segment, "-previous")
        )
    begins = segment.first_step if parent is not None and segment.generation != parent.generation else None
    if begins is not None and not begins <= span.onset <= begins + NEW_FOR:
        begins = None
    recent = parent is not None and span.onset <= segment.first_step + NEW_FOR
    after = [path for step, path in sorted(every.items()) if step > span.last and not checkpoints.find_fault(path)]
    episode = Episode(
        kind=span.kind, onset=span.onset, last=span.last, spec=spec, device=devices.kind(), lines=lines, rungs=sound, code=code,
        kernels=dict(segment.computing["kernels"]) if segment.computing else {},
        previous_code=previous, previous_commit=commit or "", generation_begins=begins, where=span.where, one_rank=ranks(plant.workspace) > 1,
        previous_weights=previous_weights(spec["data_plan"], plan_of(plant.ledger, parent) if parent and recent else None, span.onset, span.last),
        was_otherwise=was_otherwise(segment.recipe_json, parent.recipe_json) if parent and recent else {},
        end=after[-1] if after else None, environment_changed=environment_changed(segment.computing, parent.computing if parent else None),
    )  # fmt: skip
    return episode, notes


def previous_commit(ledger: Ledger, segment: SegmentRow, oldest: int) -> str | None:
    """The newest other commit that a segment before this one was trained with, if some of it lies within the ladder."""
    for row in reversed(SegmentRow.lineage(ledger, segment.id)):
        if row.id != segment.id and row.last_step < oldest:
            return None
        if row.kind != "average" and row.code_commit != segment.code_commit:
            return str(row.code_commit)
    return None


def previous_weights(
    plan: Mapping[str, Any], before: Mapping[str, Any] | None, onset: int, last: int
) -> dict[str, float] | None:
    """The shares of the domains before those of ``last``, if they changed at most ``NEW_FOR`` steps before the onset: by a phase, or with
    the segment, whose parent had the plan ``before``.

    >>> plan = {"token_shards": [{"id": "a", "path": "a", "generation": 0}], "weights": {"x": 1.0}}
    >>> plan |= {"phases": [{"from_step": 50, "weights": {"x": 0.5, "y": 0.5}}]}
    >>> previous_weights(plan, None, 53, 54), previous_weights(plan, None, 500, 501)
    ({'x': 1.0}, None)
    >>> previous_weights({**plan, "phases": []}, {**plan, "weights": {"y": 1.0}}, 2, 3)
    {'y': 1.0}
    """
    now = DataPlan.from_json(plan).weights_at(last)
    for step in range(last - 1, max(-1, onset - NEW_FOR - 1), -1):
        if (then := DataPlan.from_json(plan).weights_at(step)) != now:
            return then
    then = DataPlan.from_json(before).weights_at(onset) if before else now
    return then if then != now else None


def environment_changed(computing: Mapping[str, Any] | None, before: Mapping[str, Any] | None) -> str:
    """What libraries a segment was trained with that its parent was not; '' where they are the same, or were not written down.

    >>> environment_changed({"machine": {"torch": "2.13", "driver": "580"}}, {"machine": {"torch": "2.11", "driver": "580"}})
    'torch 2.11 → 2.13'
    """
    now, then = ((found or {}).get("machine", {}) for found in (computing, before))
    keys = [key for key in ("torch", "triton", "driver") if key in now and key in then]
    return ", ".join(f"{key} {then[key]} → {now[key]}" for key in keys if now[key] != then[key])


def was_otherwise(recipe: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """What of the optimiser's, the schedule's and the clipping's keys another recipe had otherwise, with dots.

    >>> was_otherwise({"optimizer": {"lr": 0.1, "beta2": 0.9}}, {"optimizer": {"lr": 0.01, "beta2": 0.9}})
    {'optimizer.lr': 0.01}
    """
    keys = [(part, key) for part in ("optimizer", "schedule") for key in before.get(part, {})]
    keys += [("stability", "grad_clip")] if "stability" in before else []
    differ = [
        (p, k)
        for p, k in keys
        if before[p][k] != recipe[p].get(k) and k not in ("name", "muon", "trunk_steps", "anneal_steps")
    ]
    return {f"{part}.{key}": before[part][key] for part, key in differ}


def _worktree(workspace: Workspace, segment: SegmentRow, which: str) -> Path:
    return workspace.worktrees / f"diagnosis-{segment.id}{which}"


class _Trainers:
    """Trains the arms of an episode in the sandbox, each in a process and a folder of its own: what code keeps of one arm, in memory or in a
    file, would make another blame or clear the wrong thing.

    After the first that ended an arm is stopped much sooner than the policy allows: one that hangs in every arm would take days.
    """

    def __init__(self, runs: Runs, episode: Episode, wall_seconds: float) -> None:
        self.runs, self.episode, self.wall_seconds = runs, episode, wall_seconds
        self._ended: list[float] = []  # seconds
        self._left: list[Path] = []

    def __call__(self, arm: Arm) -> Ended:
        output = self.runs.folder(arm)
        for left in (*self._left, output):  # of the arm before, which has been read, and of a process that was killed
            remove(left)
        self._left = [output]
        limit = min(self.wall_seconds, PATIENCE_SECONDS + 20 * max(self._ended)) if self._ended else self.wall_seconds
        (found,) = self.runs.sandboxed(output, self.episode.code_of(arm), {output / "00000-trunk": arm}, limit)
        self._ended += [] if found.failed else [found.seconds]
        return found
