"""A plant with two ingested shards, a trunk and an anneal. It is made once, and each test gets a copy in a folder of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from factory.backups.backups import make_or_open_ledger
from factory.git.repository import get_live_commit
from factory.ingest.inbox import ingest_and_move
from factory.ledger.plant import Plant
from factory.training.exporting import export_candidate
from tests.support.plants.kept import kept
from tests.support.plants.trained_plant import (
    close,
    lenient_workspace,
    train_anneal,
    train_trunk,
    write_shards,
)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory, code_repository: Path) -> Path:
    def make(folder: Path) -> None:
        workspace = lenient_workspace(folder, code_repository)
        ledger = make_or_open_ledger(workspace)
        write_shards(workspace.inbox)
        for path in sorted(workspace.inbox.iterdir()):
            ingest_and_move(Plant(workspace, ledger), path)
        train_trunk(workspace, ledger)
        export_candidate(Plant(workspace, ledger), train_anneal(workspace, ledger))
        close(workspace, ledger)

    folder = tmp_path_factory.mktemp("saved") / "plant"
    kept(("exported", get_live_commit(code_repository)), folder, make, {"code": code_repository})
    return folder
