"""Copies the loss head's compiled library into a new workspace. It saves its first trainer two seconds of g++."""

from __future__ import annotations

import shutil
from pathlib import Path

from factory.core import devices
from factory.core.workspace import Workspace
from factory.git.repository import get_live_commit
from kernels.native import load_library


def lend(workspace: Workspace) -> Workspace:
    """Copy the library as if a trainer had run in the workspace. Returns the workspace."""
    made = Path(load_library("linear_cross_entropy")._name)
    folder = (
        devices.get_compiled_code_folder(workspace.root, get_live_commit(workspace.repository))
        / "inductor"
        / made.parent.name
    )
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(made, folder)
    return workspace
