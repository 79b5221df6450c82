"""Candidates of segments that older code trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from factory.training.exporting import export_candidate
from tests.support.factory.trained_plant import make_plant, train_anneal
from tests.support.git import git


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
    export_candidate(workspace, ledger, number)
    export = workspace.exports / f"segment-{number:05d}"
    assert json.loads((export / "config.json").read_text())["made_by"] == "old"
    assert (export / "model.safetensors").is_file() and (export / "tokenizer.json").is_file()
