"""The tokenizer's files: what is wrong with them, and where a copy is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import sqlalchemy as sa

from factory.core.removal import remove
from factory.ingest.tokenizer import FILES
from factory.ledger.journal import backups_of
from factory.ledger.ledger import record, tokenizers
from factory.ledger.plant import Plant
from factory.training.segment_folder import set_aside
from kernels.contract.files import put_in_place
from trainer.contract.data.token_shard import file_sha256

NAMED = "tokenizer.json"  # the file whose hash the ledger has


def tokenizer_fault(plant: Plant) -> str:
    """What is wrong with the tokenizer that the ledger recorded, or nothing; none is recorded before the first ingest."""
    recorded = plant.ledger.one(sa.select(tokenizers))
    return _fault(plant.workspace.tokenizer, recorded["sha256"]) if recorded else ""


def bring_back_tokenizer(plant: Plant) -> str:
    """Copy the recorded tokenizer from a backup or an export; returns why it cannot be, or nothing. What is damaged is set aside."""
    recorded = plant.ledger.one(sa.select(tokenizers))
    assert recorded
    exports = sorted(plant.workspace.exports.glob("segment-*"), reverse=True)
    kept = [*(path / "tokenizer" for path in reversed(backups_of(plant.workspace.root))), *exports]
    good = next((path for path in kept if not _fault(path, recorded["sha256"])), None)
    if good is None:
        return f"no backup and no export holds it: put its files into {plant.workspace.tokenizer} again"
    aside = plant.workspace.root / f".{plant.workspace.tokenizer.name}.writing"
    remove(aside)
    aside.mkdir()
    for name in FILES:
        shutil.copyfile(good / name, aside / name)
    if plant.workspace.tokenizer.exists():
        set_aside(plant.workspace.root, plant.workspace.tokenizer)
    put_in_place(aside, plant.workspace.tokenizer)
    with plant.ledger.begin() as tx:
        record(tx, "tokenizer_restored", "tokenizer", {"from": plant.ledger.inside(good)})
    return ""


def _fault(folder: Path, sha256: str) -> str:
    for name in FILES:
        path = folder / name
        try:
            if name == NAMED and file_sha256(path) != sha256:
                return f"{path} is not the recorded one: its SHA-256 is another"
            if path.suffix == ".json" and name != NAMED:
                json.loads(path.read_bytes())
            elif not path.read_bytes():
                return f"{path} is empty"
        except OSError as error:
            return f"{path}: {error.strerror}"
        except ValueError as error:
            return f"{path} is damaged: {error}"
    return ""
