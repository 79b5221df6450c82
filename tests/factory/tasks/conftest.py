"""One plant with a trained export for all tests of tasks; each test gets task files of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from factory.core.workspace import Workspace
from factory.ledger.ledger import Ledger
from tests.support.factory.exports import FilledPlant, build_plant, save_export, tiny_model, trained

CONTEXT = 256


@pytest.fixture(scope="module")
def plant(tmp_path_factory: pytest.TempPathFactory) -> FilledPlant:
    workspace = Workspace.create(tmp_path_factory.mktemp("plant") / "workspace")
    return build_plant(workspace, Ledger.create(workspace.ledger_url))


@pytest.fixture(scope="module")
def export(plant: FilledPlant, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = trained(tiny_model(seed=1, max_position_embeddings=CONTEXT), plant.shard, 40)
    return save_export(model, tmp_path_factory.mktemp("exports") / "one", plant.tokenizer)
