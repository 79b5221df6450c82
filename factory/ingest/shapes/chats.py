"""Reads the messages of public chat formats into the form of this factory's chat template: role, text, and whether a message carries loss.

    >>> read_turns([{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello", "weight": 0}], frozenset(), ReadingNotes())
    [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hello', 'weight': 0}]

The template shows a role and a text, and writes tools, tool calls and reasoning as text (``tool_calls``). This module does the same. For the
template of another model it leaves those that the template takes as objects, under the names that transformers gives to templates. It refuses a row
with another field that has a meaning (names, images), because the meaning would be lost. A person can have such a field dropped with ``ignore`` in
``data.yaml: fields``.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from factory.ingest.shapes.bad_row import BadRow
from factory.ingest.shapes.tool_calls import (
    CALLS,
    REASONING_KEYS,
    TOOLS,
    DocumentToolCall,
    append_tools,
    lists_all_tools,
    read_calls,
    read_reasoning,
    read_tools,
    render_answer,
)
from kernels.contract.message import Message

ROLES = ("system", "user", "assistant", "tool")

# Maps the roles of OpenAI's chat format ('developer', 'function') and of ShareGPT and its variants (the others) to the roles of the template.
_ROLE_OF = {
    **{role: role for role in ROLES},
    "developer": "system",
    "function": "tool",
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "function_call": "assistant",
    "tool_call": "assistant",
}
_CALLING = ("function_call", "tool_call")  # ShareGPT's roles for turns whose value is a call
_TEXT_PARTS = (
    "text",
    "input_text",
    "output_text",
)  # types of text parts: of OpenAI's chat completions, and of its responses

# Fields of a message or a row that mean something to a reader of the chat. The template shows each, or the row is refused.
Meaningful = Literal[
    "tools", "functions", "tool_calls", "function_call", "function_calls", "tool_call_id", "name", "reasoning_content", "reasoning", "thinking",
    "refusal", "audio", "audios", "image", "images", "video", "videos", "documents", "label", "train_detail",
]  # fmt: skip
MEANINGFUL: frozenset[str] = frozenset(get_args(Meaningful))
_OF_MESSAGES = MEANINGFUL - {"label"}
_OF_ROWS = MEANINGFUL - {"name"}
# If a row has one of these fields, its reasoning may belong to any of several messages.
_OF_MANY = frozenset({"messages", "conversations", "conversation", "chosen"})
_READ = frozenset({"role", "content", "from", "value", "weight", "train", "training"})

# {"role": str, "content": str}; also {"weight": 0} if it is an answer that carries no loss. For the template of another model also "tool_calls",
# "reasoning_content", "tool_call_id" and "name", and "tools" in a chat's first turn.
Turn = dict[str, Any]
Structure = Literal["tools", "calls", "reasoning"]  # what a template of another model may take as objects
_STRUCTURE_OF: dict[str, Structure] = {
    **dict.fromkeys(TOOLS, "tools"), **dict.fromkeys((*CALLS, "tool_call_id", "name"), "calls"), **dict.fromkeys(REASONING_KEYS, "reasoning")
}  # fmt: skip


@dataclass
class ReadingNotes:
    """Facts about how a row was read. ``messages`` are for a person. ``unread_fields`` are the fields that are not used. ``refused_fields`` are
    fields with a meaning that the template cannot show. ``shows_text_only`` is true for an older template, which shows only roles and texts, and for
    one of another model. ``structure``: what the latter takes as objects."""

    shows_text_only: bool = False
    structure: frozenset[Structure] = frozenset()
    messages: set[str] = field(default_factory=set)
    unread_fields: set[str] = field(default_factory=set)
    refused_fields: set[str] = field(default_factory=set)

    def shows(self, name: str) -> bool:
        """Return whether the template shows a field of tools, calls or reasoning, as text or as an object."""
        return not self.shows_text_only or _STRUCTURE_OF.get(name) in self.structure


def has_loss(message: Mapping[str, Any]) -> bool:
    """Return whether a message carries loss. The assistant's messages do, except those of weight 0.

    >>> has_loss({"role": "assistant", "content": "a"}), has_loss({"role": "assistant", "content": "a", "weight": 0})
    (True, False)
    """
    return message["role"] == "assistant" and message.get("weight") != 0


def make_turn(role: str, content: str, carries_loss: bool) -> Turn:
    """Return a turn that is decoded from its tokens. ``carries_loss`` says whether the end of the turn has loss.

    >>> make_turn("assistant", "a", False), make_turn("user", "a", False)
    ({'role': 'assistant', 'content': 'a', 'weight': 0}, {'role': 'user', 'content': 'a'})
    """
    turn: Turn = {"role": role, "content": content}
    return turn | {"weight": 0} if role == "assistant" and not carries_loss else turn


def read_turns(messages: Any, ignored_fields: Collection[str], notes: ReadingNotes) -> list[Turn]:
    """Read a list of messages as turns. Fields that cannot be shown are added to ``notes.refused_fields``. Raises: BadRow 'bad_schema'."""
    if not isinstance(messages, list | tuple) or not messages:
        raise BadRow("bad_schema", Message("shapes.messages_type", "'messages' is not a list of messages"))
    awaited: list[DocumentToolCall] = []  # calls of the previous turn, whose results must follow in the same order
    return [_turn(place, message, ignored_fields, notes, awaited) for place, message in enumerate(messages)]


def raise_for_refused_fields(notes: ReadingNotes) -> None:
    """Raise BadRow if ``notes`` has a field whose meaning the chat template cannot show."""
    if notes.refused_fields:
        named = sorted(notes.refused_fields)
        if notes.shows_text_only and any(name in (*TOOLS, *CALLS, *REASONING_KEYS, "tool_call_id") for name in named):
            wrong = Message(
                "shapes.field_not_shown_here",
                "the chat template of this workspace is too old or of another model, and cannot show these fields: {fields}. To drop "
                "the fields and keep the text, write 'ignore: [{fields}]' under 'fields' in data.yaml",
                fields=named,
            )
        else:
            wrong = Message(
                "shapes.field_not_shown",
                "the chat template cannot show these fields: {fields}. To drop the fields and keep the text, write 'ignore: [{fields}]' under "
                "'fields' in data.yaml",
                fields=named,
            )
        raise BadRow("bad_schema", wrong)


def collect_refused_fields(
    row: Mapping[str, Any], read_fields: Collection[str], ignored_fields: Collection[str], notes: ReadingNotes
) -> None:
    """Add the fields of a chat's row that have a meaning to ``notes.refused_fields``. For a field in ``ignored_fields``, add a message to ``notes``
    instead."""
    for name in sorted(_OF_ROWS.difference(TOOLS).intersection(row).difference(read_fields)):
        if _says_something(name, row[name]):
            _refused_or_ignored(name, ignored_fields, notes)


def add_reasoning(
    row: Mapping[str, Any],
    read_fields: set[str],
    turns: list[Turn],
    ignored_fields: Collection[str],
    notes: ReadingNotes,
) -> list[Turn]:
    """Return the chat with the row's reasoning before its answer, if the chat has one answer. Raises: BadRow 'bad_schema'."""
    names = [
        name for name in REASONING_KEYS if name in row and name not in read_fields and _says_something(name, row[name])
    ]
    names = [name for name in names if name not in ignored_fields and notes.shows(name)]
    last, answers = turns[-1], [turn for turn in turns if turn["role"] == "assistant"]
    if not names or answers != [last] or _OF_MANY & read_fields:
        return turns
    read_fields.update(names)
    reasoning = _reasoning("the row", row, names, last["content"], notes)
    if "reasoning" in notes.structure:
        return [*turns[:-1], last | {"reasoning_content": reasoning}]
    return [*turns[:-1], last | {"content": render_answer(last["content"], reasoning, [])}]


def add_tools(
    row: Mapping[str, Any],
    read_fields: set[str],
    turns: list[Turn],
    ignored_fields: Collection[str],
    notes: ReadingNotes,
) -> list[Turn]:
    """Return the chat with the row's tools in its system turn. Raises: BadRow 'bad_schema'."""
    found = [name for name in TOOLS if name in row and name not in read_fields and _says_something(name, row[name])]
    read_fields.update(TOOLS)
    for name in [name for name in found if not notes.shows(name) or name in ignored_fields]:
        _refused_or_ignored(name, ignored_fields, notes)
        found.remove(name)
    if not found:
        return turns
    if len(found) > 1:
        both = Message(
            "shapes.tools_twice",
            "the fields {fields} both list tools. Under 'fields' in data.yaml, add one of the fields to 'ignore'",
            fields=found,
        )
        raise BadRow("bad_schema", both)
    tools = read_tools(found[0], row[found[0]])
    system, others = ("", turns) if turns[0]["role"] != "system" else (turns[0]["content"], turns[1:])
    if lists_all_tools(system, tools):
        notes.messages.add(
            Message(
                "shapes.tools_listed_already",
                "the tools in {field!r} are not added to the system turn, because the system turn lists them already",
                field=found[0],
            )
        )
        return turns
    if "tools" in notes.structure:
        return [turns[0] | {"tools": [json.loads(tool.json_line) for tool in tools]}, *turns[1:]]
    notes.messages.add(Message("shapes.tools_listed", "tools are listed in the system turn (<tools>)"))
    return [{"role": "system", "content": append_tools(system, tools)}, *others]


def _turn(
    place: int, message: Any, ignore: Collection[str], notes: ReadingNotes, awaited: list[DocumentToolCall]
) -> Turn:
    if not isinstance(message, dict):
        wrong = Message("shapes.message_type", "message {place} is not an object", place=place)
        raise BadRow("bad_schema", wrong)
    named = message.get("role", message.get("from"))
    role = _ROLE_OF.get(named) if isinstance(named, str) else None
    if role is None:
        unknown = Message(
            "shapes.role",
            "message {place}: the role {role!r} is not one of {known}",
            place=place,
            role=str(named)[:40],
            known=ROLES,
        )
        raise BadRow("bad_schema", unknown)
    if named == "developer":
        notes.messages.add(Message("shapes.developer", "the role 'developer' is read as 'system'"))
    if named in _CALLING:
        call = message.get("content", message.get("value"))
        message = {**message, "content": None, "function_call": call if _says_something("", call) else [{}]}
    shown, ignored = _fields(role, message, ignore, notes, awaited)
    content = _text(place, message.get("content", message.get("value")), notes)
    if role != "tool":
        awaited.clear()
    where = f"message {place}"
    names = [name for name in REASONING_KEYS if name in shown]
    reasoning = _reasoning(where, message, names, content or "", notes)
    calls = [call for name in CALLS if name in shown for call in read_calls(f"{where}: {name!r}", message[name])]
    if content is None and not (reasoning or calls):
        if (
            ignored or notes.refused_fields
        ):  # the message is only a call, which a person ignores or which is refused later
            return {"role": role, "content": "", "weight": 0}
        raise _no_string(place)
    if all(name in shown for name in CALLS) or calls and "<tool_call>" in (content or ""):
        twice = Message(
            "shapes.calls_twice",
            "{where} has its tool calls in two places. Under 'fields' in data.yaml, add one of the two fields to 'ignore'",
            where=where,
        )
        raise BadRow("bad_schema", twice)
    if calls and "calls" not in notes.structure:
        notes.messages.add(
            Message("shapes.calls_written", "tool calls are written into the assistant's turn (<tool_call>)")
        )
    awaited += calls
    turn: Turn = {"role": role, "content": content or ""}
    if notes.structure:
        turn |= {"reasoning_content": reasoning} if reasoning else {}
        turn |= {"tool_calls": [_as_object(call) for call in calls]} if calls else {}
        turn |= {
            name: message[name]
            for name in ("tool_call_id", "name")
            if role == "tool" and isinstance(message.get(name), str)
        }
    else:
        turn["content"] = render_answer(content or "", reasoning, calls)
    return turn | {"weight": 0} if _weighs_nothing(place, role, message, notes) else turn


def _as_object(call: DocumentToolCall) -> dict[str, Any]:
    """Return a call as transformers gives it to a template: OpenAI's object, with the arguments as an object and not as text."""
    named = {"id": call.id} if isinstance(call.id, str) else {}
    return {**named, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}


def _reasoning(where: str, holder: Mapping[str, Any], names: list[str], content: str, notes: ReadingNotes) -> str:
    """Return the reasoning of an answer, or '' if no field has reasoning. Raises: BadRow 'bad_schema'."""
    reasoning = read_reasoning(where, holder, names)
    if reasoning and content.lstrip().startswith("<think>"):
        twice = Message(
            "shapes.reasoning_twice",
            "{where}: the content begins with '<think>', and the fields {fields} have reasoning too. Under 'fields' in data.yaml, "
            "add these fields to 'ignore'",
            where=where,
            fields=names,
        )
        raise BadRow("bad_schema", twice)
    if reasoning and not notes.structure:
        notes.messages.add(Message("shapes.reasoning_written", "reasoning is written before the answer (<think>)"))
    return reasoning


def _no_string(place: int) -> BadRow:
    return BadRow(
        "bad_schema", Message("shapes.content_type", "message {place}: the content is not a string", place=place)
    )


def _fields(
    role: str, message: dict[str, Any], ignore: Collection[str], notes: ReadingNotes, awaited: list[DocumentToolCall]
) -> tuple[set[str], bool]:
    """Return (the fields of a message that are shown besides its content, whether a call is ignored). Other fields with a meaning are refused.

    Raises: BadRow if results are not in the order of their calls.
    """
    shown: set[str] = set()
    ignored = False
    answers = awaited.pop(0) if role == "tool" and awaited else None
    for name in message.keys() - _READ:
        value = message[name]
        if name not in _OF_MESSAGES:
            if value is not None:
                notes.unread_fields.add(f"messages.{name}"[:80])
            continue
        if not _says_something(name, value):
            continue
        if name not in ignore and notes.shows(name):
            if role == "assistant" and name in (*CALLS, *REASONING_KEYS):
                shown.add(name)
                continue
            if (
                answers and name == "tool_call_id"
            ):  # the template shows no ids, so the order tells which call a result belongs to
                if answers.id not in (None, value):
                    order = Message(
                        "shapes.order_of_results",
                        "the result of the call {result!r} stands where the result of the call {call!r} is expected. Results must be in the "
                        "order of their calls",
                        result=str(value)[:40],
                        call=str(answers.id)[:40],
                    )
                    raise BadRow("bad_schema", order)
                continue
            if answers and name == "name" and value == answers.name:
                continue
        ignored = ignored or name in CALLS and name in ignore
        _refused_or_ignored(name, ignore, notes)
    return shown, ignored


def _text(place: int, content: Any, notes: ReadingNotes) -> str | None:
    """Return the text of a message's content, or None if it has no content. Raises: BadRow for content that is not text."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise _no_string(place)
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        text = part.get("text") if isinstance(part, dict) else None
        if kind not in _TEXT_PARTS or not isinstance(text, str):
            wrong = Message(
                "shapes.part_type",
                "message {place}: a part of the content has the type {kind!r}, but only text is supported",
                place=place,
                kind=str(kind)[:40],
            )
            raise BadRow("bad_schema", wrong)
        texts.append(text)
    notes.messages.add(Message("shapes.parts_joined", "the parts of a message are joined into one text"))
    return "".join(texts)  # the API of the served model joins the texts in the same way


def _weighs_nothing(place: int, role: str, message: dict[str, Any], notes: ReadingNotes) -> bool:
    """Return whether a field of the message says that it carries no loss. OpenAI and Mistral write ``weight: 0``, Axolotl ``training: false``."""
    if role != "assistant":
        for name in ("train", "training"):
            if message.get(name) is True:
                other = Message(
                    "shapes.loss_of_role",
                    "message {place}: {field!r} is true, but only the assistant's turns carry loss",
                    place=place,
                    field=name,
                )
                raise BadRow("bad_schema", other)
        return False
    weight = message.get("weight")
    if weight is not None and weight not in (0, 1):
        odd = Message(
            "shapes.weight",
            "message {place}: 'weight' is {weight}, but must be 1 (the turn carries loss) or 0 (the turn carries no loss)",
            place=place,
            weight=f"{weight!r:.40}",
        )
        raise BadRow("bad_schema", odd)
    nothing = weight == 0 and weight is not None
    for name in ("train", "training"):
        value = message.get(name)
        if value is not None and not isinstance(value, bool):
            odd = Message(
                "shapes.not_a_boolean",
                "message {place}: {field!r} is {value}; true or false is expected",
                place=place,
                field=name,
                value=str(value)[:40],
            )
            raise BadRow("bad_schema", odd)
        nothing = nothing or value is False
    if nothing:
        notes.messages.add(Message("shapes.weight_0", "answers with weight 0 carry no loss"))
    return nothing


def _refused_or_ignored(name: str, ignore: Collection[str], notes: ReadingNotes) -> None:
    if name in ignore:
        notes.messages.add(
            Message("shapes.ignored", "the field {name!r} is ignored, as 'fields' in data.yaml says", name=name)
        )
    else:
        notes.refused_fields.add(name)


def _says_something(name: str, value: Any) -> bool:
    """Return whether the value of a field has a meaning. Empty lists, texts and objects have none. A ``label`` has one only if it calls the
    completion bad (KTO: ``label: false``)."""
    if name == "label":  # in a CSV file the label is a word
        return value is False or isinstance(value, str) and value.strip().lower() == "false"
    if isinstance(value, str):
        return value.strip() not in ("", "[]", "{}", "null")  # some data sets have JSON in a string
    return value is not None and value is not False and value != [] and value != {}
