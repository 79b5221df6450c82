"""A workspace that was moved to another folder: its releases are listed and bundled, and MLflow opens what a version links to."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlparse

from factory.bundles.files import layout
from factory.core.workspace import Workspace
from factory.ledger.ledger import Ledger
from factory.ledger.rows import champion
from factory.show.mlflow.registry import MODEL
from factory.show.mlflow.store import open_client
from tests.support.factory.command import command_here
from tests.support.factory.exports import FilledPlant
from tests.support.paths import ROOT
from tests.support.plants.release_scene import with_store

PUBLISH = """
import sys
from pathlib import Path
from factory.core.workspace import Workspace
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.show.catching_up import catch_up
workspace = Workspace.open(Path(sys.argv[1]))
catch_up(Plant(workspace, Ledger.open(workspace.ledger_url)))
"""


def test_releases_of_a_moved_workspace(released: FilledPlant, tmp_path: Path) -> None:
    first = Workspace.open(Path(shutil.copytree(released.workspace.root, tmp_path / "first", symlinks=True)))
    with_store(first)
    # In a process of its own: MLflow's client remembers, as long as it lives, where a run's artifacts were.
    subprocess.run([sys.executable, "-c", PUBLISH, str(first.root)], cwd=ROOT, check=True)
    moved = Workspace.open(first.root.rename(tmp_path / "elsewhere"))

    listed = command_here("releases", "list", home=moved)
    assert listed.exit_code == 0, listed.exception
    assert "release 1" in listed.output and "release 2" in listed.output and "champion" in listed.output

    out = tmp_path / "out"
    bundled = command_here("release", "--bundle", "2", "--out", str(out), home=moved)
    assert bundled.exit_code == 0, bundled.exception
    assert (out / layout.CARD).is_file()

    client = open_client(moved)
    version = client.get_model_version_by_alias(MODEL, "champion")
    run = version.run_id
    names = {file.path for file in client.list_artifacts(run)} | {
        file.path for file in client.list_artifacts(run, "model")
    }
    assert {"report.html", "model/MLmodel", "samples.json"} <= names
    report = Path(client.download_artifacts(run, "report.html", str(tmp_path)))
    assert "Release 2" in report.read_text() and client.download_artifacts(run, "model/MLmodel", str(tmp_path))
    assert (
        Path(unquote(urlparse(version.source).path)) == moved.mlflow_artifacts / "candidates" / run / "artifacts/model"
    )
    row = champion(Ledger.open(moved.ledger_url))
    assert row and Path(row.export_path).is_relative_to(moved.root)
    assert not list(first.root.rglob("*"))
