"""Hashes of a folder's files, for comparisons."""

from __future__ import annotations

import hashlib
from pathlib import Path


def file_hashes(folder: Path) -> dict[str, str]:
    """Return name → SHA-256 of the files directly in a folder."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.is_file()}
