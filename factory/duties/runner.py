"""The daemon: a level-triggered loop over the list of duties (DESIGN §5, Ledger).

Between passes, the daemon remembers only the rests after failures. Each pass reads the ledger and the inbox, and does the first duty that is due and
not held, until no duty is due. The duty's own transaction records the work. After a kill at any instruction, the next pass finishes or repeats the
errand. A failed errand rests, and other errands continue (``back_off``). Only a signal ends the daemon.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial

from factory.core.errors import FactoryError, InputError, SegmentError
from factory.core.faults import is_machine_fault_unrelated_to_files
from factory.core.workspace import MODEL_LOOP
from factory.duties.back_off import DutyTaskRunner, RetryingDutyTaskRunner, run_in_background
from factory.duties.duty import Duty, DutyState, DutyTask, always_due
from factory.duties.listing import write_duty_status_file
from factory.duties.table import DUTIES
from factory.ingest.inbox import SETTLE_SECONDS
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow
from factory.repairs.repairing import call_and_repair_on_failure
from factory.retention.low_disk import is_workspace_disk_full, make_room_on_disk, must_training_wait_for_disk_space
from factory.retrying.daemon_requests import PausedError, list_open_requests, record_finished_request
from factory.retrying.trainer_deaths import explain_parked_segment
from factory.training.certifying import NotCertifiedError, find_newest_code_verdict, make_certificate_instructions
from kernels.contract.message import Message

MOST_REPEATS = 3  # of one errand in a row
REQUEST_KEYS = ("action", "by", "at", "event")  # keys of a request; its other keys are arguments of ``do``


def find_next_duty_tasks(state: DutyState) -> list[DutyTask]:
    """Return the first errand that is due, not resting and not held, after the errands of "look" duties before it.

    Without such an errand, the daemon waits for files or for a person.
    """
    found: list[DutyTask] = []
    for duty in state.duties:
        if duty.in_background or duty.each == "pass":
            continue
        if errand := _first(duty, state):
            found.append(errand)
            if not errand.duty.each:
                break
    return found


def _first(duty: Duty, state: DutyState) -> DutyTask | None:
    """Return the first errand of a duty, or None.

    If ``due`` fails, the result is an errand that calls ``due`` again. Its error is repaired or reported, and the errand rests.
    """
    if state.resting & {duty.name, duty.due_check_key} or duty.find_reason_for_waiting(state):
        return None
    again = DutyTask(Duty(duty.due_check_key, duty.description, always_due, partial(_look_again, duty, replace(state))))
    if duty.due_check_key in state.failing:
        return again
    try:
        for subject in duty.due(state):
            errand = subject if isinstance(subject, DutyTask) else DutyTask(duty, subject)
            if str(errand) not in state.resting and not errand.duty.find_reason_for_waiting(state):
                return errand
    except Exception:
        return again
    return None


def _look_again(duty: Duty, state: DutyState, plant: Plant, _: None) -> None:
    with plant.ledger.snapshot() as db:
        next(iter(duty.due(replace(state, db=db))), None)


def run_duty_pass(
    plant: Plant,
    *,
    settle: float = SETTLE_SECONDS,
    endless: bool = False,
    attempts: DutyTaskRunner | None = None,
    duties: tuple[Duty, ...] = DUTIES,
) -> int:
    """Make a pass: do errands until none is due. Returns the number of errands done.

    A bad shard or file does not stop other errands. A missing or damaged token shard or checkpoint is made again. ``attempts`` handles failures. By
    default, failures are raised, and so is the reason why training waits for a person.
    """
    attempts = attempts or DutyTaskRunner()
    nothing = DutyState(plant, plant.ledger, duties, settle=settle, endless=endless)
    state = replace(nothing, resting=attempts.list_waiting_tasks(), failing=attempts.list_failing_tasks())
    for errand in [errand for duty in duties if duty.each == "pass" and (errand := _first(duty, state))]:
        attempts.try_task(str(errand), partial(errand.do, plant))
    done = repeats = 0
    previous = ""
    while True:
        low = must_training_wait_for_disk_space(plant)
        with plant.ledger.snapshot() as db:
            state = replace(
                nothing,
                db=db,
                low_on_disk=low,
                resting=attempts.list_waiting_tasks(),
                failing=attempts.list_failing_tasks(),
            )
            errands = find_next_duty_tasks(state)
            over = not errands or bool(errands[-1].duty.each)
            why = _why_training_waits(state) if over else None
        for errand in errands:
            if errand.duty.each:
                attempts.try_task(str(errand), partial(errand.do, plant))
                continue
            repeats = repeats + 1 if str(errand) == previous and not errand.duty.recurs else 0
            previous = str(errand)
            worked = attempts.try_task(previous, partial(_do, plant, errand, repeats))
            write_duty_status_file(plant.workspace, attempts.list_failure_states(), errand if worked else None)
            done += worked
        if over:
            write_duty_status_file(plant.workspace, attempts.list_failure_states())
            attempts.report_training_wait(why)
            return done


def _do(plant: Plant, errand: DutyTask, repeats: int) -> None:
    """Do an errand. Raises: FactoryError for an errand that is repeatedly due because doing it has no effect."""
    if repeats >= MOST_REPEATS:
        raise FactoryError(
            "duties.no_progress", "The daemon did the errand '{errand}' {repeats} times in a row, but the errand is still due. Run 'factory "
                                  "check'.",
            errand=str(errand), repeats=repeats,
        )  # fmt: skip
    wanted = list_open_requests(plant.ledger).get(str(errand), {})
    how = {key: value for key, value in wanted.items() if key not in REQUEST_KEYS and value is not None}
    try:
        call_and_repair_on_failure(plant, partial(errand.duty.do, plant, errand.subject, **how))
    except InputError as error:  # for example, the anomaly was closed meanwhile
        if not wanted or is_machine_fault_unrelated_to_files(error):
            raise
        plant.print_line(
            Message(
                "duties.request_refused",
                "  The requested errand '{errand}' could not be done: {error}",
                errand=str(errand),
                error=error,
            )
        )
    if wanted:
        record_finished_request(plant.ledger, str(errand), wanted["event"])


def _why_training_waits(state: DutyState) -> FactoryError | None:
    """Return the reason why training waits, as an error; None if training does not wait."""
    if state.pause:
        return PausedError(state.pause.message)
    if state.stuck_segment is None:
        return None
    row = SegmentRow.get(state.db, state.stuck_segment)
    if row.state == "uncertified":
        verdict = find_newest_code_verdict(state.plant.ledger, row.id)
        return NotCertifiedError(
            "duties.not_certified", "Training waits, because the code of segment {segment} is not certified. {reason} {to_do}",
            segment=row.id, reason=verdict.reasons[0] if verdict else "", to_do=make_certificate_instructions(row.id),
        )  # fmt: skip
    log = state.plant.workspace.logs / f"segment-{row.id:05d}.log"
    return SegmentError(
        "duties.parked",
        "{parked} The log is {log}.",
        parked=explain_parked_segment(state.db, row),
        segment=row.id,
        log=log,
    )


def run_daemon(plant: Plant, *, once: bool = False, every: float = 5.0) -> None:
    """Run the daemon: make passes, and wait ``every`` seconds after each. The trunk continues while epochs are left.

    ``once``: do all work that is due, then return. Errors are raised only with ``once``; otherwise no failure ends the daemon.
    """
    threads = [duty for duty in DUTIES if duty.in_background]
    with plant.workspace.hold_lock(MODEL_LOOP), ExitStack() as stack:
        if once:
            for duty in threads:
                duty.do(plant, None)
                if duty.at_end:
                    stack.callback(_at_end, duty, plant)
            if run_duty_pass(plant, settle=0.0) == 0:
                plant.print_line(
                    Message(
                        "duties.nothing_to_do",
                        "  The factory has nothing to do. Run 'factory status' to see what it waits for.",
                    )
                )
            return
        for duty in threads:  # each thread has its own connections
            own = replace(plant, ledger=Ledger.open(plant.workspace.ledger_url, plant.workspace.root))
            stack.enter_context(run_in_background(plant, duty.name, duty.in_background, partial(duty.do, own, None)))
        back_off = RetryingDutyTaskRunner(plant)
        while True:
            if not back_off.is_too_early_for_pass():
                try:
                    run_duty_pass(plant, endless=True, attempts=back_off)
                    back_off.record_pass_end()
                except Exception as error:
                    back_off.record_pass_failure(error)
                    if is_workspace_disk_full(plant.workspace, error):
                        with suppress(Exception):  # the next pass meets the error again
                            make_room_on_disk(plant)
            time.sleep(every)


def _at_end(duty: Duty, plant: Plant) -> None:
    """Do a background duty once more. A failure is reported; the next process does the duty again."""
    try:
        duty.do(plant, None)
    except (FactoryError, OSError) as error:
        plant.print_line(Message("duties.failed_at_end", "  {duty} failed: {error}", duty=duty.name, error=error))
