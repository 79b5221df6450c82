"""An exchange with a language model as data (request, reply, cost), and the protocols of endpoints and books."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol

from kernels.contract.message import CodedError

ChatMessage = dict[
    str, Any
]  # a message of the chat completions API: {"role", "content", "tool_calls"?, "tool_call_id"?}
MOST_CALLS = 16  # tool calls of one reply; further ones are ignored


class LlmError(CodedError):
    """No reply came. The message gives the reason and the remedy."""


class BudgetError(LlmError):
    """The worst case of the next request would exceed the budget of the proposal or of the day. The request was not sent.
    ``lasting``: tomorrow's budget would not allow the request either."""

    def __init__(self, code: str, template: str = "", /, *, lasting: bool = True, **data: Any) -> None:
        super().__init__(code, template, **data)
        self.lasting = lasting


class SendError(LlmError):
    """One attempt failed. ``again``: another attempt may succeed, after ``after`` seconds if the endpoint says so.
    ``charged``: the endpoint may bill for this attempt."""

    def __init__(
        self, code: str, template: str = "", /, *, again: bool, charged: bool, after: float | None = None, **data: Any
    ) -> None:
        super().__init__(code, template, **data)
        self.again, self.charged, self.after = again, charged, after


@dataclass(frozen=True)
class Usage:
    """Tokens of one exchange."""

    input_tokens: int = 0
    output_tokens: int = 0

    @property
    def tokens(self) -> int:
        return self.input_tokens + self.output_tokens


@dataclass(frozen=True)
class ToolCall:
    """A tool that the model called in a reply."""

    id: str
    name: str
    arguments: str  # JSON as the model wrote it, which may be invalid


@dataclass(frozen=True)
class Request:
    """What is sent to the model. ``label``, which is not sent, names the exchange within its run."""

    label: str
    model: str
    messages: tuple[ChatMessage, ...]
    tools: tuple[dict[str, Any], ...] = ()
    temperature: float | None = None
    reply_tokens: int = 16_000

    def make_request_body(self) -> dict[str, Any]:
        """The body of the request, for the chat completions API."""
        made: dict[str, Any] = {"model": self.model, "messages": list(self.messages)}
        made |= {"max_completion_tokens": self.reply_tokens}
        if self.tools:
            made["tools"] = list(self.tools)
        if self.temperature is not None:
            made["temperature"] = self.temperature
        return made

    @property
    def worst_case_usage(self) -> Usage:
        """An upper bound of the usage: no token is shorter than a byte, and a chat template adds less than JSON does."""
        return Usage(len(json.dumps(self.make_request_body())), self.reply_tokens)


@dataclass(frozen=True)
class Reply:
    """The model's answer. ``finish``: why it ended, in the API's words ('stop', 'tool_calls', 'length'). ``usage``: None if it was not reported."""

    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    finish: str = "stop"
    usage: Usage | None = None

    def make_assistant_message(self) -> ChatMessage:
        """The assistant's message, to be sent back with the next request."""
        made: ChatMessage = {"role": "assistant", "content": self.text}
        if self.tool_calls:
            made["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return made


@dataclass(frozen=True)
class Exchange:
    """One attempt, as it is stored. The endpoint's key is not part of it."""

    request: Request
    endpoint: str
    began: float  # seconds since 1970
    ended: float
    usage: Usage
    usd: float
    reply: Reply | None
    error: str = ""


class Endpoint(Protocol):
    """A language model, wherever it runs."""

    name: str

    def send(self, request: Request) -> Reply:
        """Raises: SendError."""
        ...


class BudgetAccount(Protocol):
    """Keeps the budget: decides whether a request is affordable, and stores exchanges."""

    def reserve(self, label: str, tokens: int, usd: float) -> int:
        """Reserve the worst case of a request; returns the entry's number. Raises: BudgetError."""
        ...

    def settle(self, entry: int, exchange: Exchange) -> None:
        """Replace a reservation by the cost of the request. An entry that is never settled counts in full."""
        ...


def read_reply(message: object, usage: object = None, finish: str = "") -> Reply:
    """The reply in a message of the API. Tool calls may also be plain: ``{"name", "arguments"}``, arguments as an object.

    Raises: ValueError that says what is wrong.
    """
    if not isinstance(message, dict):
        raise ValueError("a reply is an object with 'content' or 'tool_calls'")
    text = message.get("content")
    calls = message.get("tool_calls") or []
    if not isinstance(text, (str, type(None))) or not isinstance(calls, list) or not (text or calls):
        raise ValueError("a reply has a 'content' (text), or 'tool_calls' (a list)")
    made = []
    for number, call in enumerate(calls[:MOST_CALLS]):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"tool call {number + 1} has no name")
        arguments = function.get("arguments", "{}")
        words = arguments if isinstance(arguments, str) else json.dumps(arguments)
        given = call.get("id")
        name = given if isinstance(given, str) and given else f"call_{number}"
        made.append(ToolCall(*map(_whole, (name, function["name"], words))))
    return Reply(_whole(text or ""), tuple(made), finish or ("tool_calls" if made else "stop"), read_usage(usage))


def _whole(text: str) -> str:
    """The text without lone surrogates, which JSON can contain and UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode()


def read_usage(raw: object) -> Usage | None:
    """The API's ``usage``; None if it is absent or invalid."""
    if not isinstance(raw, dict):
        return None
    counts = [raw.get(key) for key in ("prompt_tokens", "completion_tokens")]
    if not all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1 << 40 for n in counts):
        return None
    return Usage(*counts)  # type: ignore[arg-type]
