"""The identity of an export: one hash over all files in its folder. Verdicts, approvals, releases and the server refer to this hash."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from factory.core.errors import InputError


def hash_export_folder(folder: Path) -> str:
    """Return one hash over the names and contents of all files of an export. The ledger stores this hash in ``candidates.export_sha256``.

    Raises: InputError when the folder does not exist, or has an entry that is not a plain file (a link could lead anywhere).
    """
    if folder.is_symlink() or not folder.is_dir():
        raise InputError(
            "exports.no_folder",
            "{folder} is not an export folder. The export was moved or deleted",
            folder=folder,
        )
    digests: dict[Path, str] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise InputError("exports.not_a_file", "{path} is not a plain file: remove it from the export", path=path)
        if path.is_file():
            with open(path, "rb") as file:
                digests[path.relative_to(folder)] = hashlib.file_digest(file, "sha256").hexdigest()
    return hash_export_files(digests)


def hash_export_files(digests: Mapping[Path, str]) -> str:
    """Return the same hash as ``hash_export_folder``, computed from the SHA-256 of each file. ``digests``: by path within the folder."""
    total = hashlib.sha256()
    for path in sorted(digests):
        total.update(f"{path}\0{digests[path]}\n".encode())
    return total.hexdigest()
