"""What is served: ``exports/champion`` points at the released export, ``exports/serving.json`` says which release that is.

Publishing swaps one symbolic link, so a program that opens the model at any moment finds a whole one. ``factory serve`` (``factory.serving``)
follows the ledger itself.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from factory.core.workspace import Workspace
from kernels.contract.files import sync_folder, write_atomically

LINK, NOTE = "champion", "serving.json"
MODEL_NAME = "factory-lm"


def publish(workspace: Workspace, release: int, export: Path, sha256: str) -> None:
    """Point ``exports/champion`` at ``export``, atomically. Doing it again changes nothing.

    The note is written before the link moves: a note that names another target than the link's is how ``served`` knows
    that a publish was interrupted.
    """
    folder = workspace.exports
    target = os.path.relpath(export, folder)  # relative: a workspace that is moved stays whole
    note = {"release": release, "export": target, "export_sha256": sha256, "model_name": MODEL_NAME}
    new_link = folder / f".{LINK}.new"
    for left in (
        new_link,
        *folder.glob(f".{NOTE}.*.part"),
    ):  # of a process that was killed here; one publishes at a time
        left.unlink(missing_ok=True)
    os.symlink(target, new_link)
    write_atomically(folder / NOTE, json.dumps(note, indent=2))
    os.replace(new_link, folder / LINK)
    sync_folder(folder)


def served(workspace: Workspace) -> dict[str, Any] | None:
    """The note of what is served, or None when nothing is, or when note and link do not agree."""
    try:
        note = json.loads((workspace.exports / NOTE).read_text(encoding="utf-8"))
        target = os.readlink(workspace.exports / LINK)
    except (OSError, ValueError):
        return None
    whole = isinstance(note, dict) and note.get("export") == target and (workspace.exports / LINK).is_dir()
    return note if whole else None
