"""Reads a bundle's folder as hostile input: it follows no links, executes nothing, limits the size of every read, and refuses NaN."""

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
from factory.core.untrusted_trainer_files import open_regular_file, parse_json
from kernels.contract.message import Message

NESTED = 50  # levels of nested JSON objects and lists


class BundleError(InputError):
    """A file of a bundle is missing, unreadable or wrong. The message names the file."""


@dataclass(frozen=True)
class FileHash:
    """The SHA-256 and the size of a file."""

    sha256: str
    bytes: int


@dataclass(frozen=True)
class BundleFolder:
    """A folder of plain files. ``paths``: the files' paths, relative to the folder. All methods raise BundleError."""

    root: Path
    paths: tuple[str, ...]

    @classmethod
    def open(cls, root: Path) -> BundleFolder:
        """List the files of a folder. Raises: BundleError for a link or a special file, for too many files, and for folders nested too deeply."""
        if root.is_symlink() or not root.is_dir():
            raise BundleError(
                "bundles.no_folder",
                "{folder} does not exist, is not a folder, or is a link",
                folder=escape_unprintable(str(root)),
            )
        names: list[str] = []
        pending = [("", 0)]
        while pending:
            inner, depth = pending.pop()
            if depth > DEPTH:
                raise BundleError(
                    "bundles.too_deep",
                    "{path} is nested deeper than {limit:,|folder|folders}",
                    path=escape_unprintable(inner),
                    limit=DEPTH,
                )
            try:
                with os.scandir(root / inner) as entries:
                    for entry in entries:
                        name = f"{inner}/{entry.name}" if inner else entry.name
                        if entry.is_symlink():
                            raise BundleError(
                                "bundles.link",
                                "{path} is a link. A bundle may contain only plain files",
                                path=escape_unprintable(name),
                            )
                        if entry.is_dir(follow_symlinks=False):
                            pending.append((name, depth + 1))
                        elif entry.is_file(follow_symlinks=False):
                            names.append(name)
                        else:
                            raise BundleError(
                                "bundles.special_file", "{path} is not a plain file", path=escape_unprintable(name)
                            )
                        if len(names) + len(pending) > FILES_AT_MOST:
                            raise BundleError(
                                "bundles.too_many_files",
                                "The bundle has more than {limit:,} files and folders",
                                limit=FILES_AT_MOST,
                            )
            except OSError as error:
                raise make_unreadable_error(escape_unprintable(inner) or "the folder", error) from error
        return cls(root, tuple(sorted(names)))

    @cached_property
    def file_hashes(self) -> dict[str, FileHash]:
        """The hash and size of every file, by path. The first use reads each file once."""
        return {name: self._hash(name) for name in self.paths}

    def _hash(self, name: str) -> FileHash:
        try:
            with open_regular_file(self.root / name) as file:
                digest, size = hashlib.sha256(), 0
                while block := file.read(1 << 20):
                    digest.update(block)
                    size += len(block)
                return FileHash(digest.hexdigest(), size)
        except OSError as error:
            raise make_unreadable_error(escape_unprintable(name), error) from error

    def read(self, name: str, limit: int = JSON_BYTES) -> bytes:
        """Return the content of a file of at most ``limit`` bytes."""
        if name not in self.paths:
            raise BundleError(make_missing_file_message(name))
        try:
            with open_regular_file(self.root / name) as file:
                found = file.read(limit + 1)
        except OSError as error:
            raise make_unreadable_error(name, error) from error
        if len(found) > limit:
            raise BundleError(make_too_large_message(name, limit))
        return found

    def read_object(self, name: str) -> dict[str, Any]:
        """Return the JSON object in a file."""
        return parse_json_object(self.read(name), name)

    def read_rows(self, name: str, limit: int | None = ROWS_BYTES) -> Iterator[dict[str, Any]]:
        """Yield the JSON objects of a JSON Lines file. ``limit``: the most bytes of the file; None for a caller that keeps no row in memory."""
        if name not in self.paths:
            raise BundleError(make_missing_file_message(name))
        if limit is not None and self.file_hashes[name].bytes > limit:
            raise BundleError(make_too_large_message(name, limit))
        try:
            with open_regular_file(self.root / name) as file:
                for number in range(1, 1 << 60):
                    line = file.readline(LINE_BYTES + 1)
                    if not line:
                        return
                    if len(line) > LINE_BYTES:
                        raise BundleError(make_too_large_message(f"{name}, line {number}", LINE_BYTES))
                    yield parse_json_object(line, f"{name}, line {number}")
        except OSError as error:
            raise make_unreadable_error(name, error) from error


def make_missing_file_message(name: str) -> Message:
    """Return the message about a file that is not in the bundle."""
    return Message("bundles.missing_file", "{file} is missing", file=name)


def make_too_large_message(name: str, limit: int) -> Message:
    """Return the message about a file or a line with more than ``limit`` bytes."""
    return Message("bundles.too_large", "{file} has more than {limit:,} bytes", file=name, limit=limit)


def make_unreadable_error(name: str, error: OSError) -> BundleError:
    """Return the error for a file that the operating system does not let the factory read."""
    return BundleError("bundles.unreadable", "{file} cannot be read: {reason}", file=name, reason=error.strerror)


def parse_json_object(text: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object. Raises: BundleError for anything else, and for a NaN or an infinity in it."""
    try:
        found = parse_json(text)
    except ValueError as error:
        raise BundleError(
            "bundles.no_json", "{file} cannot be read as JSON: {reason}", file=where, reason=str(error)[:200]
        ) from None
    if not isinstance(found, dict):
        raise make_not_a_json_object_error(where)
    if problem := _odd(found):
        raise BundleError("bundles.odd_json", "{file}: {problem}", file=where, problem=problem)
    return found


def make_not_a_json_object_error(where: str) -> BundleError:
    """Return the error for JSON that is not an object."""
    return BundleError("bundles.no_object", "{file}: expected a JSON object", file=where)


def _odd(value: Any, place: str = "", depth: int = 0) -> Message | None:
    """Return a message about the first NaN or infinity in a JSON value, or about its deep nesting; None for a valid value."""
    if isinstance(value, float):
        place = place or "the value"
        return (
            None
            if math.isfinite(value)
            else Message("bundles.not_finite", "{place} is not a finite number", place=place)
        )
    if depth > NESTED:
        return Message("bundles.nested_too_deeply", "{place} is nested too deeply", place=escape_unprintable(place))
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    inside = f"{place}/" if place else ""
    return next(
        (found for key, part in parts if (found := _odd(part, f"{inside}{escape_unprintable(str(key))}", depth + 1))),
        None,
    )


def find_first_json_difference(found: Any, expected: Any, tolerance: float = 0.0, place: str = "") -> Message | None:
    """Return a message about the first difference between two JSON values; None if they are equal.

    ``tolerance``: the allowed difference of two numbers, absolute below 1 and relative to the larger number above 1. ``place``: the path of the
    values in their file.

    >>> find_first_json_difference({"a": [1, 2.0]}, {"a": [1, 2.5]})
    'a/1 is 2.0, expected 2.5'
    >>> find_first_json_difference({"a": [1, 2.0]}, {"a": [1, 2.0 + 1e-12]}, tolerance=1e-9) is None
    True
    """
    inside = f"{place}/" if place else ""
    if isinstance(found, dict) and isinstance(expected, dict):
        for key in sorted(found.keys() | expected.keys(), key=str):
            if key not in expected:
                return make_unexpected_key_message(f"{inside}{escape_unprintable(str(key))}")
            if key not in found:
                return make_missing_file_message(f"{inside}{escape_unprintable(str(key))}")
            if problem := find_first_json_difference(
                found[key], expected[key], tolerance, f"{inside}{escape_unprintable(str(key))}"
            ):
                return problem
        return None
    if isinstance(found, list) and isinstance(expected, list):
        if len(found) != len(expected):
            return Message(
                "bundles.other_length", "{place} has {found:,|entry|entries}, expected {expected:,}",
                place=place or "the list", found=len(found), expected=len(expected),
            )  # fmt: skip
        parts = (
            find_first_json_difference(a, b, tolerance, f"{inside}{n}") for n, (a, b) in enumerate(zip(found, expected))
        )
        return next((problem for problem in parts if problem), None)
    number = lambda value: isinstance(value, int | float) and not isinstance(value, bool)
    if tolerance and number(found) and number(expected):
        same = abs(found - expected) <= tolerance * max(1.0, abs(found), abs(expected))
    else:
        same = type(found) is type(expected) and found == expected
    if same:
        return None
    return Message(
        "bundles.other_value", "{place} is {found}, expected {expected}",
        place=place or "the value", found=escape_unprintable(repr(found)), expected=escape_unprintable(repr(expected)),
    )  # fmt: skip


def make_unexpected_key_message(place: str) -> Message:
    """Return the message about a key that a JSON object must not have."""
    return Message("bundles.unexpected_key", "{place} is not an allowed key", place=place)


def escape_unprintable(text: str, limit: int = 120) -> str:
    """Make text of a bundle safe to print: escape control characters and surrogates, and cut the text after ``limit`` characters.

    >>> escape_unprintable("a\\x1b[31m")
    'a\\\\x1b[31m'
    """
    words = "".join(
        c if c.isprintable() and not 0xD800 <= ord(c) < 0xE000 else c.encode("unicode_escape").decode()
        for c in text[:limit]
    )
    return words + ("…" if len(text) > limit else "")
