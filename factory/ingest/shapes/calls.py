"""Tools, calls of them and reasoning as text: the form that is trained on, and that the exported chat template writes for a server.

It is the form of Hermes 2 Pro and Qwen2.5, which vLLM's parser ``hermes`` and others read. All of it is ordinary text, in which special tokens
have no place.

    >>> print(spoken("Let me see.", "Which town?", [Call("weather", {"town": "Zürich"})]))
    <think>
    Which town?
    </think>
    <BLANKLINE>
    Let me see.
    <tool_call>
    {"name": "weather", "arguments": {"town": "Zürich"}}
    </tool_call>

JSON is written as transformers' filter ``tojson`` writes it: characters as they are, keys in the order of the row. Of a tool the keys come as
vLLM's API hands them on (name, description, parameters, others), and those that are null are left out, since it fills some in.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from factory.ingest.shapes.bad_row import BadRow

REASONING = ("reasoning_content", "reasoning", "thinking")  # DeepSeek's and Qwen's; OpenRouter's and vLLM's; gpt-oss's
CALLS = ("tool_calls", "function_call")  # OpenAI's, and its older one
TOOLS = ("tools", "functions")

# What stands before and after the tools, a line each.
TOOLS_HEAD = (
    "# Tools\n\nYou may call functions to help with what is asked. Their signatures are between <tools> and </tools>, one JSON object a "
    "line:\n<tools>"
)
TOOLS_TAIL = (
    "\n</tools>\n\nTo call a function, write a JSON object with its name and its arguments between <tool_call> and </tool_call>:\n"
    '<tool_call>\n{"name": <function-name>, "arguments": <object-of-arguments>}\n</tool_call>'
)
TOOL_KEYS = ("name", "description", "parameters")  # first, in this order


@dataclass(frozen=True)
class Call:
    """What a turn calls. ``id``: by which a result may name it."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: Any = None


@dataclass(frozen=True)
class Tool:
    name: str
    written: str  # its line


def spoken(content: str, reasoning: str, calls: Sequence[Call]) -> str:
    """An assistant's turn; a content that stands alone stays as it is."""
    if not reasoning and not calls:
        return content
    said = "\n".join([*([content.strip()] if content.strip() else []), *map(_called, calls)])
    if not reasoning:
        return said
    return f"<think>\n{reasoning}\n</think>" + (f"\n\n{said}" if said else "")


def with_tools(system: str, tools: Sequence[Tool]) -> str:
    """A system turn that offers tools, after its own words."""
    lines = "".join(f"\n{tool.written}" for tool in tools)
    return "\n\n".join([*([system.strip()] if system.strip() else []), f"{TOOLS_HEAD}{lines}{TOOLS_TAIL}"])


def before_tools(system: str) -> str:
    """A system turn's own words, without the tools: these are the same in all chats of an application, and make no two of them alike."""
    return system.partition(TOOLS_HEAD)[0]


def lists_itself(system: str, tools: Sequence[Tool]) -> bool:
    """Does a system turn list all of these tools already, as the rows of Hermes' function calling do?"""
    listed = system.partition("<tools>")[2].rpartition("</tools>")[0]
    return all(f'"{tool.name}"' in listed or f"'{tool.name}'" in listed for tool in tools)


def read_tools(name: str, value: Any) -> list[Tool]:
    """The tools of a row: a list, or JSON of one, of OpenAI's objects, bare or not. Raises: BadRow 'bad_schema'."""
    found = _decoded(value, repr(name))
    items = [found] if isinstance(found, Mapping) else found
    if not isinstance(items, list | tuple):
        raise BadRow("bad_schema", f"{name!r} is {type(items).__name__}; a list of functions is expected")
    return [_tool(f"{name}.{place}", _decoded(item, f"{name}.{place}")) for place, item in enumerate(items)]


def read_calls(where: str, value: Any) -> list[Call]:
    """The calls of a message: one or a list, as objects or JSON. Raises: BadRow 'bad_schema'."""
    found = _decoded(value, where)
    items = [found] if isinstance(found, Mapping) else found
    if not isinstance(items, list | tuple):
        raise BadRow("bad_schema", f"{where} is {type(items).__name__}; a list of calls is expected")
    return [_call(where, _decoded(item, where)) for item in items]


def read_reasoning(where: str, message: Mapping[str, Any], names: Sequence[str]) -> str:
    """What a message thinks, in whichever of the fields. Raises: BadRow 'bad_schema' where they differ or are no text."""
    found = ""
    for name in names:
        value = message[name]
        if not isinstance(value, str):
            raise BadRow("bad_schema", f"{where}: {name!r} is {type(value).__name__}; a text is expected")
        if found and value.strip() != found:
            raise BadRow("bad_schema", f"{where}: {' and '.join(map(repr, names))} differ; 'ignore' one of them")
        found = value.strip()
    return found


def _called(call: Call) -> str:
    return f'<tool_call>\n{{"name": {_json(call.name)}, "arguments": {_json(call.arguments)}}}\n</tool_call>'


def _tool(where: str, item: Any) -> Tool:
    function = _function(item, where, f"{where} is no function with a 'name'")
    if function is not item and (
        strange := sorted(str(key) for key in item if key not in ("type", "function") and item[key])
    ):
        raise BadRow("bad_schema", f"{where}: {strange[0][:40]!r} beside the function has no place")
    order = [*TOOL_KEYS, *(key for key in function if key not in (*TOOL_KEYS, "type"))]
    parts = [f"{_json(key)}: {_json(function[key], where)}" for key in order if function.get(key) is not None]
    return Tool(function["name"], f'{{"type": "function", "function": {{{", ".join(parts)}}}}}')


def _call(where: str, item: Any) -> Call:
    """Raises: BadRow for what is no call, and for one with words that have no place."""
    function = _function(item, where, f"{where}: a call names no function")
    known = {"id", "type", "index", "function", "name", "arguments"}
    if strange := sorted(str(key) for one in (item, function) for key in one if key not in known and one[key]):
        raise BadRow("bad_schema", f"{where}: {strange[0][:40]!r} of a call has no place; name and arguments have")
    given = function.get("arguments")
    arguments = _decoded(given, f"{where}: the arguments of {function['name'][:40]!r}") if given else {}
    if isinstance(given, str) and not given.strip():
        arguments = {}
    if not isinstance(arguments, Mapping):
        kind = type(arguments).__name__
        raise BadRow("bad_schema", f"{where}: the arguments of {function['name'][:40]!r} are {kind}, and no object")
    _json(arguments, where)
    return Call(function["name"], arguments, item.get("id"))


def _function(item: Any, where: str, unnamed: str) -> Mapping[str, Any]:
    """What OpenAI's objects hold under ``function``, or such an object that is bare. Raises: BadRow where it has no name, or is of another type."""
    inner = item.get("function") if isinstance(item, Mapping) else None
    function = inner if isinstance(inner, Mapping) else item
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise BadRow("bad_schema", unnamed)
    if item.get("type") not in (None, "function"):
        raise BadRow("bad_schema", f"{where}: of type {str(item['type'])[:40]!r}; functions alone have a place")
    return function


def _decoded(value: Any, where: str) -> Any:
    """JSON in a text, as many data sets hold it, or the value."""
    if not isinstance(value, str) or not value.strip():
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise BadRow("bad_schema", f"{where}: a text that is no JSON ({str(error)[:80]})") from None


def _json(value: Any, where: str = "") -> str:
    """Raises: BadRow for what JSON has no word for, such as NaN or a date."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRow("bad_schema", f"{where}: it cannot be written as JSON ({str(error)[:80]})") from None
