"""Makes a diagnosis: finds the episode of an anomaly, replays it in the sandbox, names the cause, records it, and acts as the policy says.

One cause can show as several anomalies: a loss spike, a jump of the gradient norm, and others some steps later. Together they form an episode. After
a kill at any moment, the same call continues and reads the results of finished replays.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.core.untrusted import shorten_text
from agents.loss_doctor.arms import make_arms_with_smaller_steps
from agents.loss_doctor.causes import HARDWARE, LAYOUT, UNKNOWN
from agents.loss_doctor.curves import KINDS, StepMetrics, find_anomaly_onset, read_step_metrics
from agents.loss_doctor.doctor import Diagnosis, diagnose_anomaly
from factory.audit.kept_checkpoints import get_kept_checkpoints_folder
from factory.code_loop.agent_runs import has_llm_endpoint
from factory.core import devices
from factory.core.errors import ConfigError, FactoryError, InputError
from factory.core.faults import is_machine_fault_unrelated_to_files
from factory.core.launching import count_ranks
from factory.core.path_removal import remove_path
from factory.core.policy_file import hash_policy
from factory.core.progress import Progress
from factory.core.workspace import Workspace
from factory.diagnosis import remedies
from factory.diagnosis.replay_bench import AnomalyEpisode, EpisodeReplayBench
from factory.gates.release.anomaly_policy import AnomalyPolicy
from factory.git import repository
from factory.ledger.anomalies import (
    DIAGNOSED,
    DIAGNOSIS,
    REPLICAS_DIFFER,
    AnomalyRow,
    find_settled_anomalies,
    read_newest_details_by_anomaly,
)
from factory.ledger.ledger import Ledger, record_event
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow, Subject
from factory.ledger.writing import record_verdict
from factory.runs.arm import Arm, make_recipe_for_one_rank
from factory.runs.arm_runner import ArmRunner
from factory.runs.sandboxed_training import ArmRunEnd
from factory.runs.trace import read_step_lines
from factory.runs.untrusted_files import UntrustedFileError
from factory.training.planning import read_data_plan
from factory.training.segment_folder import make_segment_spec
from kernels.contract.files import replace_non_finite
from kernels.contract.message import Message
from trainer.contract.checkpoint import format as checkpoints
from trainer.contract.data.data_plan import DataPlan
from trainer.contract.errors import TrainerError

EPISODE_GAP_STEPS = 8  # an episode ends after this many steps without an anomaly
LONGEST = 32  # the most steps of an episode
MOST_REPLAYED_STEPS = 6  # most replayed steps of an episode, from its onset on; later anomalies get another diagnosis
NEAR = 6  # steps: the trainer's onset of a sudden anomaly may be so much before the doctor's; its search is early by up to 16
SLOW = (
    "divergence",
    "activation_jump",
    "attention_logits",
    "update_jump",
)  # kinds that begin long before the trainer notices them; the trainer's onset counts
MOST_ONSET_STEPS = 128  # the trainer's onset is used if it is at most this many steps before the anomaly


@dataclass(frozen=True)
class RecordedAnomaly:
    """An anomaly as the trainer recorded it. ``began``: the onset that the trainer found; ``where``: domain/<name> or layer/<name>."""

    number: int
    step: int
    kind: str
    began: int | None = None
    where: str = ""

    @classmethod
    def from_detail(cls, number: int, step: int, kind: str, detail: Mapping[str, Any] | None) -> RecordedAnomaly:
        """Make an anomaly from ``detail``, a line of anomalies.jsonl.

        Code that agents may patch wrote the line, so an impossible onset is ignored.
        """
        began, where = (detail or {}).get("onset"), (detail or {}).get("where", "")
        possible = type(began) is int and step - MOST_ONSET_STEPS <= began <= step
        return cls(number, step, kind, began if possible else None, where if isinstance(where, str) else "")


@dataclass(frozen=True)
class EpisodeSpan:
    """The steps of an episode. ``kind`` and ``where`` are those of its most informative anomaly.

    Steps [onset, last] are replayed, both included. ``noted``: the first and the last step with an anomaly.
    """

    kind: str
    onset: int
    last: int
    anomalies: tuple[int, ...]  # their numbers
    where: str = ""
    noted: tuple[int, int] = (0, 0)


def find_episodes(
    anomalies: Sequence[RecordedAnomaly], lines: Sequence[StepMetrics], earliest_step: int = 0
) -> list[EpisodeSpan]:
    """Return the episodes of a segment's anomalies, oldest first. Anomalies that do not concern the loss, the gradient or a layer are left out.

    An episode begins at the onset that the doctor finds, or at the trainer's earlier onset if that is near. It never begins before
    ``earliest_step``.

    >>> noted = [RecordedAnomaly(1, 50, "grad_norm_jump", 48), RecordedAnomaly(2, 51, "loss_spike"), RecordedAnomaly(3, 90, "plateau"),
    ...     RecordedAnomaly(4, 200, "divergence", 150)]
    >>> [(s.kind, s.onset, s.last) for s in find_episodes(noted, [])]
    [('loss_spike', 48, 51), ('plateau', 90, 90), ('divergence', 150, 200)]
    >>> [s.noted for s in find_episodes([RecordedAnomaly(n, 8 * n, "loss_spike") for n in range(1, 9)], [])]  # a chain is cut
    [(8, 32), (40, 64)]
    """
    found: list[list[RecordedAnomaly]] = []
    for anomaly in sorted((a for a in anomalies if a.kind in KINDS), key=lambda a: (a.step, a.number)):
        near = found and anomaly.step - found[-1][-1].step <= EPISODE_GAP_STEPS
        if near and anomaly.step - found[-1][0].step < LONGEST:
            found[-1].append(anomaly)
        else:
            found.append([anomaly])
    made: list[EpisodeSpan] = []
    for group in found:
        lead = min(group, key=lambda a: KINDS.index(a.kind))
        least = made[-1].last + 1 if made else earliest_step
        first = own = find_anomaly_onset(lines, lead.step)
        for anomaly in (a for a in group if own - NEAR <= a.step <= lead.step and a.kind != "plateau"):
            tells = anomaly.began is not None and (anomaly.kind in SLOW or anomaly.began >= own - NEAR)
            first = min(first, anomaly.began if tells and anomaly.began is not None else anomaly.step)
        first = min(lead.step, max(first, least))
        last = max(a.step for a in group if a.step < max(lead.step + 1, first + MOST_REPLAYED_STEPS))
        noted = (group[0].step, group[-1].step)
        made.append(EpisodeSpan(lead.kind, first, last, tuple(a.number for a in group), lead.where, noted))
    return made


PATIENCE_SECONDS = 600.0  # added to a multiple of the longest replay's time, to limit the next replay
AROUND = 40  # steps before the onset, and after the last step, in the figure
CURVES = 4  # curves of arms in the figure, besides that of the live run
RECENT_STEPS = 16  # steps: a change can cause an anomaly whose onset is at most this much later


def diagnose_and_act(plant: Plant, number: int, steps: int | None = None) -> dict[str, Any]:
    """Diagnose the episode of an anomaly, record the diagnosis, and act as the policy says. Returns the recorded detail.

    An episode that cannot be replayed is recorded as ``unknown`` with the reason. Then a person is asked, and the daemon does not try again.
    ``steps``: the budget of replayed steps, instead of the policy's.
    Raises: InputError for an unknown anomaly, or one that does not concern the loss; ConfigError; CheckoutError; any error that a fault of the
    machine causes. After an error nothing is recorded, and the same call continues.
    """
    policy = AnomalyPolicy.load(plant.workspace.policy_path("anomalies.yaml"))
    budget = policy.steps if steps is None else steps
    if budget < 1:
        raise ConfigError(
            "diagnosis.no_budget", "A diagnosis needs a budget of at least 1 replayed step, not {budget}. Set 'steps' in policies/anomalies.yaml, or "
            "--steps, to 1 or more.", budget=budget,
        )  # fmt: skip
    row = AnomalyRow.get(plant.ledger, number)
    recorded = read_newest_details_by_anomaly(plant.ledger, DIAGNOSED).get(number)
    if recorded and number not in find_settled_anomalies(plant.ledger):  # killed before it acted on the diagnosis
        return recorded | {"done": _done(plant.ledger, policy, recorded, plant.progress)}
    remedies.check_anomaly_is_open(plant.ledger, number)
    segment = SegmentRow.get(plant.ledger, row.segment)
    lines: list[StepMetrics] = []
    unreadable: InputError | None = None
    try:
        lines = read_live_metrics(plant.ledger, segment)
    except InputError as error:
        unreadable = error
    span = _span(plant.ledger, row, segment.first_step, lines)
    lead = span.anomalies[0]
    folder = plant.workspace.root / "diagnoses" / f"{lead:05d}"
    found: Diagnosis | None = None
    keys: dict[str, Any] = {}  # recipe values that remove the anomaly
    causes, why = [UNKNOWN], ""
    title = Message(
        "diagnosis.replaying", "replaying steps to diagnose anomaly {anomaly} ({kind}, step {step} of segment {segment})",
        anomaly=lead, kind=span.kind, step=span.onset, segment=segment.id,
    )  # fmt: skip
    with plant.progress.task(title, budget) as told:
        try:
            if row.kind == REPLICAS_DIFFER:
                causes = [HARDWARE, LAYOUT]
                raise _replicas_apart(row)
            if unreadable:
                raise unreadable
            episode, notes = _episode(plant, segment, span, lines)
            trainers = _Trainers(
                ArmRunner(plant, folder, "diagnosis", Subject("anomaly", lead)), episode, policy.wall_seconds
            )
            bench = EpisodeReplayBench(episode, folder, trainers, budget, told=told.advance)
            if policy.previous_python and not os.access(policy.previous_python, os.X_OK):
                notes.append(
                    Message(
                        "diagnosis.previous_python",
                        "previous_python in policies/anomalies.yaml ({python}) cannot be run",
                        python=policy.previous_python,
                    )
                )
            elif policy.previous_python and episode.environment_changed:
                bench.before = policy.previous_python
            found = diagnose_anomaly(bench)
            keys = next(
                (dict(arm.recipe) for arm in make_arms_with_smaller_steps(bench.case()) if arm.name == found.remedy),
                {},
            )
            why = " ".join([found.why, *(f"({note})" for note in notes)])
        except (FactoryError, TrainerError, UntrustedFileError, OSError) as error:
            if isinstance(error, repository.CheckoutError) or is_machine_fault_unrelated_to_files(error):
                raise  # a fault of the machine is no evidence about the anomaly
            why = str(error)
        finally:
            repository.remove_worktree(plant.workspace.repository, _worktree(plant.workspace, segment, ""))
            repository.remove_worktree(plant.workspace.repository, _worktree(plant.workspace, segment, "-previous"))
    told_of = found or Diagnosis(tuple(causes), why, (), (), (), (), 0)
    detail: dict[str, Any] = told_of.to_json() | {
        "why": why, "anomalies": list(span.anomalies), "segment": segment.id, "kind": span.kind, "onset": span.onset, "last": span.last,
        "noted": list(span.noted),
        "budget": budget, "override": {"keys": keys, "until": span.last + 1 + policy.rate_steps} if keys else None,
        "to_word": has_llm_endpoint(plant.workspace),
    }  # fmt: skip
    undo = _blamed(plant, segment, detail["causes"])
    page = plant.workspace.reports / f"anomaly-{lead}.html"
    detail |= {"report": plant.ledger.to_stored_path(page), "drawn": _drawn(detail, lines, told_of), "undo": undo}
    with plant.ledger.begin() as tx:
        record_event(tx, DIAGNOSED, Subject("anomaly", lead), replace_non_finite(detail))
        if undo:
            record_verdict(
                tx, DIAGNOSIS, Subject("segment", segment.id), against=None, policy_sha256=hash_policy(policy), subject_sha256=segment.code_commit,
                outcome="reject", reasons=[
                    Message(
                        "diagnosis.patch_blamed", "The diagnosis of anomaly {anomaly} found the cause {causes}: {why}",
                        anomaly=lead, causes=" or ".join(detail["causes"]), why=why,
                    )
                ], evidence={"anomaly": lead, "undo": undo},
            )  # fmt: skip
    done = _done(plant.ledger, policy, detail | {"lead": lead}, plant.progress)
    if found is not None:
        remove_path(folder)
    return detail | {"done": done}


def _done(ledger: Ledger, policy: AnomalyPolicy, detail: Mapping[str, Any], progress: Progress) -> str:
    """Act on a recorded diagnosis as the policy says. Returns a message."""
    done = remedies.apply_anomaly_policy(ledger, policy, detail["lead"])
    progress.line(
        Message(
            "diagnosis.diagnosed",
            "  Anomaly {anomaly} ({kind}, segment {segment}, steps {onset}–{last}) is diagnosed. Cause: {causes}. {done}",
            anomaly=detail["lead"],
            kind=detail["kind"],
            segment=detail["segment"],
            onset=detail["onset"],
            last=detail["last"],
            causes=" or ".join(detail["causes"]),
            done=done,
        )  # fmt: skip
    )
    return done


def _replicas_apart(row: AnomalyRow) -> FactoryError:
    """Return the reason why nothing is replayed: the step's result was right, but the copies of it on the ranks differ."""
    weights = ", ".join(str(name) for name in (row.detail or {}).get("weights", ())) or "names not recorded"
    return FactoryError(
        "diagnosis.replicas_apart", "After step {step}, the ranks' copies of these weights were not identical: {weights}.",
        step=row.step, weights=shorten_text(weights, 600),
    )  # fmt: skip


def _blamed(plant: Plant, segment: SegmentRow, causes: list[str]) -> list[int]:
    try:
        return remedies.find_blamed_patches(
            plant, causes, segment.code_commit, find_previous_commit(plant.ledger, segment, 0)
        )
    except FactoryError as error:
        if is_machine_fault_unrelated_to_files(error):
            raise
        plant.progress.line(
            Message(
                "diagnosis.patch_unknown", "  The factory cannot find out which patch is to blame: {error}", error=error
            )
        )
        return []


def _drawn(detail: Mapping[str, Any], lines: Sequence[StepMetrics], found: Diagnosis) -> dict[str, Any]:
    """Return the curves of the report: (step, value) of the live run around the window, and of some arms without the anomaly."""
    live = [point for point in lines if detail["onset"] - AROUND <= point.step <= detail["last"] + AROUND]
    loss = {"live": [(float(p.step), p.loss) for p in live]}
    for outcome in found.outcomes:
        if outcome.curve and len(loss) <= CURVES and outcome.fires is not True:
            loss[outcome.arm] = [(float(p.step), p.loss) for p in outcome.curve]
    return {"loss": loss, "grad_norm": {"live": [(float(p.step), p.grad_norm) for p in live]}}


def read_live_metrics(ledger: Ledger, segment: SegmentRow) -> list[StepMetrics]:
    """Return the metrics of a segment and its ancestors that are still on disk, by step. Raises: InputError."""
    lines: list[dict[str, Any]] = []
    for row in SegmentRow.read_lineage(ledger, segment.id):
        if row.has_steps and Path(row.folder).is_dir():
            try:
                lines += [
                    line for line in read_step_lines(Path(row.folder), "metrics.jsonl") if line["step"] < row.last_step
                ]
            except (UntrustedFileError, OSError) as error:
                if is_machine_fault_unrelated_to_files(error):
                    raise
                raise InputError(
                    "diagnosis.metrics_unreadable",
                    "The metrics of segment {segment} cannot be read: {error}",
                    segment=row.id,
                    error=error,
                ) from error
    return read_step_metrics(lines)


def _span(ledger: Ledger, row: AnomalyRow, begins: int, lines: list[StepMetrics]) -> EpisodeSpan:
    if row.kind == REPLICAS_DIFFER:
        return EpisodeSpan(row.kind, row.step, row.step, (row.id,), noted=(row.step, row.step))
    others = AnomalyRow.select(ledger, "WHERE segment = :segment ORDER BY id", segment=row.segment)
    for span in find_episodes(
        [RecordedAnomaly.from_detail(other.id, other.step, other.kind, other.detail) for other in others], lines, begins
    ):
        if row.id in span.anomalies:
            return span
    raise InputError(
        "diagnosis.not_of_the_loss", "Anomaly {anomaly} has the kind {kind}. The loss doctor diagnoses only anomalies of the loss or the gradient.",
        anomaly=row.id, kind=row.kind,
    )  # fmt: skip


def _episode(
    plant: Plant, segment: SegmentRow, span: EpisodeSpan, lines: list[StepMetrics]
) -> tuple[AnomalyEpisode, list[str]]:
    """Return (the episode, ready for replay; notes for a person). Raises: InputError that names what is missing; RepositoryError."""
    if segment.state not in ("done", "rewound"):
        raise InputError(
            "diagnosis.segment_not_done", "Segment {segment} is {state}. Only a finished segment can be diagnosed.",
            segment=segment.id, state=segment.state,
        )  # fmt: skip
    if segment.computing is not None and segment.computing["machine"]["device"] != devices.get_device_kind():
        raise InputError(
            "diagnosis.other_device", "Segment {segment} was trained on {machine}, and this machine has no such device. Run the diagnosis on "
                                      "a machine that has one.",
            segment=segment.id, machine=segment.computing["machine"]["name"],
        )  # fmt: skip
    spec = make_segment_spec(plant.ledger, segment)
    if gone := [shard["path"] for shard in spec["data_plan"]["token_shards"] if not Path(shard["path"]).is_dir()]:
        raise InputError(
            "diagnosis.documents_erased",
            "The token shard {token_shard} was erased, so its documents cannot be replayed.",
            token_shard=gone[0],
        )
    notes: list[str] = []
    if count_ranks(plant.workspace) > 1:
        spec["recipe"] = make_recipe_for_one_rank(spec["recipe"])
        notes.append("replayed on one rank")
    every: dict[int, Path] = {}
    for row in SegmentRow.read_lineage(plant.ledger, segment.id):
        for folder in (get_kept_checkpoints_folder(plant.workspace, row.id), Path(row.folder) / "checkpoints"):
            every |= dict(checkpoints.list_checkpoints(folder))
    sound = [
        (step, path)
        for step, path in sorted(every.items())
        if step <= span.onset and not checkpoints.find_checkpoint_fault(path)
    ]
    if not sound:
        raise InputError(
            "diagnosis.no_checkpoint", "No checkpoint from step {step} or earlier is left for a replay. The oldest checkpoint is from step "
            "{oldest}. To keep more, raise keep_checkpoints in the recipe.", step=span.onset, oldest=min(every, default="none"),
        )  # fmt: skip
    if span.onset - sound[-1][0] > segment.recipe_json["checkpoint_every"]:
        notes.append(
            Message(
                "diagnosis.checkpoints_missing",
                "the checkpoints between steps {first} and {last} are missing",
                first=sound[-1][0],
                last=span.onset,
            )
        )
    parent = SegmentRow.get(plant.ledger, segment.parent) if segment.parent else None
    if parent is not None and not parent.has_steps:
        parent = None  # the data, recipe and machine of an imported model's training are unknown
    code = repository.checkout_commit(
        plant.workspace.repository, segment.code_commit, _worktree(plant.workspace, segment, "")
    )
    previous = None
    if (commit := find_previous_commit(plant.ledger, segment, sound[0][0])) is not None:
        previous = repository.checkout_commit(
            plant.workspace.repository, commit, _worktree(plant.workspace, segment, "-previous")
        )
    begins = segment.first_step if parent is not None and segment.generation != parent.generation else None
    if begins is not None and not begins <= span.onset <= begins + RECENT_STEPS:
        begins = None
    recent = parent is not None and span.onset <= segment.first_step + RECENT_STEPS
    after = [
        path for step, path in sorted(every.items()) if step > span.last and not checkpoints.find_checkpoint_fault(path)
    ]
    episode = AnomalyEpisode(
        kind=span.kind, onset=span.onset, last=span.last, spec=spec, device=devices.get_device_kind(), lines=lines, rungs=sound, code=code,
        kernels=dict(segment.computing["kernels"]) if segment.computing else {},
        previous_code=previous, previous_commit=commit or "", generation_begins=begins, where=span.where, one_rank=count_ranks(plant.workspace) > 1,
        previous_weights=find_previous_domain_weights(spec["data_plan"], read_data_plan(plant.ledger,
        parent) if parent and recent else None, span.onset,
        span.last),
        changed_recipe_keys=find_changed_recipe_keys(segment.recipe_json, parent.recipe_json) if parent and recent else {},
        end=after[-1] if after else None, environment_changed=describe_changed_environment(segment.computing, parent.computing if parent else None),
    )  # fmt: skip
    return episode, notes


def find_previous_commit(ledger: Ledger, segment: SegmentRow, oldest: int) -> str | None:
    """Return the newest other commit with which an earlier segment was trained, if that segment ends at or after step ``oldest``; else None."""
    for row in reversed(SegmentRow.read_lineage(ledger, segment.id)):
        if row.id != segment.id and row.last_step < oldest:
            return None
        if row.has_steps and row.code_commit != segment.code_commit:
            return str(row.code_commit)
    return None


def find_previous_domain_weights(
    plan: Mapping[str, Any], before: Mapping[str, Any] | None, onset: int, last: int
) -> dict[str, float] | None:
    """Return the domain shares before those at step ``last``, if they changed at most ``RECENT_STEPS`` steps before the onset; else None.

    The shares change with a phase of the plan, or with the segment. ``before``: the plan of the segment's parent.

    >>> plan = {"token_shards": [{"id": "a", "path": "a", "generation": 0}], "weights": {"x": 1.0}}
    >>> plan |= {"phases": [{"from_step": 50, "weights": {"x": 0.5, "y": 0.5}}]}
    >>> find_previous_domain_weights(plan, None, 53, 54), find_previous_domain_weights(plan, None, 500, 501)
    ({'x': 1.0}, None)
    >>> find_previous_domain_weights({**plan, "phases": []}, {**plan, "weights": {"y": 1.0}}, 2, 3)
    {'y': 1.0}
    """
    now = DataPlan.from_json(plan).find_weights_at_step(last)
    for step in range(last - 1, max(-1, onset - RECENT_STEPS - 1), -1):
        if (then := DataPlan.from_json(plan).find_weights_at_step(step)) != now:
            return then
    then = DataPlan.from_json(before).find_weights_at_step(onset) if before else now
    return then if then != now else None


def describe_changed_environment(after: Mapping[str, Any] | None, before: Mapping[str, Any] | None) -> str:
    """Describe the libraries that differ between a segment and its parent. Returns '' if none differs or if they were not recorded.

    >>> describe_changed_environment({"machine": {"torch": "2.13", "driver": "580"}}, {"machine": {"torch": "2.11", "driver": "580"}})
    'torch 2.11 → 2.13'
    """
    now, then = ((found or {}).get("machine", {}) for found in (after, before))
    keys = [key for key in ("torch", "triton", "driver") if key in now and key in then]
    return ", ".join(f"{key} {then[key]} → {now[key]}" for key in keys if now[key] != then[key])


def find_changed_recipe_keys(recipe: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of optimiser, schedule and clipping (joined by dots) that differ in the recipe ``before``, with their values there.

    >>> find_changed_recipe_keys({"optimizer": {"lr": 0.1, "beta2": 0.9}}, {"optimizer": {"lr": 0.01, "beta2": 0.9}})
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
    """Trains the arms of an episode in the sandbox.

    Each arm has its own process and folder, so that untrusted code cannot carry state from one arm to another. After the first finished arm, the time
    limit is much shorter than the policy's. Otherwise, code that hangs in every arm would take days.
    """

    def __init__(self, runs: ArmRunner, episode: AnomalyEpisode, wall_seconds: float) -> None:
        self.runs, self.episode, self.wall_seconds = runs, episode, wall_seconds
        self._ended: list[float] = []  # seconds
        self._left: list[Path] = []

    def __call__(self, arm: Arm) -> ArmRunEnd:
        output = self.runs.find_arm_folder(arm)
        for left in (*self._left, output):  # of the previous arm, which was read, and of a killed process
            remove_path(left)
        self._left = [output]
        limit = min(self.wall_seconds, PATIENCE_SECONDS + 20 * max(self._ended)) if self._ended else self.wall_seconds
        (found,) = self.runs.train_sandboxed(
            output, self.episode.choose_code_folder(arm), {output / "00000-trunk": arm}, limit
        )
        self._ended += [] if found.failed else [found.seconds]
        return found
