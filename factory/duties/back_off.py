"""Keeps the daemon running when errands fail: a failed errand rests, twice as long each time, while the others continue.

A fault of the machine ends the pass. A failure is reported once and recorded as an event. It is reported again when its text changes, and the daemon
also reports when the errand works again. The traceback of an unexpected exception goes to ``logs/errors.log``. Waits are in memory only, so a new
daemon tries at once.

Background work of the daemon (``run_in_background``) and its start (``retry_during_faults``) are retried in the same way.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from factory.core.errors import ConfigError, FactoryError, InputError, PersonNeededError
from factory.core.faults import LOCKED, Fault, find_fault_in, is_machine_fault_unrelated_to_files
from factory.core.time_formats import format_duration
from factory.core.workspace import Workspace
from factory.ledger.ledger import record_event
from factory.ledger.plant import Plant
from factory.retrying.daemon_requests import WorkInvalidatedError
from factory.retrying.failure_waits import FailureWait, FailureWaits, append_traceback
from factory.retrying.policy import RetryPolicy
from factory.retrying.trainer_deaths import ASKED, TrainerDiedError
from factory.status.waiting import ACTION_FAILED, PASS_FAILED, WORKS_AGAIN, list_failing_actions
from kernels.contract.message import Message

PASS_KEY = "a pass"  # the key of a whole pass
FAULT_SECONDS = 60.0  # the longest wait between two passes during a fault of the machine
TURN = 1.5  # factor by which the errand that met the fault rests longer, so that other errands get a turn
START_SECONDS = 1.0  # between the first two tries to start
END_SECONDS = 1.0  # for the last turn of a thread; then the thread ends with the process
MOST_UNRECORDED = 100
T = TypeVar("T")


class DutyTaskRunner:
    """Does the errands of a single pass. Nothing rests, and failures are raised. A key is an errand as text.

    ``factory run --once`` uses this class; the daemon uses ``RetryingDutyTaskRunner``.
    """

    def list_failure_states(self) -> Mapping[str, FailureWait]:
        """Return the state of each failed errand, by its key."""
        return {}

    def list_waiting_tasks(self) -> frozenset[str]:
        """Return the keys of errands that are not tried now."""
        return frozenset()

    def list_failing_tasks(self) -> frozenset[str]:
        """Return the keys of errands that failed and have not succeeded since."""
        return frozenset()

    def try_task(self, key: str, act: Callable[[], object]) -> bool:
        """Do an errand. Returns whether it was done. If not, the errand failed and rests, or a decision made it obsolete."""
        try:
            act()
        except WorkInvalidatedError:
            return False
        return True

    def report_training_wait(self, why: FactoryError | None) -> None:
        """Report why training waits for a person. None means that training does not wait."""
        if why is not None:
            raise why


class RetryingDutyTaskRunner(DutyTaskRunner):
    """Does the errands of the daemon. Failed errands rest and are retried."""

    def __init__(self, plant: Plant) -> None:
        self.workspace, self.ledger, self.progress = plant.workspace, plant.ledger, plant.progress
        policy = RetryPolicy()
        with contextlib.suppress(FactoryError, OSError):  # a pass reports an error of the file
            policy = RetryPolicy.load(plant.workspace.policy_path("retries.yaml"))
        self.backoff = FailureWaits(policy.first_wait_seconds, policy.longest_wait_seconds)
        self._asked: int | None = None  # the newest 'retry_asked' event that was obeyed
        self._unrecorded: list[tuple[str, dict[str, Any]]] = []  # events that the ledger could not record
        self._told: set[str] = set()  # keys of reported failures, also of an earlier daemon
        with contextlib.suppress(Exception):  # the ledger cannot be read now
            self._told = {one["what"] for one in list_failing_actions(plant.ledger)}
        self._rested: set[str] = set()  # keys that rested at some moment of this pass
        self._failed: set[str] = set()  # keys that failed in this pass
        self._waiting = ""  # the reported reason why training waits

    def list_waiting_tasks(self) -> frozenset[str]:
        resting = self.backoff.list_waiting_keys()
        self._rested |= resting
        return resting

    def list_failing_tasks(self) -> frozenset[str]:
        return frozenset({*self.backoff.list_failures_by_key(), *self._told})

    def list_failure_states(self) -> Mapping[str, FailureWait]:
        return self.backoff.list_failures_by_key()

    def try_task(self, key: str, act: Callable[[], object]) -> bool:
        """Do an errand, as ``DutyTaskRunner.try_task`` does.

        Raises: any error that a fault of the machine causes, because other errands would fail too.
        """
        if self.backoff.is_waiting(key):
            return False
        try:
            act()
        except WorkInvalidatedError as told:
            self.say(str(told))
            return False
        except PersonNeededError:
            return False  # the next look reports it
        except TrainerDiedError as died:  # the ledger has it already, with its count
            rest, _ = self.backoff.record_failure(key, str(died), failures=died.tries)
            again = Message(
                "duties.next_try",
                "{died} The next try begins in {wait}.",
                died=died,
                wait=format_duration(rest.seconds),
                seconds=rest.seconds,
            )
            self.say(str(died) if died.parked else again)
            if died.parked:
                self.backoff.record_success(key)
            return False
        except Exception as error:
            fault = find_fault_in(error)
            if fault is not None:
                self.backoff.record_failure(
                    key, fault.description, longest_wait=min(FAULT_SECONDS * TURN, self.backoff.longest)
                )
                raise
            self._failed.add(key)
            rest, news = self.backoff.record_failure(key, self._words(error, key))
            if news:
                failed = Message(
                    "duties.failed", "{errand} failed: {error} (next try in {wait}; other work continues)",
                    errand=key, error=rest.says, wait=format_duration(rest.seconds), seconds=rest.seconds,
                )  # fmt: skip
                self._tell(ACTION_FAILED, key, failed, rest)
            return False
        self._works(key)
        return True

    def report_training_wait(self, why: FactoryError | None) -> None:
        """Report why training waits, once for each reason."""
        reason = str(why) if why else ""
        if reason and reason != self._waiting:
            self.say(reason)
        self._waiting = reason

    def is_too_early_for_pass(self) -> bool:
        """Return whether a pass failed so recently that the next pass must wait."""
        self._hear()
        return self.backoff.is_waiting(PASS_KEY)

    def record_pass_end(self) -> None:
        """Record that a pass ended: every due errand was tried, or rests."""
        self._works(PASS_KEY)
        for key in sorted(self._told - self._rested - self._failed):
            self.backoff.record_success(key)
            gone = Message("duties.no_longer_due", "{errand} failed earlier and is no longer due", errand=key)
            self._tell_no_longer(key, gone, "")
        self._failed.clear()
        self._rested.clear()

    def record_pass_failure(self, error: Exception) -> None:
        """Record that a fault of the machine or a bug ended a pass early."""
        fault = find_fault_in(error)
        said = make_fault_message(fault) if fault else self._words(error, PASS_KEY)
        longest = min(FAULT_SECONDS, self.backoff.longest)
        rest, news = self.backoff.record_failure(
            PASS_KEY, said, cause=fault.remedy if fault else "", longest_wait=longest
        )
        if news:
            # Writing to a locked ledger would block for a minute, so this event is recorded later.
            self._tell(PASS_FAILED, PASS_KEY, said, rest, record_now=fault != LOCKED)

    def say(self, message: str) -> None:
        """Print a line. An error is ignored, because the disk of the log may be full, or the terminal may be closed."""
        with contextlib.suppress(OSError, ValueError):
            self.progress.line(f"  {message}")

    def _words(self, error: Exception, key: str) -> str:
        if isinstance(error, FactoryError):
            return str(error)
        return _unexpected(self.workspace, key, error)

    def _works(self, key: str) -> None:
        before = self.backoff.record_success(key)
        if key in self._told:
            seconds = self.backoff.clock() - before.since if before else None
            again = Message(
                "duties.works_again", "{errand} works again{after}", errand=key, seconds=seconds,
                after=f" after {format_duration(seconds)} of failures" if seconds is not None else "",
            )  # fmt: skip
            self._tell_no_longer(key, again, before.says if before else "")

    def _tell(self, kind: str, key: str, message: str, rest: FailureWait, record_now: bool = True) -> None:
        self._told.add(key)
        detail = {"what": key, "error": rest.says, "failures": rest.failures, "again_in_s": rest.seconds}
        self._record(kind, detail, message, record_now)

    def _tell_no_longer(self, key: str, message: str, error: str) -> None:
        self._told.discard(key)
        self._record(WORKS_AGAIN, {"what": key, "error": error}, message)

    def _record(self, kind: str, detail: dict[str, Any], message: str, record_now: bool = True) -> None:
        self._unrecorded = [*self._unrecorded, (kind, detail)][-MOST_UNRECORDED:]
        if record_now:
            with contextlib.suppress(Exception), self.ledger.begin() as tx:  # a later event records it too
                for one, about in self._unrecorded:
                    record_event(tx, one, "daemon", about)
                self._unrecorded = []
        self.say(message)

    def _hear(self) -> None:
        """End all waits if a person has asked for a retry."""
        with contextlib.suppress(Exception):  # the ledger cannot be read now
            asked = f"SELECT max(id) AS id FROM events WHERE kind = '{ASKED}' AND id > :heard"
            newest = self.ledger.read(asked, heard=self._asked or 0)[0]["id"]
            if newest is not None and self._asked is not None:
                self.backoff.end_all_waits()
            self._asked = newest or self._asked or 0


def make_fault_message(fault: Fault) -> Message:
    """Return the message that the factory prints while it waits for the end of a fault of the machine."""
    return Message(
        "duties.waiting_for_machine", "{fault}: {to_do}. The factory waits, tries again at least every {seconds:.0f} s, and continues by itself.",
        fault=fault.description, to_do=fault.remedy, seconds=FAULT_SECONDS,
    )  # fmt: skip


def _unexpected(workspace: Workspace, what: str, error: Exception) -> str:
    log = workspace.logs / "errors.log"
    with contextlib.suppress(OSError):
        append_traceback(log, what, error)
    return Message(
        "duties.unexpected",
        "unexpected {type}: {error} (traceback in {log})",
        type=type(error).__name__,
        error=str(error)[:300],
        log=log,
    )


@contextmanager
def run_in_background(plant: Plant, name: str, every: float, act: Callable[[], object]) -> Iterator[None]:
    """Call ``act`` in a thread, at once and then every ``every`` seconds, while the block runs.

    A failure is reported once until ``act`` works again, and does not end the thread. The traceback of an unexpected exception goes to
    ``logs/errors.log``.
    """
    over = threading.Event()

    def turns() -> None:
        said = ""
        while True:
            failure = _failure(plant.workspace, name, act)
            if failure != said:
                said = failure
                failed = Message(
                    "duties.background_failed",
                    "  {duty} failed and will be tried again: {error}",
                    duty=name,
                    error=failure,
                )
                works = Message("duties.background_works", "  {duty} works again.", duty=name)
                with contextlib.suppress(OSError, ValueError):  # the disk may be full, the terminal may be closed
                    plant.print_line(failed if failure else works)
            if over.wait(every):
                return

    thread = threading.Thread(target=turns, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(END_SECONDS)


def _failure(workspace: Workspace, name: str, act: Callable[[], object]) -> str:
    """Call ``act``. Returns its failure as text; empty if it succeeded."""
    try:
        act()
    except FactoryError as error:
        return str(error)
    except Exception as error:
        fault = find_fault_in(error)
        return f"{fault.description}: {fault.remedy}" if fault else _unexpected(workspace, name, error)
    return ""


def retry_during_faults(act: Callable[[], T], say: Callable[[str], object]) -> T:
    """Return the result of ``act()``. The call is repeated while a fault of the machine makes it fail, and each fault is reported once.

    Just after its start, a machine may still lack a disk. Raises: any other error of ``act``. A ConfigError or InputError with a fault is raised if a
    setting can cause the fault (a port that only root may use). The call is repeated if no setting can cause it (no file handle is left).
    """
    waits = FailureWaits(START_SECONDS, FAULT_SECONDS)
    while True:
        try:
            return act()
        except Exception as error:
            fault = find_fault_in(error)
            mistake = isinstance(error, ConfigError | InputError) and not is_machine_fault_unrelated_to_files(error)
            if fault is None or mistake:
                raise
            rest, news = waits.record_failure("start", fault.description)
            if news:
                if isinstance(error, FactoryError):  # it has more facts, for example the server's name
                    say(f"  {error}")
                say(f"  {make_fault_message(fault)}")
        time.sleep(rest.seconds)
