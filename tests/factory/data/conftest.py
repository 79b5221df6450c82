"""A plant with two ingested shards, two trunk segments and a released anneal, made once; each test gets a copy in a folder of another name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from factory.backups.backups import make_or_open_ledger
from factory.git.repository import get_live_commit
from factory.ingest.inbox import ingest_and_move
from factory.ledger.plant import Plant
from tests.support.plants.kept import kept
from tests.support.plants.released import release_of
from tests.support.plants.trained_plant import close, lenient_workspace, train_anneal, train_trunk, write_shards


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory, code_repository: Path) -> Path:
    """All documents have the licence MIT, except those of code, which have none. Checkpoints are five steps apart."""

    def make(folder: Path) -> None:
        workspace = lenient_workspace(folder, code_repository, checkpoint_every=5, keep_checkpoints=9)
        ledger = make_or_open_ledger(workspace)
        write_shards(workspace.inbox)
        for path in sorted(workspace.inbox.iterdir()):
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            path.write_text("".join(json.dumps(row | licence(row)) + "\n" for row in rows))
            ingest_and_move(Plant(workspace, ledger), path)
        train_trunk(workspace, ledger, 10)
        train_trunk(workspace, ledger, 10)
        release_of(ledger, train_anneal(workspace, ledger))
        close(workspace, ledger)

    folder = tmp_path_factory.mktemp("saved") / "plant"
    kept(("licensed", get_live_commit(code_repository)), folder, make, {"code": code_repository})
    return folder


def licence(row: dict[str, str]) -> dict[str, str]:
    return {} if row["domain"] == "code" else {"license": "MIT"}
