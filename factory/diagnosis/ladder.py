"""A ladder of checkpoints: what a diagnosis replays from, copied aside while a segment trains, before the trainer removes it.

The last ``NEWEST``, then one at each doubling of the distance: an anomaly that is noticed late finds a checkpoint from before its
onset that is not much further away than it is itself. Copied as the audit's windows are: whole, or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from factory.audit.keeping import copy_checkpoint, looking
from factory.core.removal import remove
from factory.core.workspace import Workspace
from factory.ledger.rows import SegmentRow
from trainer.contract.checkpoint.format import name_of, steps_in

NEWEST = 3


def ladder_of(workspace: Workspace, segment: int) -> Path:
    """Where the rungs of a segment lie."""
    return workspace.root / "ladder" / f"{segment:05d}"


def rungs(steps: Collection[int], every: int) -> list[int]:
    """Which of the checkpoints to keep, oldest first: what is left out once is never asked for later.

    >>> rungs(range(5, 105, 5), every=5)
    [40, 80, 90, 95, 100]
    >>> rungs([40, 80, 90, 95, 100, 105], every=5)
    [40, 80, 90, 95, 100, 105]
    """
    ordered = sorted(steps)
    kept = set(ordered[-NEWEST:])
    for step in ordered[:-1]:
        if step % every == 0:
            distance = ordered[-1] // every - step // every
            band = 1 << max(0, distance.bit_length() - 1)  # the greatest power of two that is not above the distance
            if (step // every) % band == 0:
                kept.add(step)
    return sorted(kept)


@contextmanager
def climbing(workspace: Workspace, row: SegmentRow) -> Iterator[None]:
    """While the block trains a segment, keep its ladder. Training never fails because of that. Retention removes old ladders."""
    if row.kind == "average":
        yield
        return
    source, target = Path(row.folder) / "checkpoints", ladder_of(workspace, row.id)
    with looking(lambda: keep_rungs(source, target, row.recipe_json["checkpoint_every"])):
        yield


def keep_rungs(source: Path, target: Path, every: int) -> bool:
    """Copy each checkpoint that is there, and remove the rungs that are no longer wanted. False: there may be more."""
    for left in target.glob(".*"):  # of one that was killed
        remove(left)
    held, there = ({step for step, _ in steps_in(folder)} for folder in (target, source))
    wanted = rungs(held | there, every)
    for step in wanted:
        if step not in held:
            try:
                copy_checkpoint(source / name_of(step), target / name_of(step))
            except (OSError, ValueError):
                continue  # removed again, not whole, or the disk is full: a ladder with a rung less
    for step in held - set(wanted):
        with suppress(OSError):
            aside = target / f".{name_of(step)}"  # half a rung bears no name of one
            os.rename(target / name_of(step), aside)
            remove(aside)
    return False
