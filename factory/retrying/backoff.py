"""What failed: how long it rests (twice as long after each failure, by a clock that no jump of the date moves), and where its traceback goes."""

from __future__ import annotations

import os
import re
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

NUMBERS = re.compile(r"\d+(\.\d+)?")
LOG_BYTES = 4 << 20  # of errors.log, which is then renamed errors.old.log


@dataclass(frozen=True)
class Resting:
    """Of one thing, named by a key, that failed ``failures`` times in a row and is not tried again before ``until``."""

    says: str
    about: str  # what is the same while nothing changed
    failures: int
    since: float  # seconds of the clock, as ``until``
    until: float
    seconds: float


class Backoff:
    def __init__(self, first: float, longest: float, clock: Callable[[], float] = time.monotonic) -> None:
        """``first`` and ``longest``: seconds."""
        self.first, self.longest, self.clock = first, longest, clock
        self._rests: dict[str, Resting] = {}

    def failed(
        self, key: str, says: str, *, about: str = "", longest: float | None = None, failures: int | None = None
    ) -> tuple[Resting, bool]:
        """(how it rests now, is that news). News is another ``about``; by default words that changed by more than numbers.
        ``failures``: where another counts them."""
        before, now = self._rests.get(key), self.clock()
        count = failures or (before.failures + 1 if before else 1)
        seconds = min(self.first * 2.0 ** min(count - 1, 40), longest or self.longest)
        about = about or NUMBERS.sub("", says)
        rest = Resting(says, about, count, before.since if before else now, now + seconds, seconds)
        self._rests[key] = rest
        return rest, before is None or before.about != about

    def rests(self, key: str) -> bool:
        """Is it too early to try it again?"""
        rest = self._rests.get(key)
        return rest is not None and self.clock() < rest.until

    def resting(self) -> frozenset[str]:
        """The keys of all that it is too early for."""
        return frozenset(key for key in self._rests if self.rests(key))

    def known(self) -> dict[str, Resting]:
        """All that failed and has not succeeded since, resting or not."""
        return dict(self._rests)

    def succeeded(self, key: str) -> Resting | None:
        """Forget it; returns how it rested, if it had failed."""
        return self._rests.pop(key, None)

    def try_all(self) -> None:
        """Nothing rests any longer; what failed stays known."""
        self._rests = {key: replace(rest, until=self.clock()) for key, rest in self._rests.items()}


def keep_traceback(log: Path, what: str, error: BaseException) -> None:
    """Append it to a log, which is renamed when it is long. Raises: OSError."""
    if log.exists() and log.stat().st_size > LOG_BYTES:
        os.replace(log, log.with_name("errors.old.log"))
    with open(log, "a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S%z')} {what}\n{''.join(traceback.format_exception(error))}\n")
