"""Publishes a release for servers: the link ``exports/champion`` points at its export, and ``exports/serving.json`` names the release.

Publishing replaces one symbolic link, so a program that opens the model at any moment finds a complete export. ``factory serve``
(``factory.serving``) follows the ledger instead.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from factory.core.workspace import Workspace
from kernels.contract.files import sync_folder, write_atomically

CHAMPION_LINK, NOTE = "champion", "serving.json"
MODEL_NAME = "factory-lm"


def publish_export(workspace: Workspace, release: int, export: Path, sha256: str) -> None:
    """Point ``exports/champion`` at ``export``, atomically. A second call changes nothing.

    The note ``serving.json`` is written before the link changes. If note and link name different targets, a call was interrupted.
    """
    folder = workspace.exports
    target = os.path.relpath(export, folder)  # relative, so that the workspace can be moved
    note = {"release": release, "export": target, "export_sha256": sha256, "model_name": MODEL_NAME}
    new_link = folder / f".{CHAMPION_LINK}.new"
    for left in (
        new_link,
        *folder.glob(f".{NOTE}.*.part"),
    ):  # left by a killed process; only one process publishes at a time
        left.unlink(missing_ok=True)
    os.symlink(target, new_link)
    write_atomically(folder / NOTE, json.dumps(note, indent=2))
    os.replace(new_link, folder / CHAMPION_LINK)
    sync_folder(folder)


def read_publication_record(workspace: Workspace) -> dict[str, Any] | None:
    """Return the content of ``serving.json``; None if it is missing or damaged, or if the link has another target."""
    try:
        note = json.loads((workspace.exports / NOTE).read_text(encoding="utf-8"))
        target = os.readlink(workspace.exports / CHAMPION_LINK)
    except (OSError, ValueError):
        return None
    whole = isinstance(note, dict) and note.get("export") == target and (workspace.exports / CHAMPION_LINK).is_dir()
    return note if whole else None
