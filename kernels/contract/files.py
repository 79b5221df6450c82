"""Files that are whole or absent, and JSON without NaN."""

from __future__ import annotations

import json
import math
import os
import uuid
from pathlib import Path
from typing import Any


def write_atomically(path: Path, data: bytes | str) -> None:
    """Replace or create ``path`` with ``data`` (text as UTF-8, line ends as they are). Its folder must exist. Raises: OSError.

    Readers see the old content or the new one, never a part. After a crash or a power cut at any moment ``path`` has the old
    content or the new one; once this returns it has the new one. A crash may leave ``.<name>.<random>.part`` in the folder;
    an error does not. Of several writers the last one wins. A symbolic link at ``path`` is replaced, not followed.
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
    """Return once the folder's entries (files made, renamed or removed in it), or a file's content, are on disk. Raises: OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Return once a folder, and all files and folders in it, are on disk. Links are not followed. Raises: OSError."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            sync_tree(path)
        elif path.is_file() and not path.is_symlink():
            sync_folder(path)
    sync_folder(folder)


def rename_into_place(made: Path, place: Path) -> None:
    """Rename a file or a folder that was written aside to ``place``, of the same file system; a file there is replaced.

    Once this returns, it is there with all of its content, also after a power cut. Raises: OSError.
    """
    if made.is_dir() and not made.is_symlink():
        sync_tree(made)
    elif made.is_file() and not made.is_symlink():
        sync_folder(made)
    os.replace(made, place)
    sync_folder(place.parent)


def finite_values(value: Any) -> Any:
    """``value`` as JSON has it: every NaN and infinity is None, keys are strings, tuples are lists, at any depth.

    JSON has no number for NaN and infinity, and judges read None as "not measured".
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite_values(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite_values(part) for part in value]
    return value


def finite_json(value: Any, indent: int | None = None) -> str:
    """``finite_values(value)`` as JSON. Raises: TypeError for what JSON has no form for."""
    return json.dumps(finite_values(value), indent=indent, allow_nan=False)
