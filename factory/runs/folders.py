"""A trainer's folder: its specification, the lock on it, whether a checkpoint fits, and what it says once it has ended."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from factory.core.errors import DiskFullError, SegmentError
from factory.core.faults import fits
from factory.core.file_lock import LockedError, file_lock, holders
from factory.core.left_files import read_object, sweep
from factory.core.progress import Progress
from factory.core.stopping import TRAINER_SECONDS
from kernels.contract.files import write_atomically

RESULT_KEYS = {"last_step": int, "checkpoint": str, "manifest_sha256": str}
LOCK_SECONDS = 3 * TRAINER_SECONDS  # for a trainer whose factory was killed, on a busy machine too


def write_spec(folder: Path, spec: dict[str, Any]) -> None:
    write_atomically(folder / "segment.json", json.dumps(spec, indent=1, sort_keys=True))


def reveal(folder: int, spec: Mapping[str, Any]) -> None:
    """Write a run's ``segment.json`` into its folder, a descriptor, where code in the sandbox writes too. Raises: OSError."""
    handle = os.open("segment.json.part", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644, dir_fd=folder)
    with os.fdopen(handle, "w") as out:
        json.dump(dict(spec), out)
    os.rename("segment.json.part", "segment.json", src_dir_fd=folder, dst_dir_fd=folder)


@contextmanager
def folder_lock(folder: Path) -> Iterator[int]:
    """A lock that the trainer's sandbox has too: held while either lives, so that a restarted factory waits for the old trainer to end.

    It lies beside the folder, where the trainer cannot take its name.
    """
    path = folder.with_name(f"{folder.name}.lock")
    with ExitStack() as held:
        try:
            descriptor = held.enter_context(file_lock(path, LOCK_SECONDS))
        except LockedError as holder:
            old = ", ".join(map(str, holders(path))) or "of another machine"
            raise SegmentError(
                f"{folder}: a trainer that process {holder} started is still at work there (process {old}); end it, then try again"
            ) from None
        yield descriptor


def refuse_full(folder: Path, recipe: Mapping[str, Any], title: str, line: str = "") -> None:
    """Where no checkpoint of a recipe fits, no trainer starts, and one that says so is right.

    Raises: DiskFullError, with ``line``, what the trainer said.
    """
    size = checkpoint_bytes(recipe)
    if not fits(folder, size):
        cause = f": {line}" if line else f": a checkpoint takes up to {size / 1e9:.2f} GB"
        raise DiskFullError(
            f"{title}: the disk is full{cause}. Free some space and run the same command again: its last checkpoint is whole"
        )


def checkpoint_bytes(recipe: Mapping[str, Any]) -> int:
    """Most that a checkpoint takes: weights and two moments in fp32, and a third of that for all else; 1 where only other code reads the recipe."""
    from trainer.contract.errors import RecipeError
    from trainer.contract.recipe import Recipe

    try:
        return 16 * Recipe.parse(dict(recipe)).model.parameters
    except RecipeError:
        return 1


def clear(folder: Path, progress: Progress) -> None:
    """Remove what no trainer should leave in its folder: links, pipes. Raises: SegmentError (``sweep``)."""
    if removed := sweep(folder):
        names = ", ".join(map(repr, sorted(removed)[:5]))
        progress.line(
            f"  WARNING: the trainer left what is no file in {folder}; removed: {names} ({len(removed)} in all)"
        )


def result_of(folder: Path, last_step: int) -> dict[str, Any]:
    """result.json of a trainer that has ended, if it is about this folder's last checkpoint. Raises: SegmentError."""
    from trainer.contract.checkpoint.format import name_of

    path = folder / "result.json"
    result = read_object(path)
    for key, kind in RESULT_KEYS.items():
        if not isinstance(result.get(key), kind):
            raise SegmentError(f"{path}: {key} is missing, or no {kind.__name__}")
    expected = ("checkpoints", name_of(last_step))  # the workspace may have been moved since
    if (result["last_step"], Path(result["checkpoint"]).parts[-2:]) != (last_step, expected):
        raise SegmentError(
            f"{path} names step {result['last_step']} and {result['checkpoint'][:300]}, and not step {last_step} and {'/'.join(expected)}"
        )
    return result | {"checkpoint": str(folder.joinpath(*expected))}
