"""``--traces``: what the training left: metrics of every segment, and the checkpoints that are kept of it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from factory.core.left_files import DEPTH, open_file
from factory.ledger.ledger import Ledger
from factory.ledger.rows import SegmentRow

LEFT = ("metrics.jsonl", "anomalies.jsonl")  # by the trainer, in a segment's folder


def copy_traces(root: Path, ledger: Ledger, segment: int, place: Path) -> None:
    """Into ``place``, a folder a segment; what is no longer kept is left out. No link is followed: a trainer wrote these folders.

    Raises: OSError.
    """
    for row in SegmentRow.lineage(ledger, segment):
        target = place / f"segment-{row.id:05d}"
        target.mkdir(parents=True)
        for name in LEFT:
            if (root / row.folder / name).is_file():
                _copy_file(root / row.folder / name, target / name)
        sql = "SELECT step, path FROM checkpoints WHERE segment = :segment ORDER BY step"
        for one in ledger.read(sql, segment=row.id):
            if one["path"] and (root / one["path"]).is_dir():
                _copy_folder(root / one["path"], target / f"checkpoint-{one['step']:09d}", 0)


def _copy_folder(source: Path, target: Path, depth: int) -> None:
    if depth > DEPTH:
        return
    target.mkdir()
    with os.scandir(source) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                _copy_folder(Path(entry.path), target / entry.name, depth + 1)
            elif entry.is_file(follow_symlinks=False):
                _copy_file(Path(entry.path), target / entry.name)


def _copy_file(source: Path, target: Path) -> None:
    with open_file(source) as inside, open(target, "xb") as out:
        shutil.copyfileobj(inside, out, 1 << 22)
