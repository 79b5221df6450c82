"""Functions for a trainer's folder: its specification, its lock, the disk space for a checkpoint, and the trainer's result."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from factory.core.errors import DiskFullError, SegmentError
from factory.core.faults import has_room_for
from factory.core.file_lock import LockedError, find_lock_holders, hold_file_lock
from factory.core.progress import Progress
from factory.core.stop_signals import TRAINER_STOP_SECONDS
from factory.core.untrusted_trainer_files import read_json_object, remove_special_files
from kernels.contract.files import write_atomically
from kernels.contract.message import Message

RESULT_KEYS = {"last_step": int, "checkpoint": str, "manifest_sha256": str}
PART_NAME = "segment.json.part"
LOCK_SECONDS = 3 * TRAINER_STOP_SECONDS  # longest wait for a trainer whose factory was killed; enough on a busy machine


def write_spec(folder: Path, spec: dict[str, Any]) -> None:
    write_atomically(folder / "segment.json", json.dumps(spec, indent=1, sort_keys=True))


def write_spec_into_open_folder(folder: int, spec: Mapping[str, Any]) -> None:
    """Write a run's ``segment.json`` into its folder, given as a descriptor. Code in the sandbox may write there too. Raises: OSError."""
    handle = os.open(PART_NAME, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644, dir_fd=folder)
    with os.fdopen(handle, "w") as out:
        json.dump(dict(spec), out)
    os.rename(PART_NAME, "segment.json", src_dir_fd=folder, dst_dir_fd=folder)


@contextmanager
def lock_trainer_folder(folder: Path) -> Iterator[int]:
    """Hold a lock that the trainer's sandbox holds too, so that a restarted factory waits for the end of the old trainer. Yields its descriptor.

    The lock's file is beside the folder, where the trainer cannot write. Raises: SegmentError.
    """
    path = folder.with_name(f"{folder.name}.lock")
    with ExitStack() as held:
        try:
            descriptor = held.enter_context(hold_file_lock(path, LOCK_SECONDS))
        except LockedError as holder:
            old = ", ".join(map(str, find_lock_holders(path))) or "of another machine"
            raise SegmentError(
                "runs.still_training",
                "{folder}: a trainer (process {trainer}) still works in this folder. Process {holder} started the trainer. End the "
                "trainer, then try again.",
                folder=folder,
                holder=holder,
                trainer=old,
            ) from None
        yield descriptor


def check_disk_space(folder: Path, recipe: Mapping[str, Any], title: str, last_line: str = "") -> None:
    """Check that the disk has space for a checkpoint of the recipe. ``last_line``: a trainer's last line, which the error then repeats.

    Raises: DiskFullError if it has not.
    """
    size = estimate_max_checkpoint_bytes(recipe)
    if not has_room_for(folder, size):
        cause = (
            Message.from_json(last_line)
            if last_line
            else Message("runs.checkpoint_size", "a checkpoint needs up to {size:.2f} GB", size=size / 1e9)
        )
        raise DiskFullError(
            "runs.disk_full",
            "{title}: the disk is full: {cause}. Free some space and run the same command again. The last checkpoint is not damaged.",
            title=title, cause=cause,
        )  # fmt: skip


def estimate_max_checkpoint_bytes(recipe: Mapping[str, Any]) -> int:
    """Return the most bytes of a checkpoint: weights and two moments in fp32, plus a third. Returns 1 if this code cannot read the recipe."""
    from trainer.contract.errors import RecipeError
    from trainer.contract.recipe import Recipe

    try:
        return 16 * Recipe.parse(dict(recipe)).model.parameters
    except RecipeError:
        return 1


def remove_links_and_pipes(folder: Path, progress: Progress) -> None:
    """Remove links and pipes, which no trainer should leave in its folder, and print a warning. Raises: SegmentError (``remove_special_files``)."""
    if removed := remove_special_files(folder):
        progress.line(
            Message(
                "runs.odd_files",
                "  WARNING: the trainer left links, pipes or other special files in {folder}. The factory removed them: {names} ({count} in "
                "all)",
                folder=folder, names=[repr(name) for name in sorted(removed)[:5]], count=len(removed),
            )
        )  # fmt: skip


def read_result(folder: Path, last_step: int) -> dict[str, Any]:
    """Return the content of an ended trainer's result.json. Raises: SegmentError if it does not name this folder's last checkpoint."""
    from trainer.contract.checkpoint.format import format_checkpoint_name

    path = folder / "result.json"
    result = read_json_object(path)
    for key, kind in RESULT_KEYS.items():
        if not isinstance(result.get(key), kind):
            raise SegmentError(
                "runs.wrong_result",
                "{file}: {key} is missing, or is not of type {kind}.",
                file=path, key=key, kind=kind.__name__,
            )  # fmt: skip
    expected = ("checkpoints", format_checkpoint_name(last_step))  # the workspace may have been moved since
    if (result["last_step"], Path(result["checkpoint"]).parts[-2:]) != (last_step, expected):
        raise SegmentError(
            "runs.other_result",
            "{file} names step {step} and {checkpoint}. Step {expected_step} and {expected} were expected.",
            file=path, step=result["last_step"], checkpoint=result["checkpoint"][:300], expected_step=last_step, expected="/".join(expected),
        )  # fmt: skip
    return result | {"checkpoint": str(folder.joinpath(*expected))}
