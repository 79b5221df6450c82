"""A ladder of checkpoints: what a diagnosis replays from, copied aside while a segment trains, before the trainer removes it.

The last ``NEWEST``, then one at each doubling of the distance: an anomaly that is noticed late finds a checkpoint from before its
onset that is not much further away than it is itself. Copied as the audit's windows are: whole, or not at all.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from factory.audit.keeping import POLL_SECONDS, copy_checkpoint
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
    keeper = LadderKeeper(
        Path(row.folder) / "checkpoints", ladder_of(workspace, row.id), row.recipe_json["checkpoint_every"]
    )
    keeper.start()
    try:
        yield
    finally:
        keeper.over.set()
        keeper.join()


class LadderKeeper(threading.Thread):
    """Copies each checkpoint when it is there, and removes the rungs that are no longer wanted."""

    def __init__(self, source: Path, target: Path, every: int) -> None:
        super().__init__(daemon=True)
        self.over, self.source, self.target, self.every = threading.Event(), source, target, every

    def run(self) -> None:
        for left in self.target.glob(".*"):  # of one that was killed
            remove(left)
        while not self.over.wait(POLL_SECONDS):
            self.look()
        self.look()

    def look(self) -> None:
        held = {step for step, _ in steps_in(self.target)}
        there = {step for step, _ in steps_in(self.source)}
        wanted = rungs(held | there, self.every)
        for step in wanted:
            if step not in held:
                try:
                    copy_checkpoint(self.source / name_of(step), self.target / name_of(step))
                except (OSError, ValueError):
                    continue  # removed again, not whole, or the disk is full: a ladder with a rung less
        for step in held - set(wanted):
            with suppress(OSError):
                aside = self.target / f".{name_of(step)}"  # half a rung bears no name of one
                os.rename(self.target / name_of(step), aside)
                remove(aside)
