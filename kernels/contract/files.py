"""Writes files that are either complete or absent, and JSON without NaN."""

from __future__ import annotations

import json
import math
import os
import uuid
from pathlib import Path
from typing import Any


def write_atomically(path: Path, data: bytes | str) -> None:
    """Replace or create ``path`` with ``data`` (text as UTF-8, line ends unchanged). Its folder must exist. Raises: OSError.

    Readers see the whole old content or the whole new content. After a crash or a power cut at any moment, ``path`` has the old or the new
    content. Once this function has returned, it has the new content. A crash may leave ``.<name>.<random>.part`` in the folder, but an error does
    not. If there are several writers, the last one wins. A symbolic link at ``path`` is replaced, not followed.
    """
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.part")
    try:
        with open(aside, "xb") as out:
            out.write(data.encode() if isinstance(data, str) else data)
            out.flush()
            os.fsync(out.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Return once the entries of a folder (files made, renamed or removed in it) are on disk, or the content of a file. Raises: OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Return once a folder and everything in it is on disk. Symbolic links are not followed. Raises: OSError."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            sync_tree(path)
        elif path.is_file() and not path.is_symlink():
            sync_folder(path)
    sync_folder(folder)


def rename_into_place(made: Path, place: Path) -> None:
    """Rename a complete file or folder ``made`` to ``place`` in the same file system. A file at ``place`` is replaced.

    Once this function has returned, ``place`` has the whole content, even after a power cut. Raises: OSError.
    """
    if made.is_dir() and not made.is_symlink():
        sync_tree(made)
    elif made.is_file() and not made.is_symlink():
        sync_folder(made)
    os.replace(made, place)
    sync_folder(place.parent)


def replace_non_finite(value: Any) -> Any:
    """``value`` in a form that JSON can represent: NaN and infinity become None, keys become strings, tuples become lists, at any depth.

    JSON has no number for NaN or infinity. The judges read None as "not measured".
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): replace_non_finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [replace_non_finite(part) for part in value]
    return value


def encode_finite_json(value: Any, indent: int | None = None) -> str:
    """``replace_non_finite(value)`` as JSON text. Raises: TypeError for a value that JSON cannot represent."""
    return json.dumps(replace_non_finite(value), indent=indent, allow_nan=False)
