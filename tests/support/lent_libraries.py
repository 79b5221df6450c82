"""The loss head's compiled library, lent to a new workspace, whose first trainer would spend two seconds of g++ on it."""

from __future__ import annotations

import shutil
from pathlib import Path

from factory.core import devices
from factory.core.workspace import Workspace
from factory.git.repository import live_commit
from kernels.native import library


def lend(workspace: Workspace) -> Workspace:
    """As if a trainer had run there before."""
    made = Path(library("linear_cross_entropy")._name)
    folder = devices.compiled(workspace.root, live_commit(workspace.repository)) / "inductor" / made.parent.name
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(made, folder)
    return workspace
