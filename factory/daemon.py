"""The model loop as a level-triggered reconcile loop (DESIGN §5, Ledger).

The daemon holds no state but what rests after a failure: each pass reads the ledger and the inbox (``observe``), picks the next action
(``next_action``, pure), does it (``factory.actions``) and lets the action's own transaction record it. Killed at any instruction, the next
pass finishes or redoes. What fails rests, longer each time, and the rest goes on (``factory.retrying``): only a signal ends the daemon.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

from factory.actions import Action, perform
from factory.core.errors import FactoryError, InputError, SegmentError
from factory.core.faults import is_of_no_file
from factory.core.workspace import MODEL_LOOP, Workspace
from factory.ingest.inbox import SETTLE_SECONDS, arrived, take, tend
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.ledger.rows import CandidateRow, ReleaseRow, SegmentRow, VerdictRow
from factory.retrying.asking import answer, asked
from factory.retrying.beside import beside
from factory.retrying.pausing import EVERYTHING, Pause, PausedError, pause_of
from factory.retrying.steady import Attempts, Once, Steady
from factory.retrying.tries import describe_parked

LOCK = MODEL_LOOP


@dataclass(frozen=True)
class World:
    """What a pass sees: everything ``next_action`` decides from. What rests after a failure is left out."""

    unfinished_release: int | None = None  # release number whose saga has not reached 'published'
    open_segment: int | None = None  # planned, not done
    failed_segment: int | None = None  # the newest segment that trains, when it is parked or its code is not certified
    arrived: tuple[Path, ...] = ()  # the first whole file in the inbox, if there is one
    unreleased_promotion: int | None = None  # newest verdict, when it says promote and nothing was released for it
    undiagnosed_anomaly: int | None = None  # the oldest, of a kind that holds releases
    unworded_diagnosis: int | None = None  # of this anomaly: a language model is to say what it shows
    unjudged_candidate: int | None = None
    unexported_anneal: int | None = None  # or average
    unannealed_trunk: int | None = None  # the newest finished trunk segment, when no anneal branches off it
    overdue_audit: int | None = None  # segment whose audit waits, and so many others that training waits for it
    waiting_audit: int | None = None  # segment whose audit waits until there is nothing else to do
    unmeasured_replicas: int | None = None  # of this anneal: the data order's noise is to be measured
    trunk_steps: int = 0  # steps of the trunk segment that should come next; 0: no reason to, or too little data
    paused: str = ""  # what a person paused: 'training', 'everything'
    low_on_disk: bool = False  # what fills the disk waits
    segment_rests: bool = False  # the open segment's trainer died, and it is too early for the next try
    asked: Action | None = None  # a person asks for it: judge | diagnose | audit


def next_action(world: World) -> Action | None:
    """The one thing to do now, or None when the factory waits for data or for a person. Pure.

    First what arrived (it is quick, and nothing that goes wrong later may keep data out), then what is half done, then
    what follows from the newest checkpoint, then new training; an audit only where nothing else is to be done, or too many wait.
    """
    if world.paused == EVERYTHING:
        return None
    if world.arrived:
        return Action("ingest", world.arrived[0])
    if world.low_on_disk:
        small = ("unfinished_release", "unreleased_promotion", "unjudged_candidate", "unworded_diagnosis")
        world = World(**{name: getattr(world, name) for name in small})
    if world.unfinished_release is not None:
        return Action("finish_release", world.unfinished_release)
    trains = not world.paused  # an audit and a diagnosis start trainers too
    plans = trains and world.open_segment is None and world.failed_segment is None
    if world.open_segment is not None and trains and not world.segment_rests:
        return Action("train", world.open_segment)
    if world.unexported_anneal is not None:
        return Action("export", world.unexported_anneal)
    if (
        world.undiagnosed_anomaly is not None and trains
    ):  # before its candidate is judged, which is held if the segment is rewound
        return Action("diagnose", world.undiagnosed_anomaly)
    if world.unreleased_promotion is not None:
        return Action("release", world.unreleased_promotion)
    if world.unjudged_candidate is not None:
        return Action("judge", world.unjudged_candidate)
    if world.asked is not None and (trains or world.asked.kind == "judge"):
        return world.asked
    if world.unworded_diagnosis is not None:  # after what follows from the diagnosis, and before what lasts
        return Action("word", world.unworded_diagnosis)
    if world.overdue_audit is not None and trains:
        return Action("audit", world.overdue_audit)
    if world.unannealed_trunk is not None and plans:
        return Action("plan_anneal", world.unannealed_trunk)
    if world.unmeasured_replicas is not None and plans:  # while the checkpoint is there that they begin at
        return Action("replicate", world.unmeasured_replicas)
    if world.trunk_steps and plans:
        return Action("plan_trunk")
    if world.waiting_audit is not None and trains and world.open_segment is None:
        return Action("audit", world.waiting_audit)
    return None


def observe(
    plant: Plant,
    *,
    settle: float = SETTLE_SECONDS,
    endless: bool = False,
    resting: frozenset[str] = frozenset(),
) -> World:
    """Read the ledger and the inbox. ``endless``: the trunk also goes on without new shards, while epochs are left.

    ``resting``: actions, as text, that failed and are not tried now.
    """
    first = tuple(islice(arrived(plant, settle), 1))
    world = replace(_recorded(plant, resting), arrived=first)
    if next_action(replace(world, waiting_audit=None)) is not None or str(Action("plan_trunk")) in resting:
        return world
    return replace(world, trunk_steps=_trunk_steps(plant, endless))


def _trunk_steps(plant: Plant, endless: bool) -> int:
    from factory.watching.trunk_ahead import trunk_ahead

    if not plant.ledger.read("SELECT id FROM token_shards WHERE tokens > 0 LIMIT 1"):
        return 0
    trunk = trunk_ahead(plant)
    return trunk.steps if trunk.new_shards or (endless and trunk.steps == trunk.wanted) else 0


def _recorded(plant: Plant, resting: frozenset[str]) -> World:
    """The part of the world that is in the ledger, at one moment."""
    from factory.audit.policy import AuditPolicy
    from factory.audit.waiting import waiting
    from factory.gates.release.anomaly_policy import AnomalyPolicy
    from factory.gates.release.policy import ReleasePolicy
    from factory.ledger.anomalies import rewound_in, undiagnosed, unworded
    from factory.ledger.decisions import rejected_before
    from factory.release.approvals import automatic
    from factory.replicas.waiting import waits as replicas_wait

    def first(kind: str, subjects: Iterable[int]) -> int | None:
        return next((one for one in subjects if str(Action(kind, one)) not in resting), None)

    troubles = AnomalyPolicy.load(plant.workspace.policy("anomalies.yaml"))
    policy = AuditPolicy.load(plant.workspace.policy("gates/audit.yaml"))
    with plant.ledger.snapshot() as db:
        newest = SegmentRow.first(db, "WHERE kind <> 'average' ORDER BY id DESC")
        planned = SegmentRow.first(db, "WHERE state = 'planned' ORDER BY id")
        trunk = SegmentRow.first(db, "WHERE kind = 'trunk' AND state = 'done' ORDER BY id DESC")
        annealed = trunk and SegmentRow.first(
            db,
            "WHERE kind = 'anneal' AND parent = :trunk AND state NOT IN ('uncertified', 'rewound', 'abandoned')",
            trunk=trunk.id,
        )
        unexported = SegmentRow.select(
            db,
            "WHERE kind <> 'trunk' AND state = 'done' AND NOT EXISTS (SELECT 1 FROM candidates c WHERE c.segment = segments.id) "
            "ORDER BY id",
        )
        unjudged = CandidateRow.select(
            db,
            "WHERE NOT EXISTS (SELECT 1 FROM verdicts v WHERE v.gate = 'release' AND v.subject = 'candidate:' || candidates.id) "
            "ORDER BY id",
        )
        unfinished = ReleaseRow.select(db, "WHERE state <> 'published' ORDER BY number")
        verdict = VerdictRow.first(db, "WHERE gate = 'release' ORDER BY id DESC")
        waits = verdict and verdict.outcome == "promote" and not ReleaseRow.select(
            db, "WHERE verdict = :verdict", verdict=verdict.id
        ) and not rewound_in(db, CandidateRow.get(db, verdict.number).segment) and not rejected_before(db, verdict)  # fmt: skip
        audits = waiting(db, policy)
        diagnosed_later = _numbers("diagnose", resting)
        anomaly = undiagnosed(db, troubles.kinds, diagnosed_later) if troubles.diagnose == "automatic" else None
        replicas = replicas_wait(plant.workspace, db, ReleasePolicy.load(plant.workspace.policy("gates/release.yaml")))
        words_wait = unworded(db, _numbers("word", resting))
        pause = pause_of(db)
        wanted = asked(db)
    audit = first("audit", audits)
    return World(
        unfinished_release=first("finish_release", (row.number for row in unfinished)),
        open_segment=planned.id if planned else None,
        failed_segment=newest.id if newest and _waits(plant.workspace, newest.state, newest.code_commit) else None,
        unreleased_promotion=first("release", [verdict.id] if verdict and waits and automatic(plant.workspace) else []),
        undiagnosed_anomaly=anomaly,
        unworded_diagnosis=words_wait,
        unjudged_candidate=first("judge", (row.id for row in unjudged)),
        asked=next(
            (
                Action.parse(one)
                for one in sorted(wanted, key=lambda one: not one.startswith("judge "))
                if one not in resting
            ),
            None,
        ),
        unexported_anneal=first("export", (row.id for row in unexported)),
        unannealed_trunk=first("plan_anneal", [trunk.id] if trunk and not annealed else []),
        unmeasured_replicas=first("replicate", [replicas] if replicas is not None else []),
        overdue_audit=audit if len(audits) >= policy.most_waiting else None,
        waiting_audit=audit,
        paused=pause.what if pause else "",
        segment_rests=planned is not None and str(Action("train", planned.id)) in resting,
    )


def _numbers(kind: str, resting: frozenset[str]) -> list[int]:
    """The subjects of the resting actions of a kind."""
    return [int(key.removeprefix(f"{kind} ")) for key in resting if key.startswith(f"{kind} ")]


def _waits(workspace: Workspace, state: str, commit: str) -> bool:
    """Does training wait for a person after a segment in that state? Not when other code is live than the one refused."""
    from factory.git.repository import live_commit

    return state == "failed" or (state == "uncertified" and live_commit(workspace.repository) == commit)


def reconcile(
    plant: Plant,
    *,
    settle: float = SETTLE_SECONDS,
    endless: bool = False,
    attempts: Attempts | None = None,
) -> int:
    """Act until there is nothing to do; returns the number of actions done. One bad shard or file never stops the rest; a token shard or
    a checkpoint that is gone or damaged is made again.

    ``attempts``: what becomes of an action that fails; without it, it is raised, as is why training waits for a person.
    """
    from factory.releasable.recorded import refresh
    from factory.repairs.mending import with_mending
    from factory.retention.watching import training_waits

    attempts = attempts or Once()
    looking = "looking whether the data can be released", lambda: refresh(plant)
    for name, chore in _chores(plant, pause_of(plant.ledger), settle):
        attempts.attempt(name, chore)
    done = repeats = 0
    previous: Action | None = None
    while True:
        resting = attempts.resting()
        look = partial(observe, plant, settle=settle, endless=endless, resting=resting)
        try:
            world = with_mending(plant, look)
        except FactoryError:  # such as a recipe that doesn't fit: that holds releases
            attempts.attempt(*looking)
            raise
        world = replace(world, low_on_disk=training_waits(plant))
        action = next_action(world)
        if action is None:
            attempts.attempt(*looking)
            attempts.waits(_why_training_waits(plant, world))
            return done
        if action.kind == "ingest":
            assert isinstance(action.subject, Path)
            with_mending(plant, partial(take, plant, action.subject))
            done += 1
            continue
        attempts.attempt(*looking)
        repeats = repeats + 1 if action == previous else 0
        done += attempts.attempt(str(action), _action(plant, action, repeats))
        previous = action


def _chores(plant: Plant, pause: Pause | None, settle: float) -> list[tuple[str, Callable[[], object]]]:
    """What each pass begins with, by name."""
    from factory.audit.reverts import open_reverts
    from factory.code_loop.approvals import follow
    from factory.code_loop.judging_again import judge_held_again
    from factory.code_loop.revalidating import follow as judge_merged_again
    from factory.erasing.erasing import finish_removals
    from factory.release.releases import reconcile as reconcile_releases
    from factory.tracking.missed import show_missed

    if pause and pause.what == EVERYTHING:
        return []
    chores: list[tuple[str, Callable[[], object]]] = [
        ("making the daily backup", lambda: _back_up(plant)),
        ("finishing removals", lambda: finish_removals(plant)),
        ("looking after the inbox", lambda: tend(plant, settle)),
        ("bringing MLflow and the served folder up to date", lambda: reconcile_releases(plant)),
        ("showing in MLflow what it missed", lambda: show_missed(plant, plant.progress.line)),
        ("opening reverts", lambda: open_reverts(plant)),
        ("following approvals", lambda: follow(plant)),
    ]
    if pause:
        return chores
    return [
        *chores,  # patches are judged by trainings
        ("judging merged patches again", lambda: judge_merged_again(plant)),
        ("judging held patches again", lambda: judge_held_again(plant)),
    ]


def _back_up(plant: Plant) -> None:
    """A copy for which there is no room ends no pass: it is one action that failed, and what frees some room comes after it."""
    from factory.backups.backups import back_up_daily
    from factory.core.faults import LOCKED, fault_of

    try:
        said = back_up_daily(plant)
    except Exception as error:
        fault = fault_of(error)
        if fault is None or fault == LOCKED:
            raise
        raise FactoryError(f"no backup was made: {fault.says}: {fault.do}") from None
    if said:
        plant.progress.line(f"  {said}")


def _action(plant: Plant, action: Action, repeats: int) -> Callable[[], object]:
    """Raises, when called: FactoryError for an action that comes up again and again without effect."""
    from factory.repairs.mending import with_mending

    def act() -> None:
        if repeats >= 3:
            raise FactoryError(f"no progress on {action}: run 'factory doctor'")
        wanted = asked(plant.ledger).get(str(action), {})
        steps = wanted.get("replayed_steps")
        try:
            with_mending(plant, lambda: perform(plant, action, replayed_steps=steps))
        except InputError as error:  # of an anomaly that was closed meanwhile, say
            if not wanted or is_of_no_file(error):
                raise
            plant.progress.line(f"  {action} is not done: {error}")
        if wanted:
            answer(plant.ledger, str(action), wanted["event"])

    return act


def _why_training_waits(plant: Plant, world: World) -> FactoryError | None:
    """For a person; None: it does not."""
    if pause := pause_of(plant.ledger):
        return PausedError(str(pause))
    if world.failed_segment is None:
        return None
    row = SegmentRow.get(plant.ledger, world.failed_segment)
    if row.state == "uncertified":
        from factory.training.certifying import NotCertified, certificate_of, next_steps

        verdict = certificate_of(plant.ledger, row.id)
        why = verdict.reasons[0] if verdict else ""
        return NotCertified(
            f"the code of segment {row.id} is not certified and training waits. {why} {next_steps(row.id)}"
        )
    return SegmentError(
        f"{describe_parked(plant.ledger, row)} (its log: {plant.workspace.logs / f'segment-{row.id:05d}.log'})"
    )


def run(plant: Plant, *, once: bool = False, every: float = 5.0) -> None:
    """The daemon: reconcile, wait, again; the trunk goes on while epochs are left. ``once`` ends when nothing new is left.

    Nothing that fails ends it: only ``once`` raises.
    """
    from factory.notifying import delivery
    from factory.release import answering
    from factory.retention.watching import filled, make_room

    with plant.workspace.lock(LOCK), ExitStack() as stack:
        if once:
            notifier = delivery.Notifier(plant)
            notifier.look()
            stack.callback(delivery.last_look, notifier, plant.progress)
            answering.ApprovalAnswers(plant).look()
            if reconcile(plant, settle=0.0) == 0:
                plant.progress.line("  there is nothing to do: 'factory status' says what it waits for")
            return
        own = lambda: Ledger.open(
            plant.workspace.ledger_url, plant.workspace.root
        )  # a thread has connections of its own
        answers = answering.ApprovalAnswers(Plant(plant.workspace, own(), plant.progress))
        notifier = delivery.Notifier(Plant(plant.workspace, own(), plant.progress))
        for name, pause_seconds, act in (
            ("answering approvals", answering.EVERY_SECONDS, answers.look_and_ask),
            ("notifying", delivery.EVERY_SECONDS, notifier.look),
        ):
            stack.enter_context(beside(plant.workspace, plant.progress, name, pause_seconds, act))
        steady = Steady(plant)
        while True:
            if not steady.too_early():
                try:
                    reconcile(plant, endless=True, attempts=steady)
                    steady.passed()
                except Exception as error:
                    steady.pass_failed(error)
                    if filled(plant.workspace, error):
                        with suppress(Exception):  # what it meets, the next pass does
                            make_room(plant)
            time.sleep(every)
