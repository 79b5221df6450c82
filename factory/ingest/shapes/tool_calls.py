"""Writes tools, tool calls and reasoning as text, in the form of the training data and of the exported chat template.

Hermes 2 Pro and Qwen2.5 use this form, and vLLM's parser ``hermes`` and others read it. All of it is ordinary text without special tokens.

    >>> print(render_answer("Let me see.", "Which town?", [DocumentToolCall("weather", {"town": "Zürich"})]))
    <think>
    Which town?
    </think>
    <BLANKLINE>
    Let me see.
    <tool_call>
    {"name": "weather", "arguments": {"town": "Zürich"}}
    </tool_call>

JSON is written as transformers' filter ``tojson`` writes it: characters as they are, keys in the order of the row. The keys of a tool are in
the order of vLLM's API (name, description, parameters, others). Keys with null are left out, because that API adds some.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from factory.ingest.shapes.bad_row import BadRow
from factory.ingest.shapes.tools_prompt import TOOL_KEYS, TOOLS_HEAD, TOOLS_TAIL
from kernels.contract.message import Message

REASONING_KEYS = (
    "reasoning_content",
    "reasoning",
    "thinking",
)  # used by DeepSeek and Qwen; by OpenRouter and vLLM; by gpt-oss
CALLS = ("tool_calls", "function_call")  # OpenAI's key, and its older key
TOOLS = ("tools", "functions")


@dataclass(frozen=True)
class DocumentToolCall:
    """A tool call in a turn. A result may refer to the call by ``id``."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: Any = None


@dataclass(frozen=True)
class OfferedTool:
    """A tool that a system turn offers. ``json_line`` is the tool as one line of JSON."""

    name: str
    json_line: str


def render_answer(content: str, reasoning: str, calls: Sequence[DocumentToolCall]) -> str:
    """Return the text of an assistant's turn. Content without reasoning and calls stays as it is."""
    if not reasoning and not calls:
        return content
    said = "\n".join([*([content.strip()] if content.strip() else []), *map(_called, calls)])
    if not reasoning:
        return said
    return f"<think>\n{reasoning}\n</think>" + (f"\n\n{said}" if said else "")


def append_tools(system: str, tools: Sequence[OfferedTool]) -> str:
    """Return the text of a system turn that offers tools after its own text."""
    lines = "".join(f"\n{tool.json_line}" for tool in tools)
    return "\n\n".join([*([system.strip()] if system.strip() else []), f"{TOOLS_HEAD}{lines}{TOOLS_TAIL}"])


def strip_tools(system: str) -> str:
    """Return a system turn's own text without the tools. All chats of an application list the same tools, which does not make the chats similar."""
    return system.partition(TOOLS_HEAD)[0]


def lists_all_tools(system: str, tools: Sequence[OfferedTool]) -> bool:
    """Return whether a system turn already lists all of these tools, as in the rows of Hermes' function calling data."""
    listed = system.partition("<tools>")[2].rpartition("</tools>")[0]
    return all(f'"{tool.name}"' in listed or f"'{tool.name}'" in listed for tool in tools)


def read_tools(name: str, value: Any) -> list[OfferedTool]:
    """Read the tools of a row: a list of OpenAI's objects or of bare functions, or the list as JSON text. Raises: BadRow 'bad_schema'."""
    found = _decoded(value, repr(name))
    items = [found] if isinstance(found, Mapping) else found
    if not isinstance(items, list | tuple):
        kind = type(items).__name__
        wrong = Message(
            "shapes.tools_type", "{name!r} is {kind}; a list of functions is expected", name=name, kind=kind
        )
        raise BadRow("bad_schema", wrong)
    return [_tool(f"{name}.{place}", _decoded(item, f"{name}.{place}")) for place, item in enumerate(items)]


def read_calls(where: str, value: Any) -> list[DocumentToolCall]:
    """Read the calls of a message: one call or a list, as objects or as JSON text. Raises: BadRow 'bad_schema'."""
    found = _decoded(value, where)
    items = [found] if isinstance(found, Mapping) else found
    if not isinstance(items, list | tuple):
        kind = type(items).__name__
        wrong = Message("shapes.calls_type", "{where} is {kind}; a list of calls is expected", where=where, kind=kind)
        raise BadRow("bad_schema", wrong)
    return [_call(where, _decoded(item, where)) for item in items]


def read_reasoning(where: str, message: Mapping[str, Any], names: Sequence[str]) -> str:
    """Read the reasoning of a message from any of the fields ``names``. Raises: BadRow 'bad_schema' if the fields differ or are not text."""
    found = ""
    for name in names:
        value = message[name]
        if not isinstance(value, str):
            wrong = Message(
                "shapes.reasoning_type",
                "{where}: {name!r} is {kind}; a text is expected",
                where=where,
                name=name,
                kind=type(value).__name__,
            )
            raise BadRow("bad_schema", wrong)
        if found and value.strip() != found:
            differ = Message(
                "shapes.reasoning_differs",
                "{where}: the fields {names} differ. Under 'fields' in data.yaml, add one of the fields to 'ignore'",
                where=where,
                names=names,
            )
            raise BadRow("bad_schema", differ)
        found = value.strip()
    return found


def _called(call: DocumentToolCall) -> str:
    written = f'{{"name": {_json(call.name)}, "arguments": {_json(call.arguments)}}}'
    return f"<tool_call>\n{written}\n</tool_call>"


def _tool(where: str, item: Any) -> OfferedTool:
    unnamed = Message("shapes.unnamed_tool", "{where} is not a function with a 'name'", where=where)
    function = _function(item, where, unnamed)
    if function is not item and (
        strange := sorted(str(key) for key in item if key not in ("type", "function") and item[key])
    ):
        beside = Message(
            "shapes.beside_function",
            "{where}: the tool has the key {key!r}, but the chat template can show only the tool's function",
            where=where,
            key=strange[0][:40],
        )
        raise BadRow("bad_schema", beside)
    order = [*TOOL_KEYS, *(key for key in function if key not in (*TOOL_KEYS, "type"))]
    parts = [f"{_json(key)}: {_json(function[key], where)}" for key in order if function.get(key) is not None]
    return OfferedTool(function["name"], f'{{"type": "function", "function": {{{", ".join(parts)}}}}}')


def _call(where: str, item: Any) -> DocumentToolCall:
    """Read one call. Raises: BadRow for an item that is not a call, and for a call with a key that the chat template cannot show."""
    function = _function(
        item, where, Message("shapes.unnamed_call", "{where}: a call has no function name", where=where)
    )
    known = {"id", "type", "index", "function", "name", "arguments"}
    if strange := sorted(str(key) for one in (item, function) for key in one if key not in known and one[key]):
        other = Message(
            "shapes.call_key",
            "{where}: the call has the key {key!r}, but the chat template can show only the name and the arguments of a call",
            where=where,
            key=strange[0][:40],
        )
        raise BadRow("bad_schema", other)
    given = function.get("arguments")
    name = function["name"][:40]
    arguments = _decoded(given, f"{where}: the arguments of {name!r}") if given else {}
    if isinstance(given, str) and not given.strip():
        arguments = {}
    if not isinstance(arguments, Mapping):
        wrong = Message(
            "shapes.arguments_type",
            "{where}: the arguments of {function!r} are {kind}; an object is expected",
            where=where,
            function=name,
            kind=type(arguments).__name__,
        )
        raise BadRow("bad_schema", wrong)
    _json(arguments, where)
    return DocumentToolCall(function["name"], arguments, item.get("id"))


def _function(item: Any, where: str, unnamed: Message) -> Mapping[str, Any]:
    """Return the value of ``function`` in OpenAI's object, or the bare function. Raises: BadRow if it has no name or is of another type."""
    inner = item.get("function") if isinstance(item, Mapping) else None
    function = inner if isinstance(inner, Mapping) else item
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise BadRow("bad_schema", unnamed)
    if item.get("type") not in (None, "function"):
        wrong = Message(
            "shapes.function_type",
            "{where}: the type is {kind!r}, but the chat template can show functions only",
            where=where,
            kind=str(item["type"])[:40],
        )
        raise BadRow("bad_schema", wrong)
    return function


def _decoded(value: Any, where: str) -> Any:
    """Return the JSON value of a text, since many data sets have JSON in a string, or the value itself."""
    if not isinstance(value, str) or not value.strip():
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        wrong = Message(
            "shapes.text_not_json", "{where}: the text is not JSON ({error})", where=where, error=str(error)[:80]
        )
        raise BadRow("bad_schema", wrong) from None


def _json(value: Any, where: str = "") -> str:
    """Return a value as JSON text. Raises: BadRow for a value that JSON cannot express, such as NaN or a date."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        wrong = Message(
            "shapes.not_json",
            "{where}: a value cannot be written as JSON ({error})",
            where=where,
            error=str(error)[:80],
        )
        raise BadRow("bad_schema", wrong) from None
