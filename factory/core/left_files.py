"""Reads what a trainer leaves in its folder, without trusting that it is a file, its size, or where it leads.

A trainer runs code that an agent may have written. While it runs, its files are opened one by one: no link is followed, a pipe does not
block, and what is read is bounded. Once it has ended, ``sweep`` removes whatever is neither file nor folder, and who reads then may trust
names again.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from pathlib import Path
from typing import Any, BinaryIO

from factory.core.errors import SegmentError
from factory.core.faults import is_of_no_file

DEPTH = 8  # of folders in folders; checkpoints lie two deep, those of a certificate's runs five
JSON_BYTES = 64 << 20  # most of one JSON file
DIGITS = 18  # of an integer: SQLite's and float's
HALF_PAIR = re.compile(r"\\u[dD][89abAB]|\\u[dD][c-fC-F]")


def open_file(path: Path) -> BinaryIO:
    """A regular file, for reading. Raises: FileNotFoundError, also for what is no regular file, or is kept from being opened; OSError."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except BlockingIOError:
        raise FileNotFoundError(f"{path} is held by a lease (F_SETLEASE)") from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise FileNotFoundError(f"{path} is not a regular file")
    return os.fdopen(handle, "rb")


def read_tail(path: Path, limit: int) -> bytes:
    """The last ``limit`` bytes of a file; empty when there is none."""
    try:
        with open_file(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - limit))
            return file.read(limit)
    except OSError:
        return b""


def count_lines(path: Path) -> int:
    """Of a file; 0 when there is none. Memory does not grow with the file."""
    try:
        with open_file(path) as file:
            return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
    except OSError:
        return 0


def read_text(path: Path) -> str:
    """Raises: SegmentError for what is no file of at most ``JSON_BYTES`` of UTF-8; OSError for a fault that no file can cause."""
    try:
        with open_file(path) as file:
            found = file.read(JSON_BYTES + 1)
        if len(found) <= JSON_BYTES:
            return found.decode()
        why = f"it has more than {JSON_BYTES} bytes"
    except (OSError, UnicodeDecodeError) as error:
        if is_of_no_file(error):
            raise
        why = str(error)
    raise SegmentError(f"{path} cannot be read: {why}")


def read_object(path: Path) -> dict[str, Any]:
    """Raises: SegmentError for what is no file with one JSON object."""
    return parse_object(read_text(path), path)


def parse_object(text: str, path: Path) -> dict[str, Any]:
    """``text`` of the file ``path``. Raises: SegmentError for what is no JSON object."""
    try:
        return parse_json_object(text)
    except ValueError as error:
        raise SegmentError(f"{path} cannot be read: {str(error)[:300]}") from None


def sweep(folder: Path) -> list[str]:
    """Remove whatever below ``folder`` is neither a regular file nor a folder, and return its names. No process may still write there.

    Raises: SegmentError for folders nested deeper than any trainer leaves them.
    """
    removed: list[str] = []
    pending = [(os.fspath(folder), 0)]
    while pending:
        path, depth = pending.pop()
        if depth > DEPTH:
            raise SegmentError(
                f"{path[:300]} lies deeper than {DEPTH} folders: no trainer leaves that; remove it, then try again"
            )
        with contextlib.suppress(FileNotFoundError), os.scandir(path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append((entry.path, depth + 1))
                elif not entry.is_file(follow_symlinks=False):
                    os.unlink(entry.path)
                    removed.append(os.path.relpath(entry.path, folder))
    return removed


def parse_json_object(text: str | bytes) -> dict[str, Any]:
    """Raises: ValueError as ``parse_json``, and for anything but an object."""
    found = parse_json(text)
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object")
    return found


def parse_json(text: str | bytes) -> Any:
    """Raises: ValueError, also for integers of more than 18 digits, for halves of surrogate pairs and for deep nesting.

    >>> parse_json('{"loss": 2.5}')
    {'loss': 2.5}
    """
    try:
        text = text.decode() if isinstance(text, bytes) else text
        found = json.loads(text, parse_int=_integer)
        if HALF_PAIR.search(text):
            json.dumps(found, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return found


def _integer(text: str) -> int:
    if len(text) > DIGITS:
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text)
