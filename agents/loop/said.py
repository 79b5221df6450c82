"""Parses the arguments of a model's tool call, which are untrusted: whatever is wrong is a ``DraftError`` that it can act on."""

from __future__ import annotations

import json
from typing import Any

from agents.core.untrusted import one_line
from agents.loop.role import DraftError

LARGEST = 1e30


def read_object(arguments: str) -> dict[str, Any]:
    """The arguments of a call. Raises: DraftError, as all here."""
    try:
        raw = json.loads(arguments)
    except (ValueError, RecursionError) as error:
        raise DraftError(f"the arguments are not JSON ({one_line(str(error), 120)}); were they cut off?") from None
    if not isinstance(raw, dict):
        raise DraftError("the arguments are not a JSON object")
    return raw


def title_and_hypothesis(raw: dict[str, Any]) -> tuple[str, str]:
    """One line each, not empty."""
    title, hypothesis = (one_line(text(raw, key), limit) for key, limit in (("title", 80), ("hypothesis", 2000)))
    if not title or not hypothesis:
        raise DraftError("title and hypothesis may not be empty")
    return title, hypothesis


def text(raw: dict[str, Any], key: str, where: str = "") -> str:
    value = raw.get(key)
    if not isinstance(value, str):
        raise DraftError(f"{where}{key} is not a text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise DraftError(f"{where}{key} holds half a character (a lone surrogate)") from None
    return value


def number(raw: dict[str, Any], key: str) -> float:
    """Finite, and not beyond 1e30."""
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -LARGEST < value < LARGEST:
        raise DraftError(f"{key} is not a number")
    return float(value)
