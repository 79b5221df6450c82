"""Messages: text for people, with a code and data for programs. All packages use this module, so it is in the lowest package.

A ``Message`` is a ``str``, so it can be printed, joined and stored like text. It also has ``code`` and ``data``:

    >>> said = Message("release.guard_not_met", "{domain}: {change:+.3f} bits per byte in {groups:,|group|groups}.",
    ...                domain="code", change=-0.02, groups=1)
    >>> print(said)
    code: −0.020 bits per byte in 1 group.
    >>> said.code, said.data["change"]
    ('release.guard_not_met', -0.02)

The text is written at the place that uses it, as a template with plain names. ``tests/test_messages.py`` checks that each code has one text,
that each text has a code, and that the names in a template are the names of its data.
"""

from __future__ import annotations

import math
import string
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, Self


class Message(str):
    """Text for a person, with the ``code`` that identifies it in all versions, and the ``data`` from which it was made.

    Templates are ``str.format`` templates with three additions: a list is joined with ", ", a number with a sign uses "−", and
    "{count:,|file|files}" is a number with its noun. Raises: KeyError for a name without data.
    """

    code: str
    data: Mapping[str, Any]

    def __new__(cls, code: str, template: str, /, **data: Any) -> Self:
        return cls.from_parts(code, _TEMPLATES.vformat(template, (), data), data)

    @classmethod
    def from_parts(cls, code: str, text: str, data: Mapping[str, Any]) -> Self:
        """A message from its parts, for example from the ledger. ``code`` is '' if an older version stored only the text."""
        self = super().__new__(cls, text)
        self.code, self.data = code, data
        return self

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """The inverse of ``to_json``. A string is text without a code.

        >>> Message.from_json({"code": "data.none", "text": "No data.", "data": {}}).code, Message.from_json("No data.").code
        ('data.none', '')
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, dict):
            return cls.from_parts(str(value.get("code", "")), str(value.get("text", "")), value.get("data") or {})
        return cls.from_parts("", str(value), {})

    def to_json(self) -> dict[str, Any]:
        """The message as a JSON object with ``code``, ``text`` and ``data``."""
        return {
            "code": self.code,
            "text": str(self),
            "data": {name: messages_to_json(value) for name, value in self.data.items()},
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return Message.from_parts, (self.code, str(self), dict(self.data))


class CodedError(Exception):
    """An error that a user can cause. ``str(error)`` is its text; ``code`` and ``data`` are for programs.

    >>> str(CodedError("ingest.no_column", "{file}: no column {column!r}.", file="a.csv", column="text"))
    "a.csv: no column 'text'."
    """

    def __init__(self, code: str, template: str = "", /, **data: Any) -> None:
        self.message = (
            Message(code, template, **data) if template else Message.from_json(code) if type(code) is str else code
        )
        super().__init__(self.message)

    @property
    def code(self) -> str:
        return getattr(self.message, "code", "")

    @property
    def data(self) -> Mapping[str, Any]:
        return getattr(self.message, "data", {})


def format_error_with_code(error: BaseException) -> str:
    """The text that a command prints for an error: its code and its message.

    >>> format_error_with_code(CodedError("ingest.no_file", "{file}: no such file.", file="a.csv"))
    'error[ingest.no_file]: a.csv: no such file.'
    """
    code = getattr(error, "code", "")
    return f"error[{code}]: {error}" if code else str(error)


class _Templates(string.Formatter):
    def format_field(self, value: Any, spec: str) -> str:
        if isinstance(value, list | tuple | set | frozenset):
            return ", ".join(
                self.format_field(one, spec) for one in (sorted(value) if isinstance(value, set | frozenset) else value)
            )
        if spec.count("|") == 2:
            spec, one, more = spec.split("|")
            return f"{format(value, spec)} {one if value == 1 else more}"
        shown = str(value) if isinstance(value, PurePath | BaseException) and not spec else format(value, spec)
        return shown.replace("-", "−") if spec.startswith("+") else shown


_TEMPLATES = _Templates()


def messages_to_json(value: Any) -> Any:
    """``value`` as JSON values, at any depth. Messages become JSON objects. Values that JSON cannot represent become text.

    >>> messages_to_json({"reasons": [Message("data.none", "No data.")], "at": float("nan")})
    {'reasons': [{'code': 'data.none', 'text': 'No data.', 'data': {}}], 'at': 'nan'}
    """
    if isinstance(value, Message):
        return value.to_json()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): messages_to_json(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [
            messages_to_json(one) for one in (sorted(value, key=str) if isinstance(value, set | frozenset) else value)
        ]
    return str(value)
