"""The daemon: a level-triggered loop over the list of duties (DESIGN §5, Ledger).

It holds no state but what rests after a failure: each pass reads the ledger and the inbox, does the first duty that is due and not held, and
lets the duty's own transaction record it, until nothing is due. Killed at any instruction, the next pass finishes or redoes. What fails rests,
longer each time, and the rest goes on (``back_off``): only a signal ends the daemon.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial

from factory.core.errors import FactoryError, InputError, SegmentError
from factory.core.faults import is_of_no_file
from factory.core.workspace import MODEL_LOOP
from factory.duties.back_off import Attempts, BackOff, in_background
from factory.duties.duty import Duty, Errand, Look, always
from factory.duties.listing import note
from factory.duties.table import DUTIES
from factory.ingest.inbox import SETTLE_SECONDS
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow
from factory.repairs.mending import with_mending
from factory.retention.low_disk import filled, make_room, training_waits
from factory.retrying.asking import PausedError, answer, asked
from factory.retrying.tries import describe_parked
from factory.training.certifying import NotCertified, certificate_of, next_steps

MOST_REPEATS = 3  # of one errand in a row
ASKED_BY = ("action", "by", "at", "event")  # of a request; what else it says are arguments of ``do``


def next_errands(look: Look) -> list[Errand]:
    """The first errand that is due, not resting and not held, after what is done before it; without one, only people are waited for."""
    found: list[Errand] = []
    for duty in look.duties:
        if duty.in_background or duty.each == "pass":
            continue
        if errand := _first(duty, look):
            found.append(errand)
            if not errand.duty.each:
                break
    return found


def _first(duty: Duty, look: Look) -> Errand | None:
    """A look that failed becomes an errand of its own: what it met is mended, or said, and rests as others do."""
    looking = f"looking what is due of {duty.name}"
    if look.resting & {duty.name, looking} or duty.held(look):
        return None
    again = Errand(Duty(looking, duty.does, always, partial(_look_again, duty, replace(look))))
    if looking in look.failing:
        return again
    try:
        for subject in duty.due(look):
            errand = subject if isinstance(subject, Errand) else Errand(duty, subject)
            if str(errand) not in look.resting and not errand.duty.held(look):
                return errand
    except Exception:
        return again
    return None


def _look_again(duty: Duty, look: Look, plant: Plant, _: None) -> None:
    with plant.ledger.snapshot() as db:
        next(iter(duty.due(replace(look, db=db))), None)


def work(
    plant: Plant,
    *,
    settle: float = SETTLE_SECONDS,
    endless: bool = False,
    attempts: Attempts | None = None,
    duties: tuple[Duty, ...] = DUTIES,
) -> int:
    """A pass: act until there is nothing to do; returns the number of errands done. One bad shard or file never stops the rest; a token shard
    or a checkpoint that is gone or damaged is made again.

    ``attempts``: what becomes of an errand that fails; without it, it is raised, as is why training waits for a person.
    """
    attempts = attempts or Attempts()
    nothing = Look(plant, plant.ledger, duties, settle=settle, endless=endless)
    look = replace(nothing, resting=attempts.resting(), failing=attempts.failing())
    for errand in [errand for duty in duties if duty.each == "pass" and (errand := _first(duty, look))]:
        attempts.attempt(str(errand), partial(errand.do, plant))
    done = repeats = 0
    previous = ""
    while True:
        low = training_waits(plant)
        with plant.ledger.snapshot() as db:
            look = replace(nothing, db=db, low_on_disk=low, resting=attempts.resting(), failing=attempts.failing())
            errands = next_errands(look)
            over = not errands or bool(errands[-1].duty.each)
            why = _why_training_waits(look) if over else None
        for errand in errands:
            if errand.duty.each:
                attempts.attempt(str(errand), partial(errand.do, plant))
                continue
            repeats = repeats + 1 if str(errand) == previous and not errand.duty.recurs else 0
            previous = str(errand)
            worked = attempts.attempt(previous, partial(_do, plant, errand, repeats))
            note(plant.workspace, attempts.rests(), errand if worked else None)
            done += worked
        if over:
            note(plant.workspace, attempts.rests())
            attempts.waits(why)
            return done


def _do(plant: Plant, errand: Errand, repeats: int) -> None:
    """Raises: FactoryError for an errand that comes up again and again without effect."""
    if repeats >= MOST_REPEATS:
        raise FactoryError(f"no progress on {errand}: run 'factory check'")
    wanted = asked(plant.ledger).get(str(errand), {})
    how = {key: value for key, value in wanted.items() if key not in ASKED_BY and value is not None}
    try:
        with_mending(plant, partial(errand.duty.do, plant, errand.subject, **how))
    except InputError as error:  # of an anomaly that was closed meanwhile, say
        if not wanted or is_of_no_file(error):
            raise
        plant.say(f"  {errand} is not done: {error}")
    if wanted:
        answer(plant.ledger, str(errand), wanted["event"])


def _why_training_waits(look: Look) -> FactoryError | None:
    """For a person; None: it does not."""
    if look.pause:
        return PausedError(str(look.pause))
    if look.stuck_segment is None:
        return None
    row = SegmentRow.get(look.db, look.stuck_segment)
    if row.state == "uncertified":
        verdict = certificate_of(look.plant.ledger, row.id)
        why = verdict.reasons[0] if verdict else ""
        return NotCertified(
            f"the code of segment {row.id} is not certified and training waits. {why} {next_steps(row.id)}"
        )
    log = look.plant.workspace.logs / f"segment-{row.id:05d}.log"
    return SegmentError(f"{describe_parked(look.db, row)} (its log: {log})")


def run(plant: Plant, *, once: bool = False, every: float = 5.0) -> None:
    """The daemon: a pass, wait, again; the trunk goes on while epochs are left. ``once`` ends when nothing new is left.

    Nothing that fails ends it: only ``once`` raises.
    """
    threads = [duty for duty in DUTIES if duty.in_background]
    with plant.workspace.lock(MODEL_LOOP), ExitStack() as stack:
        if once:
            for duty in threads:
                duty.do(plant, None)
                if duty.at_end:
                    stack.callback(_at_end, duty, plant)
            if work(plant, settle=0.0) == 0:
                plant.say("  there is nothing to do: 'factory status' says what it waits for")
            return
        for duty in threads:  # each has connections of its own
            own = replace(plant, ledger=Ledger.open(plant.workspace.ledger_url, plant.workspace.root))
            stack.enter_context(in_background(plant, duty.name, duty.in_background, partial(duty.do, own, None)))
        back_off = BackOff(plant)
        while True:
            if not back_off.too_early():
                try:
                    work(plant, endless=True, attempts=back_off)
                    back_off.passed()
                except Exception as error:
                    back_off.pass_failed(error)
                    if filled(plant.workspace, error):
                        with suppress(Exception):  # what it meets, the next pass does
                            make_room(plant)
            time.sleep(every)


def _at_end(duty: Duty, plant: Plant) -> None:
    """What fails is said, and done by the next process."""
    try:
        duty.do(plant, None)
    except (FactoryError, OSError) as error:
        plant.say(f"  {duty.name} failed: {error}")
