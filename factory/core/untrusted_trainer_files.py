"""Reads files that a trainer wrote. A trainer runs code that an agent may have written, so its files are not trusted.

While a trainer runs, these functions open its files safely: they follow no link, do not block on a pipe, and read a bounded number of bytes. After
the trainer has ended, ``remove_special_files`` removes all entries that are neither files nor folders. From then on, paths in the folder can be
trusted.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from factory.core.errors import SegmentError
from factory.core.faults import is_machine_fault_unrelated_to_files
from kernels.contract.message import Message
from trainer.contract.bounded_json import FACTOR, FLOOR, estimate_json_memory, refuse_costly_json, refuse_deep_json

DEPTH = 8  # most levels of nested folders: a checkpoint has two, a checkpoint of a certificate's runs five
JSON_BYTES = 16 << 20  # size of the largest JSON file that is read
LINE_BYTES = 1 << 20  # length of the longest line of a JSON Lines file
LINE_MEMORY = 256  # bytes for the dict of a line
DIGITS = 18  # most digits of an integer: SQLite stores no more
HALF_PAIR = re.compile(r"\\u[dD][89abAB]|\\u[dD][c-fC-F]")


def open_regular_file(path: Path) -> BinaryIO:
    """Open a regular file for reading.

    Raises: FileNotFoundError for a missing file, for an entry that is not a regular file, and for a file with a lease; OSError for other errors.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except BlockingIOError:
        why = Message(
            "untrusted_trainer_files.lease", "Another process blocks {path} with a file lease (F_SETLEASE)", path=path
        )
        raise FileNotFoundError(why) from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise FileNotFoundError(
            Message("untrusted_trainer_files.not_regular", "{path} is not a regular file", path=path)
        )
    return os.fdopen(handle, "rb")


def read_tail(path: Path, limit: int) -> bytes:
    """Return the last ``limit`` bytes of a file; no bytes if the file does not exist."""
    try:
        with open_regular_file(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - limit))
            return file.read(limit)
    except OSError:
        return b""


def count_lines(path: Path) -> int:
    """Return the number of lines of a file; 0 if the file does not exist. Memory does not grow with the file."""
    try:
        with open_regular_file(path) as file:
            return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
    except OSError:
        return 0


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file of at most ``JSON_BYTES`` bytes.

    Raises: SegmentError when the file is missing, too long or not UTF-8; OSError for a fault of the machine that no file can cause.
    """
    try:
        with open_regular_file(path) as file:
            found = file.read(JSON_BYTES + 1)
        if len(found) <= JSON_BYTES:
            return found.decode()
        why = Message("untrusted_trainer_files.too_long", "the file has more than {limit} bytes", limit=JSON_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        if is_machine_fault_unrelated_to_files(error):
            raise
        why = Message.from_json(error.args[0] if error.args and isinstance(error.args[0], Message) else str(error))
    raise make_unreadable_error(path, why)


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file. Raises: SegmentError when the file is unreadable or is not one JSON object."""
    return parse_json_object_of_file(read_text(path), path)


def parse_json_object_of_file(text: str | bytes, path: Path) -> dict[str, Any]:
    """Return the JSON object in ``text``, which was read from the file ``path``. Raises: SegmentError."""
    try:
        return parse_json_object(text)
    except ValueError as error:
        raise make_unreadable_error(path, str(error)[:300]) from None


def make_unreadable_error(path: Path, why: str) -> SegmentError:
    """Return the error for a file that cannot be read."""
    return SegmentError("untrusted_trainer_files.unreadable", "{path} cannot be read: {why}", path=path, why=why)


def remove_special_files(folder: Path) -> list[str]:
    """Remove each entry below ``folder`` that is neither a regular file nor a folder. Returns the names of the removed entries.

    Call it only when no process writes there any more. Raises: SegmentError for folders that are nested deeper than a trainer nests them.
    """
    removed: list[str] = []
    pending = [(os.fspath(folder), 0)]
    while pending:
        path, depth = pending.pop()
        if depth > DEPTH:
            raise SegmentError(
                "untrusted_trainer_files.too_deep",
                "{path} is more than {limit} folders deep. No trainer makes such a folder. Remove the folder, then try again",
                path=path[:300],
                limit=DEPTH,
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
    """Return the JSON object in ``text``. Raises: ValueError as ``parse_json`` does, and for a JSON value that is not an object."""
    found = parse_json(text)
    if not isinstance(found, dict):
        raise ValueError("it is not a JSON object")
    return found


def parse_json(text: str | bytes) -> Any:
    """Return the JSON value in ``text``. It needs memory of at most a small multiple of the text's length (``trainer.contract.bounded_json``).

    Raises: ValueError, also for integers of more than 18 digits, halves of surrogate pairs, deep nesting and too many values.

    >>> parse_json('{"loss": 2.5}')
    {'loss': 2.5}
    """
    refuse_costly_json(text)
    try:
        text = text.decode() if isinstance(text, bytes) else text
        found = json.loads(text, parse_int=_integer)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    refuse_deep_json(found)
    if HALF_PAIR.search(text):
        _refuse_half_pairs(found)
    return found


def _refuse_half_pairs(found: Any) -> None:
    """Raises: UnicodeEncodeError, which is a ValueError, for a string that no UTF-8 text can have."""
    pending = [found]
    while pending:
        one = pending.pop()
        if isinstance(one, str):
            one.encode()
        elif isinstance(one, dict):
            pending += [*one.keys(), *one.values()]
        elif isinstance(one, list):
            pending += one


def iterate_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file without their ends. Of a line that is longer than ``LINE_BYTES`` only the beginning is yielded, which is no JSON."""
    whole = True
    while line := file.readline(LINE_BYTES):
        if whole:
            yield line.rstrip(b"\r\n")
        whole = line.endswith(b"\n")


@dataclass
class LinesMemory:
    """Adds up the memory that the parsed lines of a JSON Lines file need, so that it stays a small multiple of the file's length.

    Lines that a reader does not keep count too, which also bounds the time that a file of many short lines takes.
    """

    needed: int = 0
    read: int = 0

    def add(self, line: bytes) -> None:
        """Add a line before it is parsed. Raises: ValueError if the lines so far need too much memory."""
        self.needed += LINE_MEMORY + estimate_json_memory(line)
        self.read += len(line)
        if self.needed > FLOOR + FACTOR * self.read:
            raise ValueError("its lines have too many values for their length")


def _integer(text: str) -> int:
    if len(text) > DIGITS:
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text)
