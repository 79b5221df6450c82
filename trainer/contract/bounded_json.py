"""Reads JSON that untrusted code wrote, with memory that is at most a small multiple of the text's length.

A Python object needs far more memory than its JSON text: 16 MiB of ``{}`` became a gigabyte. So the memory is estimated from the text before it is
parsed, and a text that needs too much is refused.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

FILE_BYTES = 64 << 20  # the largest file that is read
FLOOR, FACTOR = 32 << 20, 8  # bytes of memory that any text may need, and those for each byte of the text
# Bytes for each value, measured with CPython 3.11: an entry of a growing dict with a key of its own, or an object with one entry.
VALUE_BYTES = 128
DEPTH = 100  # most levels of nested values


def estimate_json_memory(text: str | bytes) -> int:
    """Return about how many bytes of memory the values of a JSON text need, besides the text itself and its strings.

    >>> estimate_json_memory(b'{"a": [1, 2, 3]}'), estimate_json_memory('[{}, {}]')
    (512, 512)
    """
    if isinstance(text, bytes):
        return VALUE_BYTES * (text.count(b",") + text.count(b"{") + text.count(b"["))
    return VALUE_BYTES * (text.count(",") + text.count("{") + text.count("["))


def refuse_costly_json(text: str | bytes) -> None:
    """Raises: ValueError for a text whose values would need far more memory than the text has bytes."""
    if estimate_json_memory(text) > FLOOR + FACTOR * len(text):
        raise ValueError("it has too many values for its length")


def refuse_deep_json(found: Any) -> None:
    """Raises: ValueError for a parsed value that is nested more deeply than ``DEPTH``, so that code which recurses into it cannot fail."""
    level = [found]
    for _ in range(DEPTH):
        level = [inner for one in level for inner in _list_containers(one)]
        if not level:
            return
    raise ValueError("it is nested too deeply")


def _list_containers(found: Any) -> list[Any]:
    values = found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
    return [value for value in values if isinstance(value, dict | list)]


def read_bounded_json(path: Path) -> Any:
    """Return the JSON value in a file. Raises: ValueError for a file that is too long, or as ``refuse_costly_json``; OSError."""
    with open(path, "rb") as file:
        text = file.read(min(FILE_BYTES, os.fstat(file.fileno()).st_size) + 1)
    if len(text) > FILE_BYTES:
        raise ValueError(f"it has more than {FILE_BYTES} bytes")
    return parse_bounded_json(text)


def parse_bounded_json(text: str | bytes) -> Any:
    """Return the JSON value in a text. Raises: ValueError, also as ``refuse_costly_json`` and ``refuse_deep_json``."""
    refuse_costly_json(text)
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    refuse_deep_json(found)
    return found
