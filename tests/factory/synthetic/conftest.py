"""A plant with two ingested shards and a release that was trained on them, made once; each test gets a copy in a folder of another name."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from factory.core.workspace import Workspace
from factory.ledger.ledger import Ledger, record, releases, verdicts
from factory.ledger.rows import Subject
from factory.training.exporting import export_candidate
from tests.support.plants.trained_plant import fill, lenient_plant, train_anneal

Copy = Callable[[], tuple[Workspace, Ledger]]


def release(workspace: Workspace, ledger: Ledger) -> int:
    """Anneal, export, and the rows that gate and saga leave: the champion from now on."""
    candidate = export_candidate(workspace, ledger, train_anneal(workspace, ledger))
    with ledger.begin() as tx:
        judged = {"gate": "release", "subject": f"candidate:{candidate}", "outcome": "promote", "policy_sha256": "p"}
        row = tx.execute(
            verdicts.insert().values(**judged, subject_sha256="e", reasons=["better"], evidence={}, created_at=0.0)
        )
        assert row.inserted_primary_key
        made = {"number": candidate, "candidate": candidate, "verdict": row.inserted_primary_key[0]}
        tx.execute(releases.insert().values(**made, state="published", created_at=time.time()))
        record(tx, "promoted", Subject("release", candidate))
    return candidate


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory, code_repository: Path) -> Path:
    workspace = lenient_plant(tmp_path_factory.mktemp("saved"), code_repository)
    ledger = fill(workspace)
    release(workspace, ledger)
    ledger.engine.dispose()
    return workspace.root


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Copy:
    def copy() -> tuple[Workspace, Ledger]:
        root = tmp_path / "elsewhere"
        shutil.copytree(saved, root, symlinks=True)
        workspace = Workspace.open(root)
        return workspace, Ledger.open(workspace.ledger_url, workspace.root)

    return copy
