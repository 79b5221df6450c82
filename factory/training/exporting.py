"""From a segment's last checkpoint to a candidate: the export in transformers' format, and its row."""

from __future__ import annotations

import os
import time
from pathlib import Path

import sqlalchemy as sa

from factory.core.errors import SegmentError
from factory.core.exports import folder_sha256
from factory.core.workspace import Workspace
from factory.ledger.ledger import Ledger, candidates, record, segments
from factory.training.planning import last_checkpoint
from factory.training.segment_folder import run_tool


# -- export ------------------------------------------------------------------------------------------------------------
def export_candidate(workspace: Workspace, ledger: Ledger, segment: int) -> int:
    """Turn a segment's last checkpoint into an HF-format export and a candidate row; returns the candidate's id. Idempotent."""
    from factory.git.repository import checkout_live
    from factory.ingest.tokenizer import Tokenizer

    known = ledger.one(sa.select(candidates.c.id).where(candidates.c.segment == segment))
    if known:
        return int(known["id"])
    row = ledger.one(sa.select(segments).where(segments.c.id == segment))
    checkpoint = last_checkpoint(ledger, segment)
    assert row is not None, segment
    target, aside = workspace.exports / f"segment-{segment:05d}", workspace.exports / f".writing-{segment:05d}"
    if not target.exists():
        _remove(aside)
        code = checkout_live(workspace, row["code_commit"])
        done = run_tool(code, "-m", "trainer.contract.checkpoint.export", checkpoint["path"], str(aside))
        if done.returncode:
            raise SegmentError(f"the export of {checkpoint['path']} failed: {done.stderr.strip().splitlines()[-1:]}")
        Tokenizer.load(workspace.tokenizer).copy_to(aside)
        os.rename(aside, target)
    with ledger.begin() as tx:
        number = (tx.execute(sa.select(sa.func.max(candidates.c.id))).scalar() or 0) + 1
        tx.execute(
            candidates.insert().values(
                id=number,
                segment=segment,
                checkpoint=checkpoint["id"],
                export_path=str(target),
                export_sha256=folder_sha256(target),
                created_at=time.time(),
            )
        )
        record(tx, "candidate", f"candidate:{number}", {"segment": segment})
    return int(number)


def _remove(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)
