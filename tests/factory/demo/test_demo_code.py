"""The demo's own copy of the code is complete and clean, and starts with plain kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from factory.core.errors import FactoryError
from factory.core.workspace import Workspace, WorkspaceConfig, find_checkout_root
from factory.demo.demo import use_plain_kernels
from factory.git.repository import fork_repository, get_live_commit, list_changed_files

PATH = "policies/kernels.yaml"


def test_a_fork_is_a_separate_repository_with_one_file_edited(tmp_path: Path) -> None:
    workspace = Workspace.create(tmp_path / "w", WorkspaceConfig(repository="code"))
    before = get_live_commit(find_checkout_root())
    fork_repository(find_checkout_root(), workspace.repository, {PATH: use_plain_kernels}, "plain")
    assert workspace.repository == workspace.root / "code"
    assert get_live_commit(workspace.repository) != before == get_live_commit(find_checkout_root())
    assert list_changed_files(workspace.repository) == []
    held = yaml.safe_load((workspace.repository / PATH).read_text())
    chosen = {op: implementation for choice in held.values() for op, implementation in choice.items()}
    assert {implementation for op, implementation in chosen.items() if op != "adamw"} == {"reference"}
    assert chosen["adamw"] == "fused", "no op of the profile: nothing would find it"
    assert "#" in (workspace.repository / PATH).read_text()  # comments stay
    assert not list(workspace.root.glob(".code*")) and not (workspace.repository / ".git" / "hooks").exists()


def test_a_folder_without_a_repository_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    with pytest.raises(FactoryError, match="not a git checkout"):
        fork_repository(tmp_path / "source", tmp_path / "target", {PATH: use_plain_kernels}, "plain")
    assert not (tmp_path / "target").exists()


def test_use_plain_kernels_changes_only_the_choices() -> None:
    text = "# about\ncpu:\n  rms_norm: compiled  \n  attention: reference\ncuda:\n  rms_norm: triton\n"
    assert yaml.safe_load(use_plain_kernels(text)) == {
        "cpu": {"rms_norm": "reference", "attention": "reference"},
        "cuda": {"rms_norm": "reference"},
    }
