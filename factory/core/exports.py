"""The identity of an export: one hash over everything in its folder. It is what is judged, approved, released and served."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from factory.core.errors import InputError


def folder_sha256(folder: Path) -> str:
    """One hash of every file of an export, names and contents: what ``candidates.export_sha256`` holds.

    Raises: InputError when there is no such folder, or something in it is not a plain file (a link could lead anywhere).
    """
    if folder.is_symlink() or not folder.is_dir():
        raise InputError(f"{folder}: no exported model there; it was moved or deleted")
    digests: dict[Path, str] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise InputError(f"{path}: an export holds plain files only")
        if path.is_file():
            with open(path, "rb") as file:
                digests[path.relative_to(folder)] = hashlib.file_digest(file, "sha256").hexdigest()
    return files_sha256(digests)


def files_sha256(digests: Mapping[Path, str]) -> str:
    """``folder_sha256`` of files whose own hashes are known, by path within the folder."""
    total = hashlib.sha256()
    for path in sorted(digests):
        total.update(f"{path}\0{digests[path]}\n".encode())
    return total.hexdigest()
