"""From a segment's last checkpoint to a candidate: the export in transformers' format, and its row."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from factory.core.errors import SegmentError
from factory.core.exports import folder_sha256
from factory.core.progress import SILENT
from factory.core.removal import remove
from factory.ledger.ledger import candidates, record
from factory.ledger.plant import Plant
from factory.ledger.rows import CandidateRow, SegmentRow, Subject
from factory.ledger.writing import insert, next_key
from factory.runs.folders import clear
from factory.runs.live_code import LiveCode
from factory.training.planning import last_checkpoint
from kernels.contract.files import sync_folder, sync_tree


def export_candidate(plant: Plant, segment: int) -> int:
    """Turn a segment's last checkpoint into an HF-format export and a candidate row; returns the candidate's id. Idempotent."""
    known = CandidateRow.first(plant.ledger, "WHERE segment = :segment", segment=segment)
    if known:
        return known.id
    from factory.evals.export_parity import made_from

    row = SegmentRow.get(plant.ledger, segment)
    checkpoint = last_checkpoint(plant.ledger, segment)
    target, aside = (plant.workspace.exports / f"{name}-{segment:05d}" for name in ("segment", ".writing"))
    if not target.exists():
        make_export(plant, row, aside)
        os.rename(aside, target)
    sync_folder(target.parent)  # also of one that a killed process made
    made = made_from(Path(checkpoint["path"]), row.recipe_json)  # by this process, not by the code that exported it
    with plant.ledger.begin() as tx:
        values = {"checkpoint": checkpoint["id"], "export_path": plant.ledger.inside(target), "created_at": time.time()}
        values |= {"id": next_key(tx, candidates), "segment": segment, "export_sha256": folder_sha256(target)}
        number = insert(tx, candidates, **values)
        record(tx, "candidate", Subject("candidate", number), {"segment": segment, "made": made.to_json()})
    return number


def make_export(plant: Plant, row: SegmentRow, folder: Path, as_it_was: bool = False) -> None:
    """Write a segment's last checkpoint in transformers' format to ``folder``, which is made anew, and flush it.

    Chat template and sampling defaults are this factory's. ``as_it_was``: those of the code and tokenizer that it comes from, for an
    older export that is made again. Raises: SegmentError.
    """
    from factory.ingest.tokenizer import Tokenizer
    from trainer.contract.checkpoint.export import generation_config

    checkpoint = last_checkpoint(plant.ledger, row.id)
    remove(folder)
    folder.mkdir()
    code = LiveCode.of(plant.reporting_to(SILENT), row.code_commit)
    words = ["trainer.contract.checkpoint.export", checkpoint["path"], str(folder)]
    done = code.run("-m", *words, writable=[folder], readonly=[Path(checkpoint["path"])])
    clear(folder, SILENT)
    if done.returncode:
        raise SegmentError(
            f"the export of {checkpoint['path']} failed: {done.stderr.strip().splitlines()[-1:] or 'no message'}"
        )
    Tokenizer.load(plant.workspace.tokenizer).copy_to(folder, as_it_was)
    if not as_it_was:
        (folder / "generation_config.json").write_text(json.dumps(generation_config(), indent=2) + "\n")
    sync_tree(folder)  # the ledger is about to name it
