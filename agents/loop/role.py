"""What makes the loop one agent or another. A role has no state of a run: that is in the aim and the messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agents.core.proposal import Proposal

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
