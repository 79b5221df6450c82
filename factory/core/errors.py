"""Errors that a user can cause. Each message says what is wrong, where, and what to do. Stored data stay as they are.

An ``assert`` guards against bugs. The command line prints a ``FactoryError`` as one message and exits with its ``exit_code``.
Any other exception is a bug and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from kernels.contract.message import CodedError, Message


class FactoryError(CodedError):
    """The base class of all errors that a user can cause."""

    exit_code = 1


class ConfigError(FactoryError):
    """A policy, a recipe or factory.yaml is wrong. The message names the file and the key."""

    exit_code = 2


class InputError(FactoryError):
    """A shard, path or argument is wrong. The message names the file, and the line if one is known."""

    exit_code = 2


class WorkspaceError(FactoryError):
    """The workspace is missing, of another version, or in use by another process."""

    exit_code = 3


class IsolationError(FactoryError):
    """No sandbox can isolate untrusted code here. Nothing was run."""

    exit_code = 4


class SegmentError(FactoryError):
    """A training segment failed. The message names its folder and its log."""

    exit_code = 5


class DamagedExportError(FactoryError):
    """A candidate's export is missing or has changed since the factory made it. This says nothing about the model, which was not measured."""

    def __init__(self, candidate: int, why: str) -> None:
        super().__init__(
            "core.damaged_export",
            "The export of candidate {candidate} cannot be measured: {why}. The daemon makes the export again from "
            "the checkpoint. If no daemon runs, run 'factory check --repair'",
            candidate=candidate,
            why=why,
        )
        self.candidate, self.why = candidate, why


class DamagedTokenizerError(FactoryError):
    """The workspace's tokenizer is missing or differs from the recorded one. The factory tokenises nothing until a person restores it."""


class NoMemoryError(FactoryError, MemoryError):
    """A task needs more memory than is free now. This fault of the machine is temporary."""

    exit_code = 71


class PersonNeededError(FactoryError):
    """Nothing failed: the requested action waits for a person."""


class DiskFullError(SegmentError):
    """A trainer ended because the disk is full. The trainer itself did not fail, and its last checkpoint is whole."""

    exit_code = 74


def suggest_name(word: str, known: Iterable[str]) -> Message:
    """Return the end of a message about an unknown name: "; did you mean 'x'?" for the nearest known name, else the list of known names."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1)
    if close:
        return Message("core.nearest", "; did you mean {nearest!r}?", nearest=close[0])
    return Message("core.known", "; known: {known}", known=names)
