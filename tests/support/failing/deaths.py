"""Trainers that die, hang or eat all memory at a step that is counted; and rows of segments without any trainer."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from textwrap import indent
from typing import Any

from factory.ledger.ledger import Ledger, data_plans, segments
from factory.ledger.rows import SegmentRow
from factory.ledger.writing import insert_row
from factory.training.segment_folder import write_folder_owner
from tests.support.plants.trained_plant import commit_edit

STEP = "        recipe, spec = self.recipe, self.spec\n        lr ="
# ``fault-KIND-STEP`` in the segment's folder strikes once, ``always-KIND-STEP`` each time.
STRIKES = """\
import os, time
from trainer.contract import stopping
if self.writer is not None:
    for mark in sorted(self.writer.parent.parent.glob("*-*-" + str(batch.step))):
        when, kind, _ = mark.name.split("-")
        if when == "fault":
            mark.unlink()
        if when in ("fault", "always"):
            self.writer.wait_for_last_save()
            if kind == "kill":
                os.kill(os.getpid(), 9)
            if kind == "segv":
                os.kill(os.getpid(), 11)
            if kind == "full":
                raise OSError(28, os.strerror(28))
            if kind == "raise":
                raise RuntimeError("the weather is bad")
            if kind == "memory":
                hoard = [bytearray(os.urandom(1 << 20) * 16) for _ in range(100000)]
            while kind == "linger" and mark.exists() and not stopping.is_stop_requested():
                mark.with_name("lingers").touch()
                time.sleep(0.02)
            if kind == "hang":
                time.sleep(100000)
"""
numbers = itertools.count(1)


def make_mortal(code: Path) -> None:
    """Commit code whose training step does what marks in the segment's folder say."""
    commit_edit(code, "trainer/run.py", STEP, indent(STRIKES, "        ") + STEP)


def strike(ledger: Ledger, segment: int, *marks: str) -> Path:
    """Put marks into a planned segment's folder, which it returns."""
    row = SegmentRow.get(ledger, segment)
    folder = Path(row.folder)
    write_folder_owner(ledger, row)
    for mark in marks:
        (folder / mark).touch()
    return folder


def plan_row(ledger: Ledger, **columns: Any) -> SegmentRow:
    """A segment's row, without data, code or folder."""
    values: dict[str, Any] = {
        "kind": "trunk", "parent": None, "generation": 1, "recipe": "r", "recipe_json": {}, "recipe_sha256": "r", "data_plan": "p",
        "code_commit": "c", "first_step": 0, "last_step": 100, "state": "planned", "folder": "f", "created_at": float(next(numbers)),
    }  # fmt: skip
    with ledger.begin() as tx:
        if not ledger.read("SELECT id FROM data_plans WHERE id = 'p'"):
            tx.execute(data_plans.insert().values(id="p", plan=json.loads("{}"), created_at=0.0))
        number = insert_row(tx, segments, **(values | columns))
    return SegmentRow.get(ledger, number)


def deaths(ledger: Ledger, segment: int) -> list[dict[str, object]]:
    """What was recorded of each, the oldest first; the one that parked the segment is not among them."""
    rows = ledger.read(
        "SELECT detail FROM events WHERE kind = 'segment_stumbled' AND subject = :s ORDER BY id", s=f"segment:{segment}"
    )
    return [row["detail"] for row in rows]
