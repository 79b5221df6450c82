"""Messages, however a public format writes them, as this factory's chat template shows them: role, text, and whether they carry loss.

    >>> turns([{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello", "weight": 0}], frozenset(), Notes())
    [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hello', 'weight': 0}]

The template has a place for a role and a text, and writes tools, calls of them and reasoning as text (``calls``): so does this. What else a message
says (names, images) would be dropped in silence, so the row is refused, and names the field; ``ignore`` in ``data.yaml: fields`` is the person's word
to drop it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from factory.ingest.shapes.bad_row import BadRow
from factory.ingest.shapes.calls import (
    CALLS,
    REASONING,
    TOOLS,
    Call,
    lists_itself,
    read_calls,
    read_reasoning,
    read_tools,
    spoken,
    with_tools,
)

ROLES = ("system", "user", "assistant", "tool")

# OpenAI's chat format ('developer', 'function'), ShareGPT and its heirs (the others), to the role of the template.
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
_CALLING = ("function_call", "tool_call")  # ShareGPT's roles of turns whose value is a call
_TEXT_PARTS = ("text", "input_text", "output_text")  # of content in parts: chat completions, and OpenAI's responses

# Fields of a message or a row that mean something to a reader of the chat: they are shown, or refused.
Meaningful = Literal[
    "tools", "functions", "tool_calls", "function_call", "function_calls", "tool_call_id", "name", "reasoning_content", "reasoning", "thinking",
    "refusal", "audio", "audios", "image", "images", "video", "videos", "documents", "label", "train_detail",
]  # fmt: skip
MEANINGFUL: frozenset[str] = frozenset(get_args(Meaningful))
_OF_MESSAGES = MEANINGFUL - {"label"}
_OF_ROWS = MEANINGFUL - {"name"}
_OF_MANY = frozenset(
    {"messages", "conversations", "conversation", "chosen"}
)  # beside them a row's reasoning may be anybody's
_READ = frozenset({"role", "content", "from", "value", "weight", "train", "training"})

Turn = dict[str, Any]  # {"role": str, "content": str}, and {"weight": 0} of an answer that carries no loss


@dataclass
class Notes:
    """What was found in a row beside its words. ``said``: sentences for a person; ``unread``: fields that nothing reads; ``refused``: those
    with a meaning that has no place in the template. ``plain``: that is an older one, which shows roles and texts alone."""

    plain: bool = False
    said: set[str] = field(default_factory=set)
    unread: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)


def carries_loss(message: Mapping[str, Any]) -> bool:
    """Are the words of a message to be learned? The assistant's are, but for turns of weight 0.

    >>> carries_loss({"role": "assistant", "content": "a"}), carries_loss({"role": "assistant", "content": "a", "weight": 0})
    (True, False)
    """
    return message["role"] == "assistant" and message.get("weight") != 0


def turn_of(role: str, content: str, learned: bool) -> Turn:
    """A turn whose end has loss, or not: how a turn is told from its tokens.

    >>> turn_of("assistant", "a", False), turn_of("user", "a", False)
    ({'role': 'assistant', 'content': 'a', 'weight': 0}, {'role': 'user', 'content': 'a'})
    """
    turn: Turn = {"role": role, "content": content}
    return turn | {"weight": 0} if role == "assistant" and not learned else turn


def turns(messages: Any, ignore: Collection[str], notes: Notes) -> list[Turn]:
    """A list of messages. Raises: BadRow 'bad_schema'. Fields that cannot be shown are added to ``notes.refused``."""
    if not isinstance(messages, list | tuple) or not messages:
        raise BadRow("bad_schema", "'messages' is not a list of messages")
    awaited: list[Call] = []  # calls of the turn before, whose results come next, in their order
    return [_turn(place, message, ignore, notes, awaited) for place, message in enumerate(messages)]


def refuse(notes: Notes) -> None:
    """Raises: BadRow where a field has a meaning that no document can hold."""
    if notes.refused:
        named = sorted(notes.refused)
        them = "it" if len(named) == 1 else "them"
        older = notes.plain and any(name in (*TOOLS, *CALLS, *REASONING, "tool_call_id") for name in named)
        raise BadRow(
            "bad_schema",
            f"{', '.join(map(repr, named))}: the chat template {'of this older workspace ' if older else ''}has no place for {them}"
            f"{' (a new workspace has)' if older else ''}; 'ignore: [{', '.join(named)}]' under 'fields' in data.yaml drops {them} and "
            "keeps the words",
        )


def look_beside(row: Mapping[str, Any], read: Collection[str], ignore: Collection[str], notes: Notes) -> None:
    """The fields of a row that hold a chat: those that mean something for it are refused or, where a person said so, ignored."""
    for name in sorted(_OF_ROWS.difference(TOOLS).intersection(row).difference(read)):
        if _says_something(name, row[name]):
            _refused_or_ignored(name, ignore, notes)


def thinking(
    row: Mapping[str, Any], read: set[str], said: list[Turn], ignore: Collection[str], notes: Notes
) -> list[Turn]:
    """The chat of a row that is one question and its answer, with the row's reasoning before that. Raises: BadRow 'bad_schema'."""
    names = [name for name in REASONING if name in row and name not in read and _says_something(name, row[name])]
    names = [name for name in names if name not in ignore and not notes.plain]
    last, answers = said[-1], [turn for turn in said if turn["role"] == "assistant"]
    if not names or answers != [last] or _OF_MANY & read:
        return said
    read.update(names)
    reasoning = _reasoning("the row", row, names, last["content"], notes)
    return [*said[:-1], last | {"content": spoken(last["content"], reasoning, [])}]


def offering(
    row: Mapping[str, Any], read: set[str], said: list[Turn], ignore: Collection[str], notes: Notes
) -> list[Turn]:
    """The chat of a row, with its tools in the system turn. Raises: BadRow 'bad_schema'."""
    found = [name for name in TOOLS if name in row and name not in read and _says_something(name, row[name])]
    read.update(TOOLS)
    for name in [name for name in found if notes.plain or name in ignore]:
        _refused_or_ignored(name, ignore, notes)
        found.remove(name)
    if not found:
        return said
    if len(found) > 1:
        raise BadRow("bad_schema", f"{' and '.join(map(repr, found))} both list tools; 'ignore' one of them")
    tools = read_tools(found[0], row[found[0]])
    system, others = ("", said) if said[0]["role"] != "system" else (said[0]["content"], said[1:])
    if lists_itself(system, tools):
        notes.said.add(f"{found[0]!r} is not written again: the system turn lists the tools itself")
        return said
    notes.said.add("tools are listed in the system turn (<tools>)")
    return [{"role": "system", "content": with_tools(system, tools)}, *others]


def _turn(place: int, message: Any, ignore: Collection[str], notes: Notes, awaited: list[Call]) -> Turn:
    if not isinstance(message, dict):
        raise BadRow("bad_schema", f"message {place} is not an object")
    named = message.get("role", message.get("from"))
    role = _ROLE_OF.get(named) if isinstance(named, str) else None
    if role is None:
        raise BadRow(
            "bad_schema", f"message {place}: role is not one of {', '.join(ROLES)} (it is {str(named)[:40]!r})"
        )
    if named == "developer":
        notes.said.add("the role 'developer' is read as 'system'")
    if named in _CALLING:
        call = message.get("content", message.get("value"))
        message = {**message, "content": None, "function_call": call if _says_something("", call) else [{}]}
    shown, ignored = _fields(role, message, ignore, notes, awaited)
    content = _text(place, message.get("content", message.get("value")), notes)
    if role != "tool":
        awaited.clear()
    where = f"message {place}"
    names = [name for name in REASONING if name in shown]
    reasoning = _reasoning(where, message, names, content or "", notes)
    calls = [call for name in CALLS if name in shown for call in read_calls(f"{where}: {name!r}", message[name])]
    if content is None and not (reasoning or calls):
        if ignored or notes.refused:  # all that it says is a call: dropped by the person's word, or refused later
            return {"role": role, "content": "", "weight": 0}
        raise BadRow("bad_schema", f"message {place}: content is not a string")
    if all(name in shown for name in CALLS) or calls and "<tool_call>" in (content or ""):
        raise BadRow("bad_schema", f"{where} says its calls twice; 'ignore' one of the fields")
    if calls:
        notes.said.add("calls of tools are written into the assistant's turn (<tool_call>)")
    awaited += calls
    turn: Turn = {"role": role, "content": spoken(content or "", reasoning, calls)}
    return turn | {"weight": 0} if _weighs_nothing(place, role, message, notes) else turn


def _reasoning(where: str, holder: Mapping[str, Any], names: list[str], content: str, notes: Notes) -> str:
    """What an answer thinks; empty without a field for it. Raises: BadRow 'bad_schema'."""
    reasoning = read_reasoning(where, holder, names)
    if reasoning and content.lstrip().startswith("<think>"):
        raise BadRow(
            "bad_schema", f"{where}: the content begins with '<think>', and a field has reasoning too: 'ignore' that"
        )
    if reasoning:
        notes.said.add("reasoning is written before the answer (<think>)")
    return reasoning


def _fields(
    role: str, message: dict[str, Any], ignore: Collection[str], notes: Notes, awaited: list[Call]
) -> tuple[set[str], bool]:
    """What of a message is shown beside its content, and whether a call of it is ignored; the others are refused.

    Raises: BadRow for a result that stands in another place than its call.
    """
    shown: set[str] = set()
    ignored = False
    answers = awaited.pop(0) if role == "tool" and awaited else None
    for name in message.keys() - _READ:
        value = message[name]
        if name not in _OF_MESSAGES:
            if value is not None:
                notes.unread.add(f"messages.{name}"[:80])
            continue
        if not _says_something(name, value):
            continue
        if name not in ignore and not notes.plain:
            if role == "assistant" and name in (*CALLS, *REASONING):
                shown.add(name)
                continue
            if answers and name == "tool_call_id":  # the template shows no ids: a result is told by its place
                if answers.id not in (None, value):
                    raise BadRow(
                        "bad_schema",
                        f"a result of the call {str(value)[:40]!r} stands where that of {str(answers.id)[:40]!r} does: results are "
                        "told by the order of the calls",
                    )
                continue
            if answers and name == "name" and value == answers.name:
                continue
        ignored = ignored or name in CALLS and name in ignore
        _refused_or_ignored(name, ignore, notes)
    return shown, ignored


def _text(place: int, content: Any, notes: Notes) -> str | None:
    """The words of a content; None: it has none."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise BadRow("bad_schema", f"message {place}: content is not a string")
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        text = part.get("text") if isinstance(part, dict) else None
        if kind not in _TEXT_PARTS or not isinstance(text, str):
            raise BadRow("bad_schema", f"message {place}: a part of its content is {str(kind)[:40]!r}, and no text")
        texts.append(text)
    notes.said.add("content in parts is read as their text")
    return "".join(texts)  # as the served model's API joins them


def _weighs_nothing(place: int, role: str, message: dict[str, Any], notes: Notes) -> bool:
    """Does a message say that it must not be learned? OpenAI and Mistral write ``weight: 0``, Axolotl ``training: false``."""
    if role != "assistant":
        for name in ("train", "training"):
            if message.get(name) is True:
                raise BadRow(
                    "bad_schema", f"message {place}: {name!r} is true, and only the assistant's turns carry loss"
                )
        return False
    weight = message.get("weight")
    if weight is not None and weight not in (0, 1):
        raise BadRow("bad_schema", f"message {place}: 'weight' is {weight!r:.40}; a turn carries loss (1) or none (0)")
    nothing = weight == 0 and weight is not None
    for name in ("train", "training"):
        value = message.get(name)
        if value is not None and not isinstance(value, bool):
            raise BadRow("bad_schema", f"message {place}: {name!r} is {str(value)[:40]}; true or false is expected")
        nothing = nothing or value is False
    if nothing:
        notes.said.add("answers of weight 0 carry no loss")
    return nothing


def _refused_or_ignored(name: str, ignore: Collection[str], notes: Notes) -> None:
    if name in ignore:
        notes.said.add(f"ignored, as 'fields' in data.yaml says: {name}")
    else:
        notes.refused.add(name)


def _says_something(name: str, value: Any) -> bool:
    """Empty lists, texts and objects say nothing; of a pair without a partner only a bad one does (KTO: ``label: false``)."""
    if name == "label":  # a CSV file has it as a word
        return value is False or isinstance(value, str) and value.strip().lower() == "false"
    if isinstance(value, str):
        return value.strip() not in ("", "[]", "{}", "null")  # some data sets hold JSON in a string
    return value is not None and value is not False and value != [] and value != {}
