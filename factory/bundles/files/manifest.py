"""``manifest.json``: the SHA-256 and size of every file, and whether a folder holds exactly those."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from factory.bundles.files.folder import BundleFolder, Hashed, shown
from factory.bundles.files.layout import FORMAT, MANIFEST, SIGNATURE
from factory.git.version import version

NAMED = 5  # files in a message


def manifest(name: str, hashes: Mapping[str, Hashed]) -> dict[str, Any]:
    """Of every file but the manifest itself and the signature."""
    files = {path: vars(hashed) for path, hashed in sorted(hashes.items()) if path not in (MANIFEST, SIGNATURE)}
    return {"format": FORMAT, "name": name, "made_by": version(), "files": files}


def problems(folder: BundleFolder) -> list[str]:
    """What of the files is not as the manifest says: added, missing, changed; and what the manifest may not say.

    Raises: BundleError for a manifest that cannot be read.
    """
    stored = folder.object(MANIFEST)
    if stored.get("format") != FORMAT:
        return [f"{MANIFEST}: format {shown(repr(stored.get('format')))}; this factory reads format {FORMAT}"]
    listed = stored.get("files")
    if not isinstance(listed, dict):
        return [f"{MANIFEST}: 'files' is no mapping"]
    found: list[str] = []
    odd = [path for path in listed if not _plain(path)]
    if odd:
        found.append(f"{MANIFEST} names files outside the bundle: {_names(odd)}")
    there = {path: vars(hashed) for path, hashed in folder.hashes.items() if path not in (MANIFEST, SIGNATURE)}
    added = [path for path in there if path not in listed]
    missing = [path for path in listed if path not in there and path not in odd]
    changed = [path for path in there if path in listed and there[path] != listed[path]]
    for words, paths in (("changed", changed), ("missing", missing), ("added", added)):
        if paths:
            found.append(f"{len(paths)} {words}: {_names(paths)}")
    return found


def _plain(path: str) -> bool:
    """Is it the normal form of a path within a folder?"""
    parts = PurePosixPath(path).parts
    return bool(parts) and not path.startswith("/") and ".." not in parts and "/".join(parts) == path


def _names(paths: Any) -> str:
    ordered = sorted(paths)
    more = f" and {len(ordered) - NAMED} more" if len(ordered) > NAMED else ""
    return ", ".join(shown(path) for path in ordered[:NAMED]) + more
