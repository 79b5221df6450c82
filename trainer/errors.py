"""What a user can cause in a training run. Each is printed as one line; its ``exit_code`` is the process's."""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # of an OSError: the disk is full
EXIT_FULL = 74


class TrainerError(Exception):
    """The root of everything a user can cause here."""

    exit_code = 2


class RecipeError(TrainerError):
    """A recipe is wrong or impossible: names the key."""


class SpecError(TrainerError):
    """segment.json is missing or wrong: names the key."""


class DataPlanError(TrainerError):
    """The data plan is wrong, or holds too little data for what is asked of it."""


class CheckpointError(TrainerError):
    """A checkpoint is missing, torn, altered, or belongs to another model."""


def nearest(word: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the nearest known word, or the list of known words when none is near."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(names)}"
