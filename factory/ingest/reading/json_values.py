"""JSON arrays, and JSON values one after another, value by value: a file of any size in the memory of one value.

>>> list(values(iter([b'[{"a": "]"}, {"b', b'": [1]}]']), 100))
[b'{"a": "]"}', b'{"b": [1]}']
>>> list(values(iter([b'{"a": 1}\\n{"a":\\n 2}']), 100))
[b'{"a": 1}', b'{"a":\\n 2}']
"""

from __future__ import annotations

import codecs
import itertools
import json
import re
from collections.abc import Iterator

from factory.ingest.reading.rows import RawRow, ShardProblem
from factory.ingest.reading.streams import Readable, blocks, lines

_BLANK = re.compile(r"[\ufeff \t\r\n]*")
_JSON = json.JSONDecoder(parse_int=str, parse_float=str, strict=False)  # what is wrong inside a value costs its row


def read_json(source: Readable) -> Iterator[RawRow]:
    """A ``.json`` file: one array, whose items are rows; or, as today, JSON lines; or objects written over several lines."""
    with source.open() as stream:
        if is_lines(source):
            yield from lines(stream, source.limits.max_row_bytes)
        else:
            yield from values(blocks(stream), source.limits.max_row_bytes)


def is_lines(source: Readable) -> bool:
    """Does a file hold a row in each line, and not one array or values over several lines?"""
    with source.open() as stream:
        head = next(blocks(stream)).removeprefix(b"\xef\xbb\xbf").lstrip()
    if not head.startswith(b"{"):
        return not head.startswith(b"[")
    first, end, _ = head.partition(b"\n")
    try:
        return not end or bool(_JSON.decode(first.decode("utf-8", "replace")))
    except (ValueError, RecursionError):
        return False


def values(found: Iterator[bytes], max_bytes: int) -> Iterator[RawRow]:
    """The items of an array, or objects one after another.

    Raises: ShardProblem for a file that ends too early, holds something after its array, or a value that is no JSON or over ``max_bytes``.
    """
    decode = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode
    text, at, count = "", 0, 0
    array: bool | None = None  # None: nothing but blanks so far
    wanted, closed = False, False  # an item, behind a comma; the array was
    for block in itertools.chain(found, [b""]):
        text, at = text[at:] + decode(block, not block), 0
        while (at := _BLANK.match(text, at).end()) < len(text):  # type: ignore[union-attr]
            if closed:
                raise ShardProblem(f"something follows the JSON array of {count} items: {text[at : at + 20]!r}")
            if array is None and (array := text[at] == "["):
                at += 1
            elif array and not wanted and text[at] == "]":
                closed, at = True, at + 1
            elif array and not wanted and count:
                if text[at] != ",":
                    raise ShardProblem(f"not JSON: {text[at]!r} after {count} items of the array")
                wanted, at = True, at + 1
            else:
                try:
                    _, end = _JSON.raw_decode(text, at)
                except (ValueError, RecursionError) as error:
                    if not block or len(text) - at > max_bytes:
                        raise ShardProblem(_no_value(count, not block, max_bytes, error)) from error
                    break  # its end is in the next block
                yield text[at:end].encode("utf-8", "surrogateescape")
                count, wanted, at = count + 1, False, end
    if array and not closed:
        raise ShardProblem(f"the JSON array is cut off after {count} whole items")


def _no_value(count: int, is_end: bool, max_bytes: int, error: Exception) -> str:
    if is_end:
        return f"cut off after {count} whole items, or no JSON there: {error}"
    return f"no JSON, or more than {max_bytes} bytes (limits.max_row_bytes), after {count} items: {error}"
