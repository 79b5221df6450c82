"""A workspace is created, opened and locked, and a folder that is not a workspace is never overwritten."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from factory.core.errors import ConfigError, WorkspaceError
from factory.core.file_lock import LockedError, hold_file_lock
from factory.core.workspace import FOLDERS, Workspace, WorkspaceConfig
from tests.support.messages import refused


def test_a_created_workspace_can_be_opened(tmp_path: Path) -> None:
    made = Workspace.create(tmp_path / "w", WorkspaceConfig(recipe="tiny", find_rate=False))
    assert Workspace.open(tmp_path / "w") == made and made.config.find_rate is False
    assert all((made.root / folder).is_dir() for folder in FOLDERS)
    assert Workspace.create(tmp_path / "w", WorkspaceConfig(recipe="other")).config.recipe == "tiny", (
        "an existing workspace is never overwritten"
    )


@pytest.mark.parametrize(
    "text", ["recipe: [1]\n", "- a\n", "recipe: {\n", "recipe: !!python/object/apply:os.system ['true']\n"]
)
def test_a_wrong_configuration_is_an_error_that_names_the_file(tmp_path: Path, text: str) -> None:
    workspace = Workspace.create(tmp_path / "w")
    (workspace.root / "factory.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"factory\.yaml"):
        Workspace.open(workspace.root)


def test_a_folder_with_other_files_is_left_unchanged(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with refused("workspace.not_empty", WorkspaceError, folder=tmp_path):
        Workspace.create(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_lock_holds_between_processes_and_ends_with_its_process(tmp_path: Path) -> None:
    workspace = Workspace.create(tmp_path / "w")
    code = f"""
import sys, time
from pathlib import Path
from factory.core.workspace import Workspace
with Workspace.open(Path({str(workspace.root)!r})).hold_lock("model-loop"):
    print("held", flush=True); time.sleep(60)
"""
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert holder.stdout and holder.stdout.readline() == "held\n"
    try:
        with refused("workspace.in_use", WorkspaceError, process=str(holder.pid)), workspace.hold_lock("model-loop"):
            pass
        with workspace.hold_lock("code-loop"):
            pass
    finally:
        holder.kill()
        holder.wait()
    with workspace.hold_lock("model-loop"):
        pass


def test_a_child_process_does_not_inherit_a_lock(tmp_path: Path) -> None:
    """A child that gets the descriptor holds the lock until it ends."""
    path = tmp_path / "x.lock"
    sleep = [sys.executable, "-c", "print(flush=True); input()"]
    start = lambda fds: subprocess.Popen(sleep, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=fds)
    with hold_file_lock(path) as descriptor:
        children = [start(()), start((descriptor,))]
        assert all(child.stdout and child.stdout.readline() for child in children)
    try:
        with pytest.raises(LockedError, match=str(os.getpid())), hold_file_lock(path):
            pass
        children[1].communicate(b"\n")
        with hold_file_lock(path):
            assert children[0].poll() is None
    finally:
        for child in children:
            child.kill()
            child.wait()


def test_a_workspace_without_its_configuration_is_not_overwritten(tmp_path: Path) -> None:
    workspace = Workspace.create(tmp_path / "w")
    (workspace.root / "factory.yaml").unlink()
    assert Workspace.create(tmp_path / "w") == workspace, "create finishes a half-made workspace"
    (workspace.segments / "00001-trunk").mkdir()
    (workspace.root / "factory.yaml").unlink()
    for act, code in ((Workspace.create, "workspace.left_work"), (Workspace.open, "workspace.no_config")):
        with refused(code, WorkspaceError, found=["segments"]):
            act(tmp_path / "w")


@pytest.mark.parametrize("name", ["what?", "100%41", os.fsdecode(b"caf\xe9")])
def test_a_path_that_does_not_fit_a_databases_address_is_refused(tmp_path: Path, name: str) -> None:
    with refused("workspace.odd_path", WorkspaceError):
        Workspace.create(tmp_path / name)
    assert list(tmp_path.iterdir()) == []
    Workspace.create(tmp_path / "a b#c&d;").root.rename(tmp_path / name)
    with refused("workspace.odd_path", WorkspaceError):
        Workspace.open(tmp_path / name)
