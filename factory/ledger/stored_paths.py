"""Converts paths for the ledger, which stores them relative to the workspace. A workspace that was moved, copied or restored therefore opens
anywhere.

Paths outside the workspace stay absolute. Readers of the ledger (``Ledger``, ``LedgerReader``) return absolute paths.

    >>> root = Path("/plant")
    >>> to_stored_path(root, "/plant/segments/00001-trunk"), to_stored_path(root, "/data/a.jsonl")
    ('segments/00001-trunk', '/data/a.jsonl')
    >>> make_paths_absolute({"id": 1, "folder": "segments/00001-trunk"}, root)
    {'id': 1, 'folder': '/plant/segments/00001-trunk'}
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

PLACES = frozenset({"path", "folder", "export_path", "report", "file"})  # columns whose value is a path
JSON_PATH_COLUMNS = frozenset({"plan", "result"})  # columns whose JSON contains paths
JSON_PATH_KEYS = frozenset({"path", "checkpoint"})  # the keys in that JSON whose values are paths


def to_stored_path(root: Path | None, place: str | os.PathLike[str]) -> str:
    """Return a path as the ledger stores it."""
    path = Path(place)
    return str(path.relative_to(root)) if root and path.is_absolute() and path.is_relative_to(root) else str(path)


def to_stored_paths(root: Path | None, tree: Any) -> Any:
    """Return a data plan or a segment's result with paths as the ledger stores them."""
    return _each(tree, lambda place: to_stored_path(root, place))


def make_paths_absolute(row: dict[str, Any], root: Path | None) -> dict[str, Any]:
    """Return a row of the ledger with absolute paths."""
    if root is None:
        return row
    for key in PLACES & row.keys():
        if isinstance(row[key], str) and row[key]:
            row[key] = str(root / row[key])
    for key in JSON_PATH_COLUMNS & row.keys():
        row[key] = _each(row[key], lambda place: str(root / place))
    return row


def _each(tree: Any, change: Any, key: str = "") -> Any:
    if isinstance(tree, dict):
        return {name: _each(part, change, name) for name, part in tree.items()}
    if isinstance(tree, list):
        return [_each(part, change) for part in tree]
    return change(tree) if key in JSON_PATH_KEYS and isinstance(tree, str) and tree else tree
