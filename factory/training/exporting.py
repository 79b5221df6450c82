"""From a segment's last checkpoint to a candidate: the export in transformers' format, and its row."""

from __future__ import annotations

import os
import time
from pathlib import Path

from factory.core.errors import SegmentError
from factory.core.exports import folder_sha256
from factory.core.progress import SILENT
from factory.core.removal import remove
from factory.core.workspace import Workspace
from factory.ledger.ledger import Ledger, candidates, record
from factory.ledger.rows import CandidateRow, SegmentRow, Subject
from factory.ledger.writing import insert, next_key
from factory.training.live_code import LiveCode
from factory.training.planning import last_checkpoint
from factory.training.segment_folder import EXPORT, clear, name_in


def export_candidate(workspace: Workspace, ledger: Ledger, segment: int) -> int:
    """Turn a segment's last checkpoint into an HF-format export and a candidate row; returns the candidate's id. Idempotent."""
    from factory.ingest.tokenizer import Tokenizer

    known = CandidateRow.first(ledger, "WHERE segment = :segment", segment=segment)
    if known:
        return known.id
    row = SegmentRow.get(ledger, segment)
    checkpoint = last_checkpoint(ledger, segment)
    target, aside = workspace.exports / f"segment-{segment:05d}", workspace.exports / f".writing-{segment:05d}"
    if not target.exists():
        remove(aside)
        aside.mkdir()
        code = LiveCode.of(workspace, ledger, row.code_commit, SILENT)
        words = [name_in(code, EXPORT), checkpoint["path"], str(aside)]
        done = code.run("-m", *words, writable=[aside], readonly=[Path(checkpoint["path"])])
        clear(aside, SILENT)
        if done.returncode:
            raise SegmentError(
                f"the export of {checkpoint['path']} failed: {done.stderr.strip().splitlines()[-1:] or 'no message'}"
            )
        Tokenizer.load(workspace.tokenizer).copy_to(aside)
        os.rename(aside, target)
    with ledger.begin() as tx:
        number = insert(
            tx,
            candidates,
            id=next_key(tx, candidates),
            segment=segment,
            checkpoint=checkpoint["id"],
            export_path=str(target),
            export_sha256=folder_sha256(target),
            created_at=time.time(),
        )
        record(tx, "candidate", Subject("candidate", number), {"segment": segment})
    return number
