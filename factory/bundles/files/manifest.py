"""Builds manifest.json, which lists the SHA-256 and size of every file, and checks that a folder holds exactly the listed files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from factory.bundles.files.folder import BundleFolder, FileHash, escape_unprintable
from factory.bundles.files.layout import FORMAT, MANIFEST, SIGNATURE
from factory.git.version import describe_version
from kernels.contract.message import Message

NAMED = 5  # file names in a message


def build_manifest(name: str, hashes: Mapping[str, FileHash]) -> dict[str, Any]:
    """Return the manifest's JSON object. It lists every file except the manifest itself and the signature."""
    files = {path: vars(hashed) for path, hashed in sorted(hashes.items()) if path not in (MANIFEST, SIGNATURE)}
    return {"format": FORMAT, "name": name, "made_by": describe_version(), "files": files}


def check_manifest(folder: BundleFolder) -> list[Message]:
    """Return messages about files that were added, removed or changed after the manifest was written, and about errors of the manifest itself.

    Raises: BundleError for a manifest that cannot be read.
    """
    stored = folder.read_object(MANIFEST)
    if stored.get("format") != FORMAT:
        given = escape_unprintable(repr(stored.get("format")))
        return [
            Message(
                "manifest.other_format",
                "{file} has format {given}. This factory reads format {known}",
                file=MANIFEST,
                given=given,
                known=FORMAT,
            )
        ]
    listed = stored.get("files")
    if not isinstance(listed, dict):
        return [Message("manifest.no_mapping", "{file}: key 'files' is not a mapping", file=MANIFEST)]
    found: list[Message] = []
    odd = [path for path in listed if not _plain(path)]
    if odd:
        found.append(
            Message(
                "manifest.outside",
                "{file} lists {count:,|path|paths} outside the bundle: {paths}",
                file=MANIFEST,
                **_names(odd),
            )
        )
    there = {path: vars(hashed) for path, hashed in folder.file_hashes.items() if path not in (MANIFEST, SIGNATURE)}
    added = [path for path in there if path not in listed]
    missing = [path for path in listed if path not in there and path not in odd]
    changed = [path for path in there if path in listed and there[path] != listed[path]]
    if changed:
        found.append(Message("manifest.changed", "{count:,|file was|files were} changed: {paths}", **_names(changed)))
    if missing:
        found.append(Message("manifest.missing", "{count:,|file is|files are} missing: {paths}", **_names(missing)))
    if added:
        found.append(Message("manifest.added", "{count:,|file was|files were} added: {paths}", **_names(added)))
    return found


def _plain(path: str) -> bool:
    """Return whether ``path`` is relative, in normal form, and inside the folder."""
    parts = PurePosixPath(path).parts
    return bool(parts) and not path.startswith("/") and ".." not in parts and "/".join(parts) == path


def _names(paths: Any) -> dict[str, Any]:
    """Return the data of a message about several files: their number, and the first ``NAMED`` paths."""
    ordered = sorted(paths)
    more = [f"and {len(ordered) - NAMED} more"] if len(ordered) > NAMED else []
    return {"count": len(ordered), "paths": [escape_unprintable(path) for path in ordered[:NAMED]] + more}
