"""The line that a program of the trainer prints for an error, and its exit code."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer.contract.errors import (
    EXIT_FULL,
    EXIT_STOPPED,
    EXIT_WRONG,
    RecipeError,
    StoppedBySignalError,
    run_and_get_exit_code,
)


def raising(error: Exception) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


@pytest.mark.parametrize(
    ("work", "code", "said"),
    [
        (lambda: 3, 0, ""),
        (
            raising(RecipeError("recipe.zero", "batch.sequences: 0")),
            EXIT_WRONG,
            "program: error[recipe.zero]: batch.sequences: 0\n",
        ),
        (
            raising(StoppedBySignalError("trainer.stopped", "after step 4")),
            EXIT_STOPPED,
            "program: error[trainer.stopped]: after step 4\n",
        ),
        (raising(KeyError("key")), EXIT_WRONG, "program: 'key'\n"),
        (
            raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/a/file")),
            EXIT_FULL,
            "program: error[trainer.disk_full]: /a/file: No space left on device. Free some space and start again.\n",
        ),
        (
            raising(OSError(errno.EDQUOT, "Disk quota exceeded")),
            EXIT_FULL,
            "program: error[trainer.disk_full]: /the/folder: Disk quota exceeded. Free some space and start again.\n",
        ),
    ],
    ids=["well", "wrong", "stopped", "another package's", "full", "full, of no file"],
)
def test_a_program_prints_an_error_as_one_line_and_returns_its_exit_code(
    work: Callable[[], object], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_and_get_exit_code("program", work, KeyError, Path("/the/folder")) == code
    assert capsys.readouterr() == ("", said)


@pytest.mark.parametrize("error", [OSError(errno.EACCES, "Permission denied"), ValueError("ours")])
def test_an_error_that_no_user_can_correct_is_raised(error: Exception) -> None:
    with pytest.raises(type(error)):
        run_and_get_exit_code("program", raising(error))
