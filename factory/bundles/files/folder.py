"""A bundle's folder, read as hostile input: no link is followed, nothing is executed, every read is bounded, no number is NaN."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from factory.bundles.files.layout import DEPTH, FILES_AT_MOST, JSON_BYTES, LINE_BYTES, ROWS_BYTES
from factory.core.errors import InputError
from factory.core.left_files import open_file, parse_json

NESTED = 50  # objects and lists in one another


class BundleError(InputError):
    """Something in a bundle is not what a bundle holds; says what, in words for a person."""


@dataclass(frozen=True)
class Hashed:
    """What a file holds."""

    sha256: str
    bytes: int


@dataclass(frozen=True)
class BundleFolder:
    """A folder of plain files, by their paths within it. ``Raises`` of all methods: BundleError."""

    root: Path
    names: tuple[str, ...]

    @classmethod
    def open(cls, root: Path) -> BundleFolder:
        """List it. Raises: BundleError for a link, or anything else that is neither file nor folder, and for too much of either."""
        if root.is_symlink() or not root.is_dir():
            raise BundleError(f"{shown(str(root))}: no such folder")
        names: list[str] = []
        pending = [("", 0)]
        while pending:
            inner, depth = pending.pop()
            if depth > DEPTH:
                raise BundleError(f"{shown(inner)} lies deeper than {DEPTH} folders")
            try:
                with os.scandir(root / inner) as entries:
                    for entry in entries:
                        name = f"{inner}/{entry.name}" if inner else entry.name
                        if entry.is_symlink():
                            raise BundleError(f"{shown(name)} is a link: a bundle holds plain files only")
                        if entry.is_dir(follow_symlinks=False):
                            pending.append((name, depth + 1))
                        elif entry.is_file(follow_symlinks=False):
                            names.append(name)
                        else:
                            raise BundleError(f"{shown(name)} is no plain file")
                        if len(names) + len(pending) > FILES_AT_MOST:
                            raise BundleError(f"more than {FILES_AT_MOST} files and folders")
            except OSError as error:
                raise BundleError(f"{shown(inner) or 'the folder'} cannot be read: {error.strerror}") from error
        return cls(root, tuple(sorted(names)))

    @cached_property
    def hashes(self) -> dict[str, Hashed]:
        """Of every file, read once."""
        return {name: self._hash(name) for name in self.names}

    def _hash(self, name: str) -> Hashed:
        try:
            with open_file(self.root / name) as file:
                digest, size = hashlib.sha256(), 0
                while block := file.read(1 << 20):
                    digest.update(block)
                    size += len(block)
                return Hashed(digest.hexdigest(), size)
        except OSError as error:
            raise BundleError(f"{shown(name)} cannot be read: {error.strerror}") from error

    def read(self, name: str, limit: int = JSON_BYTES) -> bytes:
        """A whole file of at most ``limit`` bytes."""
        if name not in self.names:
            raise BundleError(f"{name} is missing")
        try:
            with open_file(self.root / name) as file:
                found = file.read(limit + 1)
        except OSError as error:
            raise BundleError(f"{name} cannot be read: {error.strerror}") from error
        if len(found) > limit:
            raise BundleError(f"{name} has more than {limit} bytes")
        return found

    def object(self, name: str) -> dict[str, Any]:
        """A file with one JSON object."""
        return json_object(self.read(name), name)

    def rows(self, name: str, limit: int | None = ROWS_BYTES) -> Iterator[dict[str, Any]]:
        """The objects of a file of JSON Lines, one at a time. ``limit``: of its bytes; None: the caller keeps none of them."""
        if name not in self.names:
            raise BundleError(f"{name} is missing")
        if limit is not None and self.hashes[name].bytes > limit:
            raise BundleError(f"{name} has more than {limit} bytes")
        try:
            with open_file(self.root / name) as file:
                for number in range(1, 1 << 60):
                    line = file.readline(LINE_BYTES + 1)
                    if not line:
                        return
                    if len(line) > LINE_BYTES:
                        raise BundleError(f"{name}, line {number}: more than {LINE_BYTES} bytes")
                    yield json_object(line, f"{name}, line {number}")
        except OSError as error:
            raise BundleError(f"{name} cannot be read: {error.strerror}") from error


def json_object(text: bytes, where: str) -> dict[str, Any]:
    """Raises: BundleError for what is no JSON object, or holds a NaN or an infinity."""
    try:
        found = parse_json(text)
    except ValueError as error:
        raise BundleError(f"{where} cannot be read as JSON: {str(error)[:200]}") from None
    if not isinstance(found, dict):
        raise BundleError(f"{where}: expected a JSON object")
    if words := _odd(found):
        raise BundleError(f"{where}: {words}")
    return found


def _odd(value: Any, place: str = "", depth: int = 0) -> str:
    """Where a NaN, an infinity or too deep a nesting stands, in words; '': nowhere."""
    if isinstance(value, float):
        return "" if math.isfinite(value) else f"{place or 'the value'} is no finite number"
    if depth > NESTED:
        return f"{shown(place)} is nested too deeply"
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    inside = f"{place}/" if place else ""
    return next((found for key, part in parts if (found := _odd(part, f"{inside}{shown(str(key))}", depth + 1))), "")


def difference(found: Any, expected: Any, tolerance: float = 0.0, place: str = "") -> str:
    """The first place at which two JSON values differ, in words; '': nowhere. ``tolerance``: of numbers, absolute or of the larger one.

    >>> difference({"a": [1, 2.0]}, {"a": [1, 2.5]})
    'a/1 is 2.0, expected 2.5'
    >>> difference({"a": [1, 2.0]}, {"a": [1, 2.0 + 1e-12]}, tolerance=1e-9)
    ''
    """
    inside = f"{place}/" if place else ""
    if isinstance(found, dict) and isinstance(expected, dict):
        for key in sorted(found.keys() | expected.keys(), key=str):
            if key not in expected:
                return f"{inside}{shown(str(key))} has no place there"
            if key not in found:
                return f"{inside}{shown(str(key))} is missing"
            if words := difference(found[key], expected[key], tolerance, f"{inside}{shown(str(key))}"):
                return words
        return ""
    if isinstance(found, list) and isinstance(expected, list):
        if len(found) != len(expected):
            return f"{place or 'the list'} has {len(found)} entries, expected {len(expected)}"
        parts = (difference(a, b, tolerance, f"{inside}{n}") for n, (a, b) in enumerate(zip(found, expected)))
        return next((words for words in parts if words), "")
    number = lambda value: isinstance(value, int | float) and not isinstance(value, bool)
    if tolerance and number(found) and number(expected):
        same = abs(found - expected) <= tolerance * max(1.0, abs(found), abs(expected))
    else:
        same = type(found) is type(expected) and found == expected
    return "" if same else f"{place or 'the value'} is {shown(repr(found))}, expected {shown(repr(expected))}"


def shown(text: str, limit: int = 120) -> str:
    """Text of a bundle for a terminal: nothing that moves its cursor, no half of a pair, not too long.

    >>> shown("a\\x1b[31m")
    'a\\\\x1b[31m'
    """
    words = "".join(
        c if c.isprintable() and not 0xD800 <= ord(c) < 0xE000 else c.encode("unicode_escape").decode()
        for c in text[:limit]
    )
    return words + ("…" if len(text) > limit else "")
