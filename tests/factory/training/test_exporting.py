"""Candidates of segments that older code trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from factory.ledger.plant import Plant
from factory.training.exporting import export_candidate
from tests.support.git import git
from tests.support.plants.trained_plant import make_plant, train_anneal


def test_an_anneal_of_code_from_before_contract_is_exported_by_its_own_exporter(
    tmp_path: Path, code_repository: Path
) -> None:
    code = tmp_path / "code"
    shutil.copytree(code_repository, code, symlinks=True)
    git(code, "mv", "trainer/contract/checkpoint/export.py", "trainer/export.py")
    old = code / "trainer" / "export.py"
    old.write_text(old.read_text().replace('"architectures": [', '"made_by": "old", "architectures": ['))
    git(code, "commit", "--quiet", "--all", "-m", "as it was before trainer/contract")
    workspace, ledger = make_plant(tmp_path, code)
    number = train_anneal(workspace, ledger)
    git(code, "revert", "--no-edit", "HEAD")  # the factory was upgraded before the export
    export_candidate(Plant(workspace, ledger), number)
    export = workspace.exports / f"segment-{number:05d}"
    assert json.loads((export / "config.json").read_text())["made_by"] == "old"
    assert (export / "model.safetensors").is_file() and (export / "tokenizer.json").is_file()


@pytest.mark.slow("a small factory trains")
def test_a_file_of_the_exporters_older_name_is_not_the_exporter(tmp_path: Path, code_repository: Path) -> None:
    """Agents may patch trainer/export.py, and may not patch trainer/contract."""
    code = tmp_path / "code"
    shutil.copytree(code_repository, code, symlinks=True)
    ours = (code / "trainer" / "contract" / "checkpoint" / "export.py").read_text()
    for name in ("export", "average"):
        (code / "trainer" / f"{name}.py").write_text(
            ours.replace('"architectures": [', '"made_by": "a patch", "architectures": [')
        )
    git(code, "add", "-A")
    git(code, "commit", "--quiet", "-m", "a merged patch")
    workspace, ledger = make_plant(tmp_path, code)
    number = train_anneal(workspace, ledger)
    export_candidate(Plant(workspace, ledger), number)
    export = workspace.exports / f"segment-{number:05d}"
    assert "made_by" not in json.loads((export / "config.json").read_text())
