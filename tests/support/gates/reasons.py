"""What a reason says, by codes and data at any depth: a reason may hold other messages as data.

said = expect("release.guard_not_shown", guard="code", loss=0.02, why="release.number_unknown")
assert tells(verdict.reasons, said)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from kernels.contract.message import Message

Expected = tuple[str, dict[str, Any]]


def expect(code: str, /, **data: Any) -> Expected:
    """A message with this code, in which each name has this value. The value of a message is its text or its code."""
    return code, data


def tells(said: Iterable[Any], expected: Expected) -> bool:
    """True if one of these messages, or a message in its data, has the expected code and data."""
    code, data = expected
    return any(
        one.code == code and all(has(one, name, value) for name, value in data.items())
        for reason in said
        for one in parts(Message.from_json(reason))
    )


def parts(message: Message) -> Iterator[Message]:
    """A message, and all messages in its data."""
    yield message
    for value in message.data.values():
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, Message) or (isinstance(one, dict) and one.keys() == {"code", "text", "data"}):
                yield from parts(Message.from_json(one))


def has(message: Message, name: str, value: Any) -> bool:
    """True if ``name`` has this value in the data of a message, or of a message in its data."""
    found = (one.data[name] for one in parts(message) if name in one.data)
    return any(_same(one, value) or (value and value == _code(one)) for one in found)


def _code(value: Any) -> str:
    return str(value.get("code", "")) if isinstance(value, dict) else getattr(value, "code", "")


def _same(found: Any, value: Any) -> bool:
    if isinstance(value, float) and isinstance(found, int | float):
        return bool(found == pytest.approx(value, abs=5e-4))
    if isinstance(value, list) and isinstance(found, list | tuple) and len(value) == len(found):
        return all(_same(one, other) for one, other in zip(found, value, strict=True))
    return bool(found == value)
