"""What makes the loop one agent or another. A role has no state of a run: that is in the aim and the messages. And how it parses the arguments of a
model's tool call, which are untrusted: whatever is wrong is a ``DraftError`` that the model can act on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agents.core.proposal import Proposal
from agents.core.untrusted import one_line

JsonObject = dict[str, Any]


class TargetError(Exception):
    """The requested target does not exist, or may not be changed."""


class DraftError(Exception):
    """What is wrong with a draft, in words that the model can act on."""


@dataclass(frozen=True)
class Aim:
    """What one run works on. ``prompt``: the first message to the model; ``about``: a line for people; ``facts``: plain JSON, passed to the
    role with each call."""

    prompt: str
    about: str
    facts: JsonObject


class Role(Protocol):
    name: str
    """The agent's, as in ``Proposal.agent``."""
    system: str
    """The system message: the task, how a proposal is judged, what is data."""
    tools: Sequence[JsonObject]
    """As of the chat completions API; ``tools.PROPOSE`` is one of them."""

    def aim(self, rounds: int) -> Aim | str:
        """What to work on with ``rounds`` proposals, or why there is nothing to do. Raises: TargetError."""
        ...

    def answer(self, facts: JsonObject, tool: str, arguments: str) -> str:
        """A tool's answer (all but ``propose``), limited in length and marked as data; or why the call cannot be answered."""
        ...

    def draft(self, facts: JsonObject, arguments: str, tried: str) -> Proposal:
        """The proposal that a call of ``propose`` makes; ``tried``: the arguments of the last ``try_patch``, or ''. Raises: DraftError."""
        ...

    def check(self, facts: JsonObject, draft: Proposal) -> str:
        """What the quick check finds wrong with a proposal, for the model; '': nothing."""
        ...


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
