"""Makes a candidate from a segment's last checkpoint: an export in the format of transformers, and a row in the ledger."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from factory.core.errors import SegmentError
from factory.core.exports import hash_export_folder
from factory.core.path_removal import remove_path
from factory.core.progress import SILENT
from factory.ledger.ledger import candidates, record_event
from factory.ledger.plant import Plant
from factory.ledger.rows import CandidateRow, SegmentRow, Subject
from factory.ledger.writing import find_next_key, insert_row
from factory.runs.live_code import LiveCode
from factory.runs.trainer_folder import remove_links_and_pipes
from factory.training.planning import read_last_checkpoint
from kernels.contract.files import sync_folder, sync_tree


def export_candidate(plant: Plant, segment: int) -> int:
    """Export a segment's last checkpoint in the format of transformers and record the candidate; returns its id. Idempotent."""
    known = CandidateRow.find_first(plant.ledger, "WHERE segment = :segment", segment=segment)
    if known:
        return known.id
    from factory.evals.export_parity import compute_expected_export

    row = SegmentRow.get(plant.ledger, segment)
    checkpoint = read_last_checkpoint(plant.ledger, segment)
    target, aside = (plant.workspace.exports / f"{name}-{segment:05d}" for name in ("segment", ".writing"))
    if not target.exists():
        write_export(plant, row, aside)
        os.rename(aside, target)
    sync_folder(target.parent)  # also when a killed process made the export
    made = compute_expected_export(
        Path(checkpoint["path"]), row.recipe_json
    )  # this process reads the checkpoint; the exporting code is not trusted
    with plant.ledger.begin() as tx:
        values = {
            "checkpoint": checkpoint["id"],
            "export_path": plant.ledger.to_stored_path(target),
            "created_at": time.time(),
        }
        values |= {"id": find_next_key(tx, candidates), "segment": segment, "export_sha256": hash_export_folder(target)}
        number = insert_row(tx, candidates, **values)
        record_event(tx, "candidate", Subject("candidate", number), {"segment": segment, "made": made.to_json()})
    return number


def write_export(plant: Plant, row: SegmentRow, folder: Path, original_defaults: bool = False) -> None:
    """Write a segment's last checkpoint in the format of transformers to a new ``folder``, and flush it.

    Chat template and sampling defaults are those of this factory. ``original_defaults``: those of the segment's code and tokenizer, to make an
    older export again. Raises: SegmentError.
    """
    from factory.ingest.tokenizer import Tokenizer
    from trainer.contract.checkpoint.export import make_generation_config

    checkpoint = read_last_checkpoint(plant.ledger, row.id)
    remove_path(folder)
    folder.mkdir()
    code = LiveCode.check_out_commit(plant.with_progress(SILENT), row.code_commit)
    arguments = ["trainer.contract.checkpoint.export", checkpoint["path"], str(folder)]
    done = code.run_python("-m", *arguments, writable=[folder], readonly=[Path(checkpoint["path"])])
    remove_links_and_pipes(folder, SILENT)
    if done.returncode:
        raise SegmentError(
            "training.export_failed", "The export of {checkpoint} failed: {error}",
            checkpoint=checkpoint["path"], error=(done.stderr.strip().splitlines() or ["no message"])[-1],
        )  # fmt: skip
    if not original_defaults:
        (folder / "generation_config.json").write_text(json.dumps(make_generation_config(), indent=2) + "\n")
    Tokenizer.load(plant.workspace.tokenizer).copy_to(folder, original_defaults)
    sync_tree(folder)  # before the ledger names it
