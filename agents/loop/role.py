"""The protocol of a role, which defines an agent of the loop, and functions that parse the arguments of a model's tool call.

A role holds no state of a run: the aim and the messages hold that. The arguments are untrusted: each error is a ``DraftError`` on which
the model can act.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agents.core.proposal import Proposal
from agents.core.untrusted import fold_to_one_line
from kernels.contract.message import CodedError, Message

JsonObject = dict[str, Any]


class TargetError(CodedError):
    """The requested target does not exist, or may not be changed."""


class DraftError(CodedError):
    """A draft is wrong. The message tells the model what to correct."""


@dataclass(frozen=True)
class AgentTask:
    """What one run works on. ``prompt``: the first message to the model. ``about``: a line for people. ``facts``: plain JSON, passed to
    the role with each call. ``target``: the name under which later runs find why the agent declined."""

    prompt: str
    about: str
    facts: JsonObject
    target: str = ""


class Role(Protocol):
    """One agent: its task, its tools, and how its drafts are checked."""

    name: str
    """The agent's name, as in ``Proposal.agent``."""
    system: str
    """The system message. It gives the task, says how a proposal is judged, and says which text is data."""
    tools: Sequence[JsonObject]
    """Definitions of tools for the chat completions API. ``tools.PROPOSE`` is one of them, and ``tools.DECLINE`` may be."""

    def choose_task(self, rounds: int) -> AgentTask | str:
        """What to work on with ``rounds`` proposals, or the reason why there is nothing to do. Raises: TargetError."""
        ...

    def answer_tool_call(self, facts: JsonObject, tool: str, arguments: str) -> str:
        """The answer of a tool other than ``propose`` and ``decline``, limited in length and marked as data; or the reason why it cannot answer."""
        ...

    def make_proposal(self, facts: JsonObject, arguments: str, tried: Sequence[str]) -> Proposal:
        """The proposal that a call of ``propose`` makes; ``tried``: the arguments of all calls of ``try_patch``. Raises: DraftError."""
        ...

    def check_proposal(self, facts: JsonObject, draft: Proposal) -> str:
        """The problems that the quick check finds in a proposal, for the model; '' if there are none."""
        ...


LARGEST = 1e30
LEAST_REASON, MOST_REASON = 40, 1000  # characters of the reason why an agent declines a target


def parse_arguments(arguments: str) -> dict[str, Any]:
    """The arguments of a call, parsed. Raises: DraftError, as the other reading functions here do."""
    try:
        raw = json.loads(arguments)
    except (ValueError, RecursionError) as error:
        problem = fold_to_one_line(str(error), 120)
        raise DraftError(
            "loop.not_json", "The arguments are not JSON ({problem}). Were they cut off?", problem=problem
        ) from None
    if not isinstance(raw, dict):
        raise DraftError("loop.not_an_object", "The arguments are not a JSON object.")
    return raw


def read_title_and_hypothesis(raw: dict[str, Any]) -> tuple[str, str]:
    """(title, hypothesis), each of one line and not empty."""
    title, hypothesis = (
        fold_to_one_line(read_text(raw, key), limit) for key, limit in (("title", 80), ("hypothesis", 2000))
    )
    if not title or not hypothesis:
        raise DraftError("loop.empty", "title and hypothesis must not be empty.")
    return title, hypothesis


def read_decline_reason(arguments: str) -> str:
    """The reason of a call of ``decline``, on one line. Raises: DraftError."""
    reason = fold_to_one_line(read_text(parse_arguments(arguments), "reason"), MOST_REASON)
    if len(reason) < LEAST_REASON:
        raise DraftError(
            "loop.short_reason",
            "The reason has {length} characters, but at least {least} are needed. Say what you tried or measured, and why nothing is to gain.",
            length=len(reason),
            least=LEAST_REASON,
        )
    return reason


def read_text(raw: dict[str, Any], key: str, where: str = "") -> str:
    value = raw.get(key)
    if not isinstance(value, str):
        raise DraftError("loop.not_text", "{where}{key} is not text.", where=where, key=key)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise DraftError(
            "loop.lone_surrogate", "{where}{key} contains half a character (a lone surrogate).", where=where, key=key
        ) from None
    return value


def read_number(raw: dict[str, Any], key: str) -> float:
    """A number between −1e30 and 1e30."""
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -LARGEST < value < LARGEST:
        raise DraftError("loop.not_a_number", "{key} is not a number.", key=key)
    return float(value)


def make_nearest_name_hint(near: str) -> Message:
    """The hint of an error that knows a name close to the given one."""
    return Message("loop.near", "Did you mean {near!r}?", near=near)


def make_known_names_hint(known: Sequence[str]) -> Message:
    """The hint of an error that knows no name close to the given one."""
    return Message("loop.known", "Choose one of: {known}.", known=list(known))
