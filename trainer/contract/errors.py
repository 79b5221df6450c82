"""Errors that a user can cause in a training run. A program of this package reports them by one line and an exit code."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable
from pathlib import Path

from kernels.contract.message import CodedError, format_error_with_code

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # numbers of an OSError that mean: the disk is full
ERRORS_OF_NO_FILE = {
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.ESTALE,
    errno.ENOTCONN,
}  # the error says nothing about the file that was opened
EXIT_WRONG, EXIT_FULL, EXIT_STOPPED = 2, 74, 75


class TrainerError(CodedError):
    """The base class of errors that a user can cause here."""

    exit_code = EXIT_WRONG


class RecipeError(TrainerError):
    """A recipe is wrong or impossible. The message names the key."""


class SpecError(TrainerError):
    """segment.json is missing or wrong. The message names the key."""


class DataPlanError(TrainerError):
    """The data plan is wrong, or has too little data for the planned steps."""


class CheckpointError(TrainerError):
    """A checkpoint is missing, torn, altered, or belongs to another model."""


class TokenShardError(TrainerError):
    """The folder is not a token shard, or its bytes differ from its manifest."""


class StoppedBySignalError(TrainerError):
    """SIGTERM stopped the run. The run can continue from its newest checkpoint on disk."""

    exit_code = EXIT_STOPPED


def run_and_get_exit_code(
    program: str,
    work: Callable[[], object],
    error_type: type[Exception] = TrainerError,
    output_folder: Path | None = None,
) -> int:
    """Call ``work``. Returns 0, or the exit code of an error that a user can correct, which is printed to stderr in one line.

    ``error_type``: an error of another package that a user can cause. ``output_folder``: the folder that ``work`` writes, named if a disk is full.
    """
    try:
        work()
    except TrainerError as error:
        print(f"{program}: {format_error_with_code(error)}", file=sys.stderr)
        return error.exit_code
    except error_type as error:
        print(f"{program}: {format_error_with_code(error)}", file=sys.stderr)
        return EXIT_WRONG
    except OSError as error:
        if error.errno not in FULL:
            raise
        full = error.filename or output_folder
        place = f"{full}: " if full else ""
        said = CodedError(
            "trainer.disk_full",
            "{place}{problem}. Free some space and start again.",
            place=place,
            problem=error.strerror,
        )
        print(f"{program}: {format_error_with_code(said)}", file=sys.stderr)
        return EXIT_FULL
    return 0
