"""What a folder holds, to compare it with what it held."""

from __future__ import annotations

import hashlib
from pathlib import Path


def file_hashes(folder: Path) -> dict[str, str]:
    """Of each file directly in it: name → SHA-256."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.is_file()}
