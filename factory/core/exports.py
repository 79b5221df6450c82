"""The identity of an export: one hash over everything in its folder. It is what is judged, approved, released and served."""

from __future__ import annotations

import hashlib
from pathlib import Path

from factory.core.errors import InputError


def folder_sha256(folder: Path) -> str:
    """One hash of every file of an export, names and contents: what ``candidates.export_sha256`` holds.

    Raises: InputError when there is no such folder, or something in it is not a plain file (a link could lead anywhere).
    """
    if folder.is_symlink() or not folder.is_dir():
        raise InputError(f"{folder}: no exported model there; it was moved or deleted")
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise InputError(f"{path}: an export holds plain files only")
        if path.is_file():
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            total.update(f"{path.relative_to(folder)}\0{digest}\n".encode())
    return total.hexdigest()
