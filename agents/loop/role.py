"""What makes the loop one agent or another. A role remembers nothing of a run: that is in its aim, and in the messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agents.core.proposal import Proposal

JsonObject = dict[str, Any]


class TargetError(Exception):
    """The target that was asked for is not there, or may not be changed."""


class DraftError(Exception):
    """What is wrong with a draft, in words that the model may act on."""


@dataclass(frozen=True)
class Aim:
    """What one run works on. ``told``: the first message to the model; ``about``: a line for people; ``facts``: plain JSON, handed
    back to the role with each call."""

    told: str
    about: str
    facts: JsonObject


class Role(Protocol):
    name: str
    """The agent's, as in ``Proposal.agent``."""
    system: str
    """What the model is told first: its task, how it is judged, what is data."""
    tools: Sequence[JsonObject]
    """As of the chat completions API; ``tools.PROPOSE`` is one of them."""

    def aim(self, rounds: int) -> Aim | str:
        """What to work on with so many proposals, or why there is nothing to do. Raises: TargetError."""
        ...

    def answer(self, facts: JsonObject, tool: str, arguments: str) -> str:
        """A tool's answer (all but ``propose``), bounded and marked as data; a call that cannot be answered says why."""
        ...

    def draft(self, facts: JsonObject, arguments: str, tried: str) -> Proposal:
        """The proposal that a call of ``propose`` makes; ``tried``: the arguments of the last ``try_patch``, or ''. Raises: DraftError."""
        ...

    def check(self, facts: JsonObject, draft: Proposal) -> str:
        """What is wrong with a proposal that could be read, quickly checked, for the model; '': nothing."""
        ...
