"""Waits after failures, each twice as long as the last, and logs tracebacks. The clock is monotonic: a changed date has no effect."""

from __future__ import annotations

import os
import re
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

NUMBERS = re.compile(r"\d+(\.\d+)?")
LOG_BYTES = 4 << 20  # an errors.log of this size is renamed to errors.old.log


@dataclass(frozen=True)
class FailureWait:
    """The state of work that failed ``failures`` times in a row and is not tried again before ``until``."""

    says: str  # text of the error
    about: str  # the cause: equal for two failures with the same cause
    failures: int
    since: float  # time of the first failure, in seconds of the monotonic clock
    until: float
    seconds: float  # length of this wait


class FailureWaits:
    """Remembers when each piece of work that failed may be tried again. A key names the work."""

    def __init__(self, first: float, longest: float, clock: Callable[[], float] = time.monotonic) -> None:
        """``first`` and ``longest``: the first and the longest wait, in seconds."""
        self.first, self.longest, self.clock = first, longest, clock
        self._rests: dict[str, FailureWait] = {}

    def record_failure(
        self,
        key: str,
        error_text: str,
        *,
        cause: str = "",
        longest_wait: float | None = None,
        failures: int | None = None,
    ) -> tuple[FailureWait, bool]:
        """Record a failure; returns (the new state, whether the failure has a new cause).

        ``cause`` names the cause. By default it is ``error_text`` without numbers. ``failures``: the number of failures, if the caller counts them.
        """
        before, now = self._rests.get(key), self.clock()
        count = failures or (before.failures + 1 if before else 1)
        seconds = min(self.first * 2.0 ** min(count - 1, 40), longest_wait or self.longest)
        cause = cause or NUMBERS.sub("", error_text)
        rest = FailureWait(error_text, cause, count, before.since if before else now, now + seconds, seconds)
        self._rests[key] = rest
        return rest, before is None or before.about != cause

    def is_waiting(self, key: str) -> bool:
        """Whether it is too early to try this key again."""
        rest = self._rests.get(key)
        return rest is not None and self.clock() < rest.until

    def list_waiting_keys(self) -> frozenset[str]:
        """Return the keys of work that must still wait."""
        return frozenset(key for key in self._rests if self.is_waiting(key))

    def list_failures_by_key(self) -> dict[str, FailureWait]:
        """Return the state of each key that failed and has not succeeded since, also if its wait is over."""
        return dict(self._rests)

    def record_success(self, key: str) -> FailureWait | None:
        """Forget a key; returns its state if it had failed."""
        return self._rests.pop(key, None)

    def end_all_waits(self) -> None:
        """End all waits. The numbers of failures are kept."""
        self._rests = {key: replace(rest, until=self.clock()) for key, rest in self._rests.items()}


def append_traceback(log: Path, what: str, error: BaseException) -> None:
    """Append the traceback of ``error`` to a log. A log that is too long is renamed first. Raises: OSError."""
    if log.exists() and log.stat().st_size > LOG_BYTES:
        os.replace(log, log.with_name("errors.old.log"))
    with open(log, "a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S%z')} {what}\n{''.join(traceback.format_exception(error))}\n")
