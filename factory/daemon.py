"""The model loop as a level-triggered reconcile loop (DESIGN §5, Ledger).

The daemon holds no state: each pass reads the ledger and the inbox (``observe``), picks the next action (``next_action``, pure), does it
idempotently (``perform``) and lets the action's own transaction record it. Killed at any instruction, the next pass finishes or redoes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from factory.core.errors import FactoryError, InputError, SegmentError
from factory.core.progress import Progress
from factory.core.workspace import Workspace
from factory.ingest.inbox import SETTLE_SECONDS, Refused, arrived, ingest_arrived
from factory.ledger.ledger import Ledger, record
from factory.ledger.rows import CandidateRow, ReleaseRow, SegmentRow, VerdictRow

LOCK = "model-loop"


@dataclass(frozen=True)
class World:
    """What a pass sees: everything ``next_action`` decides from."""

    unfinished_release: int | None = None  # release number whose saga has not reached 'published'
    open_segment: int | None = None  # planned, not done
    failed_segment: int | None = (
        None  # the newest segment that trains, when it failed for good or its code is not certified
    )
    arrived: tuple[Path, ...] = ()  # settled files in the inbox
    unreleased_promotion: int | None = None  # newest verdict, when it says promote and nothing was released for it
    undiagnosed_anomaly: int | None = None  # the oldest, of a kind that holds releases
    unworded_diagnosis: int | None = None  # of this anomaly: a language model is to say what it shows
    unjudged_candidate: int | None = None
    unexported_anneal: int | None = None  # or average
    unannealed_trunk: int | None = None  # the newest finished trunk segment, when no anneal branches off it
    overdue_audit: int | None = None  # segment whose audit waits, and so many others that training waits for it
    waiting_audit: int | None = None  # segment whose audit waits until there is nothing else to do
    trunk_steps: int = 0  # steps of the trunk segment that should come next; 0: no reason to, or too little data


@dataclass(frozen=True)
class Action:
    kind: str  # finish_release | train | ingest | release | judge | export | plan_anneal | plan_trunk | audit | diagnose | word
    subject: int | Path | None = None


def next_action(world: World) -> Action | None:
    """The one thing to do now, or None when the factory waits for data. Pure.

    First what arrived (it is quick, and nothing that goes wrong later may keep data out), then what is half done, then
    what follows from the newest checkpoint, then new training; an audit only where nothing else is to be done, or too many wait.
    """
    if world.arrived:
        return Action("ingest", world.arrived[0])
    if world.unfinished_release is not None:
        return Action("finish_release", world.unfinished_release)
    if world.open_segment is not None:
        return Action("train", world.open_segment)
    if world.unexported_anneal is not None:
        return Action("export", world.unexported_anneal)
    if world.undiagnosed_anomaly is not None:  # before its candidate is judged, which is held if the segment is rewound
        return Action("diagnose", world.undiagnosed_anomaly)
    if world.unreleased_promotion is not None:
        return Action("release", world.unreleased_promotion)
    if world.unjudged_candidate is not None:
        return Action("judge", world.unjudged_candidate)
    if world.unworded_diagnosis is not None:  # after what follows from the diagnosis, and before what lasts
        return Action("word", world.unworded_diagnosis)
    if world.overdue_audit is not None:
        return Action("audit", world.overdue_audit)
    if world.unannealed_trunk is not None and world.failed_segment is None:
        return Action("plan_anneal", world.unannealed_trunk)
    if world.trunk_steps and world.failed_segment is None:
        return Action("plan_trunk")
    if world.waiting_audit is not None:
        return Action("audit", world.waiting_audit)
    return None


def observe(
    workspace: Workspace,
    ledger: Ledger,
    *,
    settle: float = SETTLE_SECONDS,
    endless: bool = False,
    refused: Refused = frozenset(),
) -> World:
    """Read the ledger and the inbox. ``endless``: the trunk also goes on without new shards, while epochs are left."""
    world = replace(_recorded(workspace, ledger), arrived=tuple(arrived(workspace, settle, refused)))
    if next_action(replace(world, waiting_audit=None)) is not None:
        return world
    return replace(world, trunk_steps=_trunk_steps(workspace, ledger, endless))


def _trunk_steps(workspace: Workspace, ledger: Ledger, endless: bool) -> int:
    from factory.training.planning import next_trunk

    if not ledger.read("SELECT id FROM token_shards WHERE tokens > 0 LIMIT 1"):
        return 0
    trunk = next_trunk(workspace, ledger)
    return trunk.steps if trunk.new_shards or (endless and trunk.steps == trunk.wanted) else 0


def _recorded(workspace: Workspace, ledger: Ledger) -> World:
    """The part of the world that is in the ledger, at one moment."""
    from factory.audit.policy import AuditPolicy
    from factory.audit.waiting import waiting
    from factory.gates.release.anomaly_policy import AnomalyPolicy
    from factory.ledger.anomalies import rewound_in, undiagnosed, unworded
    from factory.release.releases import automatic

    troubles = AnomalyPolicy.load(workspace.policy("anomalies.yaml"))
    policy = AuditPolicy.load(workspace.policy("gates/audit.yaml"))
    with ledger.snapshot() as db:
        newest = SegmentRow.first(db, "WHERE kind <> 'average' ORDER BY id DESC")
        planned = SegmentRow.first(db, "WHERE state = 'planned' ORDER BY id")
        trunk = SegmentRow.first(db, "WHERE kind = 'trunk' AND state = 'done' ORDER BY id DESC")
        annealed = trunk and SegmentRow.first(
            db, "WHERE kind = 'anneal' AND parent = :trunk AND state NOT IN ('uncertified', 'rewound')", trunk=trunk.id
        )
        unexported = SegmentRow.first(
            db,
            "WHERE kind <> 'trunk' AND state = 'done' AND NOT EXISTS (SELECT 1 FROM candidates c WHERE c.segment = segments.id) "
            "ORDER BY id",
        )
        unjudged = CandidateRow.first(
            db,
            "WHERE NOT EXISTS (SELECT 1 FROM verdicts v WHERE v.gate = 'release' AND v.subject = 'candidate:' || candidates.id) "
            "ORDER BY id",
        )
        unfinished = ReleaseRow.first(db, "WHERE state <> 'published' ORDER BY number")
        verdict = VerdictRow.first(db, "WHERE gate = 'release' ORDER BY id DESC")
        waits = verdict and verdict.outcome == "promote" and not ReleaseRow.select(
            db, "WHERE verdict = :verdict", verdict=verdict.id
        ) and not rewound_in(db, CandidateRow.get(db, verdict.number).segment)  # fmt: skip
        audits = waiting(db, policy)
        anomaly = undiagnosed(db, troubles.kinds) if troubles.diagnose == "automatic" else None
        words_wait = unworded(db)
    return World(
        unfinished_release=unfinished.number if unfinished else None,
        open_segment=planned.id if planned else None,
        failed_segment=newest.id if newest and _waits(workspace, newest.state, newest.code_commit) else None,
        unreleased_promotion=verdict.id if verdict and waits and automatic(workspace) else None,
        undiagnosed_anomaly=anomaly,
        unworded_diagnosis=words_wait,
        unjudged_candidate=unjudged.id if unjudged else None,
        unexported_anneal=unexported.id if unexported else None,
        unannealed_trunk=trunk.id if trunk and not annealed else None,
        overdue_audit=audits[0] if len(audits) >= policy.most_waiting else None,
        waiting_audit=audits[0] if audits else None,
    )


def _waits(workspace: Workspace, state: str, commit: str) -> bool:
    """Does training wait for a person after a segment in that state? Not when other code is live than the one refused."""
    from factory.git.repository import live_commit

    return state == "failed" or (state == "uncertified" and live_commit(workspace.repository) == commit)


def perform(workspace: Workspace, ledger: Ledger, action: Action, progress: Progress) -> None:
    """Do one action other than ingest. Safe to repeat."""
    subject = action.subject
    if action.kind == "plan_trunk":
        from factory.training.planning import plan_trunk
        from factory.training.tuning import tune_if_new

        tune_if_new(workspace, progress)
        plan_trunk(workspace, ledger, progress=progress)
        return
    if action.kind == "plan_anneal":
        from factory.training.planning import plan_anneal

        plan_anneal(workspace, ledger, progress)
        return
    assert isinstance(subject, int)
    if action.kind == "train":
        train(workspace, ledger, subject, progress)
    elif action.kind == "export":
        from factory.training.exporting import export_candidate

        export_candidate(workspace, ledger, subject)
    elif action.kind == "judge":
        judge(workspace, ledger, subject, progress)
    elif action.kind == "diagnose":
        from factory.diagnosis.diagnosing import diagnose_and_act

        diagnose_and_act(workspace, ledger, subject, progress)
    elif action.kind == "word":
        from factory.diagnosis.wording import word_diagnosis

        word_diagnosis(workspace, ledger, subject, progress)
    elif action.kind == "audit":
        from factory.audit.auditing import audit_and_show
        from factory.audit.reverts import open_reverts

        audit_and_show(workspace, ledger, subject, progress)
        open_reverts(workspace, ledger, progress)
    elif action.kind == "release":
        from factory.release.releases import OutOfDate, release

        try:
            release(workspace, ledger, subject, progress)
        except OutOfDate as error:  # another champion since: what was promoted is judged again, against that one
            progress.line(f"  {error}")
            judge(workspace, ledger, VerdictRow.get(ledger, subject).number, progress)
    elif action.kind == "finish_release":
        from factory.release.releases import release

        release(workspace, ledger, ReleaseRow.get(ledger, subject).verdict, progress)
    else:
        raise AssertionError(action)


def train(workspace: Workspace, ledger: Ledger, segment: int, progress: Progress) -> None:
    from factory.audit.keeping import keeping
    from factory.diagnosis.ladder import climbing
    from factory.tracking.tracking import Tracking
    from factory.training.training import run_segment

    row = SegmentRow.get(ledger, segment)
    follower = Tracking.open(workspace, ledger).follow_segment(row, progress.line)
    try:
        with keeping(workspace, ledger, row, progress), climbing(workspace, row):
            result = run_segment(workspace, ledger, segment, progress, follower)
    finally:
        follower.finish()
    loss = result.get("loss")
    if row.kind == "average":
        from factory.ledger.status import describe_average

        progress.line(f"  segment {segment}: {describe_average(result['averaged'])}")
        return
    progress.line(
        f"  segment {segment} ({row.kind}): steps {row.first_step}–{row.last_step}, loss {loss:.3f}"
        if isinstance(loss, float)
        else f"  segment {segment} done"
    )


def judge(workspace: Workspace, ledger: Ledger, candidate: int, progress: Progress) -> int:
    """Evaluate a candidate, judge it, show both in MLflow; returns the verdict's id."""
    from factory.evals.evaluator import evaluate
    from factory.gates.release.gate import decide
    from factory.release.releases import register_candidate

    evaluate(workspace, ledger, candidate, progress)
    verdict = decide(workspace, ledger, candidate, progress)
    register_candidate(workspace, ledger, candidate)
    row = VerdictRow.get(ledger, verdict)
    progress.line(f"  candidate {candidate}: {row.outcome.upper()}")
    for reason in row.reasons:
        progress.line(f"    {reason}")
    return verdict


def reconcile(
    workspace: Workspace,
    ledger: Ledger,
    progress: Progress,
    *,
    settle: float = SETTLE_SECONDS,
    endless: bool = False,
) -> int:
    """Act until there is nothing to do; returns the number of actions. One bad shard or file never stops the rest.

    Raises: FactoryError when a segment fails or the same action comes up again and again without effect.
    """
    from factory.audit.reverts import open_reverts
    from factory.code_loop.approvals import follow
    from factory.code_loop.judging_again import judge_held_again
    from factory.code_loop.revalidating import follow as judge_merged_again
    from factory.release.releases import reconcile as reconcile_releases

    done = repeats = 0
    previous: Action | None = None
    refused: set[tuple[str, int]] = set()
    reconcile_releases(workspace, ledger)
    open_reverts(workspace, ledger, progress)
    follow(workspace, ledger, progress)
    judge_merged_again(workspace, ledger, progress)
    judge_held_again(workspace, ledger, progress)
    while True:
        world = observe(workspace, ledger, settle=settle, endless=endless, refused=frozenset(refused))
        action = next_action(world)
        if action is None:
            _say_if_failed(workspace, ledger, world)
            return done
        if action.kind == "ingest":
            assert isinstance(action.subject, Path)
            try:
                stamp = (action.subject.name, action.subject.stat().st_mtime_ns)
                ingest_arrived(workspace, ledger, action.subject, progress)
            except FileNotFoundError:
                continue  # taken away again
            except (InputError, PermissionError) as error:  # this file waits for a person; the others don't wait for it
                progress.line(f"  {action.subject.name} stays in the inbox: {error}")
                refused.add(stamp)
        else:
            repeats = repeats + 1 if action == previous else 0
            if repeats >= 3:
                raise FactoryError(f"no progress on {action.kind} {action.subject}: run 'factory doctor'")
            perform(workspace, ledger, action, progress)
        previous = action
        done += 1


def _say_if_failed(workspace: Workspace, ledger: Ledger, world: World) -> None:
    """Raises: SegmentError when training waits for a person."""
    if world.failed_segment is None:
        return
    row = SegmentRow.get(ledger, world.failed_segment)
    if row.state == "uncertified":
        from factory.training.certifying import NotCertified, certificate_of, next_steps

        verdict = certificate_of(ledger, row.id)
        why = verdict.reasons[0] if verdict else ""
        raise NotCertified(
            f"the code of segment {row.id} is not certified and training waits. {why} {next_steps(row.id)}"
        )
    raise SegmentError(
        f"segment {row.id} will not be retried, and training is paused: read its log in {workspace.logs}, correct the "
        f"cause, then run 'factory {'anneal' if row.kind == 'anneal' else 'train'}'"
    )


def run(workspace: Workspace, ledger: Ledger, progress: Progress, *, once: bool = False, every: float = 5.0) -> None:
    """The daemon: reconcile, wait, again; the trunk goes on while epochs are left. ``once`` ends when nothing new is left.

    A failed pass is recorded and tried again after a growing wait; only ``once`` raises it.
    """
    with workspace.lock(LOCK):
        wait = every
        while True:
            try:
                reconcile(workspace, ledger, progress, settle=0.0 if once else SETTLE_SECONDS, endless=not once)
                wait = every
            except FactoryError as error:
                if once:
                    raise
                progress.line(f"  {error}")
                with ledger.begin() as tx:
                    record(tx, "pass_failed", "daemon", {"error": str(error)})
                wait = min(wait * 2, 600.0)
            if once:
                return
            time.sleep(wait)
