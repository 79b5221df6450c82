"""A plant with two ingested shards, a trunk and an anneal, made once; each test gets a copy, in a folder of another name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from factory.backups.backups import make_ledger
from factory.core.workspace import Workspace
from factory.ingest.inbox import ingest_arrived
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.training.exporting import export_candidate
from tests.support.plants.trained_plant import (
    lenient_plant,
    train_anneal,
    train_trunk,
    write_shards,
)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory, code_repository: Path) -> Path:
    workspace = lenient_plant(tmp_path_factory.mktemp("saved"), code_repository)
    ledger = make_ledger(workspace)
    write_shards(workspace.inbox)
    for path in sorted(workspace.inbox.iterdir()):
        ingest_arrived(Plant(workspace, ledger), path)
    train_trunk(workspace, ledger)
    export_candidate(Plant(workspace, ledger), train_anneal(workspace, ledger))
    return workspace.root


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Callable[[], tuple[Workspace, Ledger]]:
    def copy() -> tuple[Workspace, Ledger]:
        root = tmp_path / "elsewhere"
        shutil.copytree(saved, root, symlinks=True)
        workspace = Workspace.open(root)
        return workspace, Ledger.open(workspace.ledger_url, workspace.root)

    return copy
