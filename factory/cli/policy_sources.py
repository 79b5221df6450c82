"""Lists the values of a policy with their sources and meanings, for ``factory config show``.

A separate file, because this file imports pydantic, and that import takes longer than 'factory status' may take.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

DEFAULT = "default"
_ABSENT = object()


@dataclass(frozen=True)
class PolicySetting:
    """One key in force. ``source``: ``DEFAULT`` for a key that the file does not set, otherwise the origin of the file."""

    key: str
    value: Any
    source: str
    about: str


def list_settings(policy: BaseModel, raw: object, source: str, key_prefix: str = "") -> Iterator[PolicySetting]:
    """Yield every key of a loaded policy. ``raw``: the parsed file. ``source``: the source of the keys that the file sets."""
    about = read_field_docs(type(policy))
    for name in type(policy).model_fields:
        yield from _value(f"{key_prefix}{name}", getattr(policy, name), _given(raw, name), source, about.get(name, ""))


def _value(key: str, value: Any, given: object, source: str, about: str) -> Iterator[PolicySetting]:
    if isinstance(value, BaseModel):
        yield from list_settings(value, given, source, f"{key}.")
    elif isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _value(f"{key}.{name}", inner, _given(given, name), source, about)
    else:
        yield PolicySetting(key, _plain(value), DEFAULT if given is _ABSENT else source, about)


def _given(raw: object, name: str) -> object:
    return raw.get(name, _ABSENT) if isinstance(raw, Mapping) else _ABSENT


def _plain(value: Any) -> Any:
    """Return ``value`` as JSON-ready data."""
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else value


def read_field_docs(schema: type) -> dict[str, str]:
    """Return, by field of a class, the field's documentation on one line: the string below the field, or the comment behind the field."""
    text = textwrap.dedent(inspect.getsource(schema))
    lines = text.splitlines()
    found: dict[str, str] = {}
    (definition,) = ast.parse(text).body
    assert isinstance(definition, ast.ClassDef)
    for node, below in zip(definition.body, [*definition.body[1:], ast.Pass()]):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        said = lines[(node.end_lineno or 0) - 1].encode()[node.end_col_offset :].decode().strip().removeprefix("#")
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            said = below.value.value
        found[node.target.id] = " ".join(said.split())
    return found
