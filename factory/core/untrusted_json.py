"""Reads JSON that code in the sandbox wrote: what it holds can be compared, stored and printed."""

from __future__ import annotations

import json
import re
from typing import Any

DIGITS = 18  # of an integer: SQLite's and float's
HALF_PAIR = re.compile(r"\\u[dD][89abAB]|\\u[dD][c-fC-F]")


def parse(text: str | bytes) -> Any:
    """Raises: ValueError, also for integers of more than 18 digits, for halves of surrogate pairs and for deep nesting.

    >>> parse('{"loss": 2.5}')
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
