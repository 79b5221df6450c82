"""MLflow's own loaders load a released version from a real store. It writes the same text as our engine."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import httpx
import mlflow
import pytest
import torch

from factory.core.exports import hash_export_folder
from factory.core.workspace import Workspace
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.ledger.rows import find_champion
from factory.serving.native.server import NativeEngine, make_application
from tests.support.factory.shown import reconcile
from tests.support.messages import codes
from tests.support.mlflow_server import mlflow_server
from tests.support.plants.release_scene import with_store
from tests.support.serving.served import PROMPT, add_release, make_export

MODEL_URI, COUNT = "models:/factory-lm@champion", 24


def engine_says(export: Path) -> str:
    async def ask() -> str:
        transport = httpx.ASGITransport(make_application(NativeEngine(export, torch.device("cpu"))))
        async with httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=None) as client:
            asked = {"model": "factory-lm", "prompt": PROMPT, "max_tokens": COUNT}
            answer = await client.post("/v1/completions", json=asked)
        return str(answer.json()["choices"][0]["text"])

    return asyncio.run(ask())


@pytest.fixture
def released(workspace: Workspace, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    add_release(workspace, ledger, make_export(workspace.exports / "segment-00001", 1))
    reconcile(Plant(with_store(workspace), ledger))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return workspace


def loaded(workspace: Workspace) -> tuple[str, str]:
    """The texts that the champion writes, loaded by MLflow's two loaders."""
    mlflow.set_tracking_uri(workspace.mlflow_uri)
    (predicted,) = mlflow.pyfunc.load_model(MODEL_URI).predict([PROMPT], params={"max_new_tokens": COUNT})
    pipeline = mlflow.transformers.load_model(MODEL_URI)
    (found,) = pipeline(PROMPT, max_new_tokens=COUNT, return_full_text=False)
    return predicted, found["generated_text"]


def test_the_champion_loaded_by_mlflow_writes_the_same_text_as_the_engine(
    released: Workspace, ledger: Ledger, tmp_path: Path
) -> None:
    row = find_champion(ledger)
    assert row is not None
    export = Path(row.export_path)
    said = engine_says(export)
    assert len(said.strip()) > 10
    assert loaded(released) == (said.strip(), said)  # pyfunc strips
    assert hash_export_folder(export) == row.export_sha256
    weights = {path.stat().st_size for path in export.glob("*.safetensors")}
    assert not [path for path in released.mlflow_artifacts.rglob("*") if path.stat().st_size in weights], "a copy"

    # A copy of the workspace loads its own weights.
    copy = Path(shutil.copytree(released.root, tmp_path / "copy", symlinks=True))
    shutil.rmtree(released.root)
    moved = Workspace.open(copy)
    assert reconcile(Plant(moved, Ledger.open(moved.ledger_url))) == []
    assert loaded(moved) == (said.strip(), said)


@pytest.mark.long("starts MLflow's server, which loads for half a minute on a busy machine")
def test_an_mlflow_server_with_its_own_artifact_store_gets_the_export_and_returns_it(
    workspace: Workspace, ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    export = make_export(workspace.exports / "segment-00001", 1)
    add_release(workspace, ledger, export)
    said = engine_says(export)
    with mlflow_server(tmp_path / "server") as address:
        at_server = replace(workspace, config=replace(workspace.config, mlflow_uri=address))
        assert "releases.published_again" in codes(reconcile(Plant(at_server, ledger)))
        assert reconcile(Plant(at_server, ledger)) == []
        shutil.rmtree(export)  # only the server's copy is left to load
        assert loaded(at_server) == (said.strip(), said)
