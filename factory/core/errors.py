"""What a user can cause. Each message has what was wrong, where, and what to do; nothing already stored is lost.

What only a bug can cause is an ``assert``. The command line prints a ``FactoryError`` as one clear message and exits with
its ``exit_code``; anything else is a bug and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from kernels.contract.message import CodedError


class FactoryError(CodedError):
    """The root of everything a user can cause."""

    exit_code = 1


class ConfigError(FactoryError):
    """A policy, recipe or factory.yaml is wrong: names the file and the key."""

    exit_code = 2


class InputError(FactoryError):
    """A shard, path or argument is wrong: names the file, and the line where there is one."""

    exit_code = 2


class WorkspaceError(FactoryError):
    """The workspace is missing, of another version, or in use by another process."""

    exit_code = 3


class IsolationError(FactoryError):
    """No sandbox that can isolate untrusted code is available; nothing was run."""

    exit_code = 4


class SegmentError(FactoryError):
    """A training segment did not end well; its folder and log are named."""

    exit_code = 5


class DamagedExportError(FactoryError):
    """The export of a candidate is gone, or no longer what it was when it was made: nothing was measured, so nothing is said of the model."""

    def __init__(self, candidate: int, why: str) -> None:
        super().__init__(
            f"the export of candidate {candidate} cannot be measured: {why}. The daemon makes it again from its checkpoint; "
            "'factory check --repair' does so where none runs"
        )
        self.candidate, self.why = candidate, why


class DamagedTokenizerError(FactoryError):
    """The workspace's tokenizer is gone, or not the recorded one: nothing is tokenised until it is back."""


class NoMemoryError(FactoryError, MemoryError):
    """Something needs more memory than is free now: a fault of the machine, which passes."""

    exit_code = 71


class WaitingError(FactoryError):
    """Nothing failed: what was asked for waits for a person."""


class DiskFullError(SegmentError):
    """A trainer ended because the disk is full: no failure of its own, and its last checkpoint is whole."""

    exit_code = 74


def nearest(word: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the nearest known word, or the list of known words when none is near."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(names)}"
