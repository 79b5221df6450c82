"""Goes on whatever fails: what failed rests, longer each time, while the others go on; a fault of the machine ends the pass.

What failed is said once and recorded as an event, again when its words change, and when it works again. An exception that nobody expected
leaves its traceback in ``logs/errors.log``. Waits are kept in memory: a daemon that was started again tries at once.

Things that the daemon does beside its work (``in_background``) and its start (``with_retries``) go on likewise.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from factory.core.errors import ConfigError, FactoryError, InputError, WaitingError
from factory.core.faults import LOCKED, Fault, fault_of, is_of_no_file
from factory.core.moments import span
from factory.core.workspace import Workspace
from factory.ledger.ledger import record
from factory.ledger.plant import Plant
from factory.retrying.asking import RewoundError
from factory.retrying.backoff import Backoff, Resting, keep_traceback
from factory.retrying.policy import RetryPolicy
from factory.retrying.tries import ASKED, TrainerDiedError
from factory.status.waiting import ACTION_FAILED, PASS_FAILED, WORKS_AGAIN, failing

PASS = "a pass"  # as a whole, among the keys
FAULT_SECONDS = 60.0  # at most, between two passes while a fault of the machine lasts
TURN = 1.5  # times as long the action rests that met it, so that a pass comes in which the others have their turn
START_SECONDS = 1.0  # between the first two tries to start
END_SECONDS = 1.0  # that the last turn of a thread may take; then it ends with the process
MOST_UNRECORDED = 100
T = TypeVar("T")


class Attempts:
    """What a pass hands each errand to; a key is an errand as text. As it is, nothing rests and what fails is raised: for ``factory run --once``,
    and whoever runs one pass."""

    def rests(self) -> Mapping[str, Resting]:
        """How what failed rests, by key."""
        return {}

    def resting(self) -> frozenset[str]:
        """Keys of what is not tried now."""
        return frozenset()

    def failing(self) -> frozenset[str]:
        """Keys of what failed and has not worked since."""
        return frozenset()

    def attempt(self, key: str, act: Callable[[], object]) -> bool:
        """Was it done? False: it failed, and rests now; or the next look at the world sees what was decided meanwhile."""
        try:
            act()
        except RewoundError:
            return False
        return True

    def waits(self, why: FactoryError | None) -> None:
        """Training waits for a person, because of this; or not any longer."""
        if why is not None:
            raise why


class BackOff(Attempts):
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
        self._rested: set[str] = set()  # at some moment of this pass
        self._failed: set[str] = set()  # in this pass
        self._waiting = ""  # what was said that training waits for

    def resting(self) -> frozenset[str]:
        resting = self.backoff.resting()
        self._rested |= resting
        return resting

    def failing(self) -> frozenset[str]:
        return frozenset({*self.backoff.known(), *self._told})

    def rests(self) -> Mapping[str, Resting]:
        return self.backoff.known()

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
            self.say(f"{died}" + ("" if died.parked else f"; the next try begins in {span(rest.seconds)}"))
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
                again = f"it is tried again in {span(rest.seconds)}, and the rest goes on"
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
        self._rested.clear()

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
        return _unexpected(self.workspace, key, error)

    def _works(self, key: str) -> None:
        before = self.backoff.succeeded(key)
        if key in self._told:
            took = f", {span(self.backoff.clock() - before.since)} after it first failed" if before else ""
            self._tell_no_longer(key, f"{key} works again{took}", before.says if before else "")

    def _tell(self, kind: str, key: str, words: str, rest: Resting, record_now: bool = True) -> None:
        self._told.add(key)
        detail = {"what": key, "error": rest.says, "failures": rest.failures, "again_in_s": rest.seconds}
        self._record(kind, detail, words, record_now)

    def _tell_no_longer(self, key: str, words: str, error: str) -> None:
        self._told.discard(key)
        self._record(WORKS_AGAIN, {"what": key, "error": error}, words)

    def _record(self, kind: str, detail: dict[str, Any], words: str, record_now: bool = True) -> None:
        self._unrecorded = [*self._unrecorded, (kind, detail)][-MOST_UNRECORDED:]
        if record_now:
            with contextlib.suppress(Exception), self.ledger.begin() as tx:  # the next one takes it along
                for one, about in self._unrecorded:
                    record(tx, one, "daemon", about)
                self._unrecorded = []
        self.say(words)

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


def _unexpected(workspace: Workspace, what: str, error: Exception) -> str:
    log = workspace.logs / "errors.log"
    with contextlib.suppress(OSError):
        keep_traceback(log, what, error)
    return f"unexpected error, {type(error).__name__}: {str(error)[:300]} (traceback in {log})"


@contextmanager
def in_background(plant: Plant, name: str, every: float, act: Callable[[], object]) -> Iterator[None]:
    """Call ``act`` in a thread, at once and then every so many seconds, while the block runs: neither waits for the other.

    What it raises is said once, until it works again, and ends nothing; what nobody expected leaves its traceback in ``logs/errors.log``.
    """
    over = threading.Event()

    def turns() -> None:
        said = ""
        while True:
            words = _failure(plant.workspace, name, act)
            if words != said:
                said = words
                with contextlib.suppress(OSError, ValueError):  # a full disk takes no log, a terminal may be gone
                    plant.say(f"  {name} {f'failed: {words}; it is tried again' if words else 'works again'}")
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
    """In words; empty: it worked."""
    try:
        act()
    except FactoryError as error:
        return str(error)
    except Exception as error:
        fault = fault_of(error)
        return f"{fault.says}: {fault.do}" if fault else _unexpected(workspace, name, error)
    return ""


def with_retries(act: Callable[[], T], say: Callable[[str], object]) -> T:
    """``act()``, again and again while a fault of the machine makes it fail: one that was just started may lack a disk. Each fault is said once.

    Raises: whatever else ``act`` does; ConfigError and InputError, too, where what is set caused the fault: a port that only root may listen
    on, and not where no setting can, as when factory.yaml cannot be read because no file handle is left.
    """
    waits = Backoff(START_SECONDS, FAULT_SECONDS)
    while True:
        try:
            return act()
        except Exception as error:
            fault = fault_of(error)
            mistake = isinstance(error, ConfigError | InputError) and not is_of_no_file(error)
            if fault is None or mistake:
                raise
            rest, news = waits.failed("start", fault.says)
            if news:
                if isinstance(error, FactoryError):  # it knows more: which server, say
                    say(f"  {error}")
                say(f"  {words_of(fault)}")
        time.sleep(rest.seconds)
