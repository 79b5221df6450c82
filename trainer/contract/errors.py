"""Errors that a user can cause in a training run, and how a program of this package reports them: one line and an exit code."""

from __future__ import annotations

import difflib
import errno
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from kernels.contract.message import CodedError, titled

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # of an OSError: the disk is full
NOT_OF_A_FILE = {
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.ESTALE,
    errno.ENOTCONN,
}  # it says nothing about the file that it was met at
EXIT_WRONG, EXIT_FULL, EXIT_STOPPED = 2, 74, 75


class TrainerError(CodedError):
    """The base class of errors that a user can cause here."""

    exit_code = EXIT_WRONG


class RecipeError(TrainerError):
    """A recipe is wrong or impossible: names the key."""


class SpecError(TrainerError):
    """segment.json is missing or wrong: names the key."""


class DataPlanError(TrainerError):
    """The data plan is wrong, or has too little data for the steps that are planned."""


class CheckpointError(TrainerError):
    """A checkpoint is missing, torn, altered, or belongs to another model."""


class TokenShardError(TrainerError):
    """The folder is not a token shard, or its bytes differ from its manifest."""


class Stopped(TrainerError):
    """Stopped by SIGTERM; a checkpoint of the last whole step, if there was one, is on disk."""

    exit_code = EXIT_STOPPED


def exit_code_of(
    program: str, work: Callable[[], object], wrong: type[Exception] = TrainerError, where: Path | None = None
) -> int:
    """Do the work; returns 0, or the exit code of an error that a user can correct, which is printed to stderr in one line.

    ``wrong``: another package's error that a user can cause. ``where``: what is being written, for a full disk.
    """
    try:
        work()
    except TrainerError as error:
        print(f"{program}: {titled(error)}", file=sys.stderr)
        return error.exit_code
    except wrong as error:
        print(f"{program}: {titled(error)}", file=sys.stderr)
        return EXIT_WRONG
    except OSError as error:
        if error.errno not in FULL:
            raise
        full = error.filename or where
        place = f": {full}" if full else ""
        print(f"{program}: {error.strerror}{place}; free some space and start again", file=sys.stderr)
        return EXIT_FULL
    return 0


def nearest(word: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the nearest known word, or the list of known words when none is near."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(names)}"
