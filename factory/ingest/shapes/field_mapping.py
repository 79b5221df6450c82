"""Reads ``data.yaml: fields``, which gives the columns of a team's own files their meaning.

A value is the dotted path of a column, a template of columns, or a constant:

    >>> row = {"title": "T", "body": "B", "meta": {"lang": "en"}, "turns": [{"text": "hi"}], "a.b": 1}
    >>> [read_mapped_value(parse_mapped_value(value), row) for value in ("meta.lang", "turns.0.text", "a.b", "{title}\\n\\n{body}", "=prose")]
    ['en', 'hi', 1, 'T\\n\\nB', 'prose']
    >>> [read_mapped_value(parse_mapped_value(value), row) for value in ("meta.country", "{title} of {nobody}", "{{{title}}}")]
    [None, None, '{T}']
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import chain, islice
from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from factory.core.policy_file import StrictPolicy
from factory.ingest.shapes.bad_row import BadRow
from factory.ingest.shapes.chats import Meaningful
from kernels.contract.message import Message

_PIECE = re.compile(r"\{\{|\}\}|\{([^{}]+)\}|([{}])")
_PART = re.compile(r"#\d+\.jsonl(\.zst)?\Z")  # the end of the name of a part of a file
_MOST_COLUMNS = 200  # at most this many columns of a row are compared with the name of a missing column


@dataclass(frozen=True)
class MappedValue:
    """A parsed value of the mapping. ``pieces`` has texts at even places and columns between them. ``plain`` means a single column, whose value is
    not converted to text."""

    pieces: tuple[str, ...]
    plain: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        return self.pieces[1::2]


@lru_cache(maxsize=1024)
def parse_mapped_value(value: str) -> MappedValue:
    """Parse a value of the mapping. Raises: ValueError for an empty value, and for a brace that is neither closed nor doubled."""
    if not value.strip():
        raise ValueError(
            "the value is empty: name a column, a template of columns ('{title}: {body}'), or a constant ('=MIT')"
        )
    if value.startswith("="):
        return MappedValue((value[1:],))
    if "{" not in value and "}" not in value:
        return MappedValue(("", value, ""), plain=True)
    pieces, end = [""], 0
    for found in _PIECE.finditer(value):
        pieces[-1] += value[end : found.start()]
        end = found.end()
        if found[2]:
            raise ValueError(
                f"{value!r} has a brace without its other half; write {{column}} for a column, '{{{{' for a brace"
            )
        if found[1]:
            pieces += [found[1], ""]
        else:
            pieces[-1] += found[0][0]
    pieces[-1] += value[end:]
    return MappedValue(tuple(pieces))


def _checked(value: str) -> str:
    parse_mapped_value(value)
    return value


def _no_constant(value: str) -> str:
    if not parse_mapped_value(value).columns:
        raise ValueError(f"{value!r} names no column: every row would have the same value")
    return value


def _a_file_name(pattern: str) -> str:
    if "/" in pattern:
        raise ValueError(f"{pattern!r} has a folder: name files without their folder")
    return pattern


Column = Annotated[str, AfterValidator(_no_constant)]
ColumnOrConstant = Annotated[str, AfterValidator(_checked)]
NAMES = ("domain", "source", "license", "id", "url", "path", "conversation", "synthetic_by")


class FieldMapping(StrictPolicy):
    """The meaning of the columns in files with matching names. A value is a dotted path ('meta.lang', 'turns.0.content'), a template ('{title}:
    {body}'), or a constant ('=prose'). A key that is not mapped is read as if there were no mapping."""

    files: Annotated[str, Field(min_length=1), AfterValidator(_a_file_name)]
    """Pattern of the files' names ('*.csv'). The first mapping that matches is used."""
    text: Column | None = None
    """The text of a plain document."""
    messages: Column | None = None
    """The turns of a chat: a list of objects with role and content, or from and value."""
    prompt: Column | None = None
    """The user's question. It needs ``completion``."""
    completion: Column | None = None
    """The assistant's answer to ``prompt``."""
    system: ColumnOrConstant | None = None
    """The system turn of a chat, before all other turns."""
    domain: ColumnOrConstant | None = None
    source: ColumnOrConstant | None = None
    license: ColumnOrConstant | None = None
    """An SPDX name or expression. If the value is a list of names, all of them apply."""
    id: Column | None = None
    url: Column | None = None
    """The address from which a document comes. Its host may be the document's group."""
    path: Column | None = None
    """The path of the file that contains a document. It may be the document's group."""
    conversation: Column | None = None
    """The conversation to which a document belongs. It may be the document's group."""
    synthetic_by: ColumnOrConstant | None = None
    """The model that wrote the document."""
    ignore: list[Meaningful] = []
    """Fields of a chat with a meaning (tools, reasoning, images …) that ingest drops. The texts stay."""

    @model_validator(mode="after")
    def _one_content(self) -> FieldMapping:
        if (self.prompt is None) != (self.completion is None):
            raise ValueError("one of 'prompt' and 'completion' is missing: map both")
        contents = [name for name in ("text", "messages", "prompt") if getattr(self, name) is not None]
        if len(contents) > 1:
            raise ValueError(f"{' and '.join(map(repr, contents))} are both mapped: map only one of them")
        if self.system is not None and contents == ["text"]:
            raise ValueError("'system' and 'text' are both mapped, but only a chat has a system turn")
        return self

    def get_mapped_value(self, name: str) -> MappedValue | None:
        """Return the value to which a key is mapped, or None if the key is not mapped."""
        value = getattr(self, name)
        return None if value is None else parse_mapped_value(value)

    def list_mapped_values(self) -> Iterator[tuple[str, MappedValue]]:
        """Yield (key, value) of all mapped keys."""
        for name in ("text", "messages", "prompt", "completion", "system", *NAMES):
            if (value := self.get_mapped_value(name)) is not None:
                yield name, value


def get_original_file_name(shard: str) -> str:
    """Return the name of the file that a shard is a part of, or the shard's own name if it is a whole file.

    >>> get_original_file_name("a.csv#2.jsonl.zst"), get_original_file_name("a.jsonl")
    ('a.csv', 'a.jsonl')
    """
    return _PART.sub("", shard)


def find_field_mapping(fields: list[FieldMapping], *files: str) -> tuple[int, FieldMapping] | None:
    """Return (place in ``fields``, mapping) of the first mapping for a file with one of these names, or None. A name '' is ignored. A part of a file
    has the file's mapping.

    >>> fields = [FieldMapping(files="*.csv", text="a"), FieldMapping(files="x*", text="b")]
    >>> [found[0] if (found := find_field_mapping(fields, name)) else None for name in ("a.csv", "a.csv#2.jsonl.zst", "x.jsonl", "y.jsonl")]
    [0, 0, 1, None]
    """
    names = {name for file in files if file for name in (file, get_original_file_name(file))}
    return next(
        ((at, one) for at, one in enumerate(fields) if any(fnmatchcase(name, one.files) for name in names)), None
    )


def read_mapped_value(value: MappedValue, row: Mapping[str, Any]) -> Any:
    """Return the value in this row, or None if the row lacks one of the columns. Raises: BadRow if a column in a template is not a text or a
    number."""
    found = [_at(row, path) for path in value.columns]
    if value.plain:
        return found[0]
    if any(one is None for one in found):
        return None
    words = [_in_words(path, one) for path, one in zip(value.columns, found, strict=True)]
    return "".join(piece for pair in zip(value.pieces[::2], [*words, ""], strict=True) for piece in pair)


def has_column(row: Mapping[str, Any], path: str) -> bool:
    """Return whether a row has this column. The column may be empty."""
    return any(True for _ in _places(row, path))


def list_columns(row: Mapping[str, Any]) -> set[str]:
    """Return the columns of a row, and the columns of the records in it as dotted paths.

    >>> sorted(list_columns({"a": 1, "b": {"c": [{"d": 2}]}}))
    ['a', 'b', 'b.c']
    """
    inner = (f"{name}.{key}" for name, value in row.items() if isinstance(value, Mapping) for key in value)
    return set(islice(chain(map(str, row), inner), _MOST_COLUMNS))


def _at(row: Mapping[str, Any], path: str) -> Any:
    return next((value for value in _places(row, path) if value is not None), None)


def _places(value: Any, path: str) -> Iterator[Any]:
    """Yield the values at a path. Keys that themselves contain dots are found too, and come first."""
    if isinstance(value, Mapping):
        if path in value:
            yield value[path]
        for dot in (at for at in range(len(path) - 1, 0, -1) if path[at] == "."):
            if path[:dot] in value:
                yield from _places(value[path[:dot]], path[dot + 1 :])
    elif isinstance(value, list):
        first, _, rest = path.partition(".")
        if first.isascii() and first.isdigit() and len(first) < 10 and int(first) < len(value):
            inner = value[int(first)]
            yield from _places(inner, rest) if rest else (inner,)


def _in_words(path: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) or isinstance(value, float) and math.isfinite(value):
        try:
            return str(value)
        except ValueError:  # the number has more digits than Python converts to text
            pass
    wrong = Message(
        "shapes.template_value",
        "the column {column!r} of a template is {kind}; a text or a number is expected",
        column=path,
        kind=type(value).__name__,
    )
    raise BadRow("bad_schema", wrong)
