"""Goes on whatever fails: an action that failed rests, longer each time, while the others go on; a fault of the machine ends the pass.

What failed is said once and recorded as an event, again when its words change, and when it works again. An exception that nobody expected
leaves its traceback in ``logs/errors.log``. Waits are kept in memory: a daemon that was started again tries at once.
"""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from factory.core.errors import FactoryError, WaitingError
from factory.core.faults import LOCKED, Fault, fault_of
from factory.ledger.ledger import record
from factory.ledger.plant import Plant
from factory.retrying.backoff import Backoff, Resting, in_words
from factory.retrying.policy import RetryPolicy
from factory.retrying.rewound import RewoundError
from factory.retrying.tries import ASKED, TrainerDiedError
from factory.retrying.waiting import ACTION_FAILED, PASS_FAILED, WORKS_AGAIN, failing

PASS = "a pass"  # as a whole, among the keys
FAULT_SECONDS = 60.0  # at most, between two passes while a fault of the machine lasts
TURN = 1.5  # times as long the action rests that met it, so that a pass comes in which the others have their turn
MOST_UNRECORDED = 100
LOG_BYTES = 4 << 20  # of errors.log, which is then renamed errors.old.log


class Attempts(Protocol):
    """What ``reconcile`` hands each action to."""

    def resting(self) -> frozenset[str]:
        """Keys of actions that are not tried now."""

    def attempt(self, key: str, act: Callable[[], object]) -> bool:
        """Was it done? False: it failed, and rests now."""

    def waits(self, why: FactoryError | None) -> None:
        """Training waits for a person, because of this; or not any longer."""


class Once:
    """Nothing rests: what fails is raised. For ``factory run --once``, and whoever runs one pass."""

    def resting(self) -> frozenset[str]:
        return frozenset()

    def attempt(self, key: str, act: Callable[[], object]) -> bool:
        try:
            act()
        except RewoundError:
            return False  # the next look at the world sees what was decided
        return True

    def waits(self, why: FactoryError | None) -> None:
        if why is not None:
            raise why


class Steady:
    """For the daemon."""

    def __init__(self, plant: Plant) -> None:
        self.workspace, self.ledger, self.progress = plant.workspace, plant.ledger, plant.progress
        policy = RetryPolicy()
        with contextlib.suppress(FactoryError, OSError):  # a pass says what is wrong with it
            policy = RetryPolicy.load(plant.workspace.policy("retries.yaml"))
        self.backoff = Backoff(policy.first_wait_seconds, policy.longest_wait_seconds)
        self._asked: int | None = None  # the newest 'retry_asked' event that was heard
        self._unrecorded: list[tuple[str, dict[str, Any]]] = []  # events that the ledger could not take
        self._told: set[str] = set()  # keys of what was said to have failed, by an earlier daemon too
        with contextlib.suppress(Exception):  # the ledger cannot be read now
            self._told = {one["what"] for one in failing(plant.ledger)}
        self._rested: frozenset[str] = frozenset()  # when the world was last looked at
        self._failed: set[str] = set()  # in this pass
        self._waiting = ""  # what was said that training waits for

    def resting(self) -> frozenset[str]:
        self._rested = self.backoff.resting()
        return self._rested

    def attempt(self, key: str, act: Callable[[], object]) -> bool:
        """Raises: what a fault of the machine made of it: nothing else would work either."""
        if self.backoff.rests(key):
            return False
        try:
            act()
        except RewoundError as told:
            self.say(str(told))
            return False
        except WaitingError:
            return False  # the next look at the world says so
        except TrainerDiedError as died:  # which is in the ledger already, and counted there
            rest, _ = self.backoff.failed(key, str(died), failures=died.tries)
            self.say(f"{died}" + ("" if died.parked else f"; the next try begins in {in_words(rest.seconds)}"))
            if died.parked:
                self.backoff.succeeded(key)
            return False
        except Exception as error:
            fault = fault_of(error)
            if fault is not None:
                self.backoff.failed(key, fault.says, longest=min(FAULT_SECONDS * TURN, self.backoff.longest))
                raise
            self._failed.add(key)
            rest, news = self.backoff.failed(key, self._words(error, key))
            if news:
                again = f"it is tried again in {in_words(rest.seconds)}, and the rest goes on"
                self._tell(ACTION_FAILED, key, f"{key} failed: {rest.says} ({again})", rest)
            return False
        self._works(key)
        return True

    def waits(self, why: FactoryError | None) -> None:
        """Said once."""
        words = str(why) if why else ""
        if words and words != self._waiting:
            self.say(words)
        self._waiting = words

    def too_early(self) -> bool:
        """For the next pass, after one that failed?"""
        self._hear()
        return self.backoff.rests(PASS)

    def passed(self) -> None:
        """A pass came to its end: all that is to be done was tried, or rests."""
        self._works(PASS)
        for key in sorted(self._told - self._rested - self._failed):
            self.backoff.succeeded(key)
            self._tell_no_longer(key, f"{key} failed, and is no longer to be done", "")
        self._failed.clear()

    def pass_failed(self, error: Exception) -> None:
        """A pass ended early: a fault of the machine, or of ours."""
        fault = fault_of(error)
        words = words_of(fault) if fault else self._words(error, PASS)
        longest = min(FAULT_SECONDS, self.backoff.longest)
        rest, news = self.backoff.failed(PASS, words, about=fault.do if fault else "", longest=longest)
        if news:
            # A locked ledger would be waited for, for a minute: that is recorded once it can be.
            self._tell(PASS_FAILED, PASS, words, rest, record_now=fault != LOCKED)

    def say(self, words: str) -> None:
        """A line, unless nobody can be told now: a full disk takes no log, a terminal may be gone."""
        with contextlib.suppress(OSError, ValueError):
            self.progress.line(f"  {words}")

    def _words(self, error: Exception, key: str) -> str:
        if isinstance(error, FactoryError):
            return str(error)
        log = self.workspace.logs / "errors.log"
        with contextlib.suppress(OSError):
            keep_traceback(log, key, error)
        return f"unexpected error, {type(error).__name__}: {str(error)[:300]} (traceback in {log})"

    def _works(self, key: str) -> None:
        before = self.backoff.succeeded(key)
        if key in self._told:
            took = f", {in_words(self.backoff.clock() - before.since)} after it first failed" if before else ""
            self._tell_no_longer(key, f"{key} works again{took}", before.says if before else "")

    def _tell(self, kind: str, key: str, words: str, rest: Resting, record_now: bool = True) -> None:
        self._told.add(key)
        self._note(kind, {"what": key, "error": rest.says, "failures": rest.failures, "again_in_s": rest.seconds})
        if record_now:
            self._record()
        self.say(words)

    def _tell_no_longer(self, key: str, words: str, error: str) -> None:
        self._told.discard(key)
        self._note(WORKS_AGAIN, {"what": key, "error": error})
        self._record()
        self.say(words)

    def _note(self, kind: str, detail: dict[str, Any]) -> None:
        self._unrecorded = [*self._unrecorded, (kind, detail)][-MOST_UNRECORDED:]

    def _record(self) -> None:
        with contextlib.suppress(Exception), self.ledger.begin() as tx:  # the next one takes it along
            for kind, detail in self._unrecorded:
                record(tx, kind, "daemon", detail)
            self._unrecorded = []

    def _hear(self) -> None:
        """Did a person ask to try at once what rests?"""
        with contextlib.suppress(Exception):  # the ledger cannot be read now
            asked = f"SELECT max(id) AS id FROM events WHERE kind = '{ASKED}' AND id > :heard"
            newest = self.ledger.read(asked, heard=self._asked or 0)[0]["id"]
            if newest is not None and self._asked is not None:
                self.backoff.try_all()
            self._asked = newest or self._asked or 0


def words_of(fault: Fault) -> str:
    """For a person, while it is waited for."""
    return f"{fault.says}: {fault.do}. The factory waits, looks again at least every {FAULT_SECONDS:.0f} s and goes on by itself"


def keep_traceback(log: Path, what: str, error: BaseException) -> None:
    """Append it to a log, which is renamed when it is long. Raises: OSError."""
    if log.exists() and log.stat().st_size > LOG_BYTES:
        os.replace(log, log.with_name("errors.old.log"))
    with open(log, "a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S%z')} {what}\n{''.join(traceback.format_exception(error))}\n")
