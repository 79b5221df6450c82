"""Messages, however a public format writes them, as this factory's chat template shows them: role, text, and whether they carry loss.

    >>> turns([{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello", "weight": 0}], frozenset(), Notes())
    [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hello', 'weight': 0}]

The template has a place for a role and a text. What else a message says (calls of tools, reasoning, names, images) would be dropped in silence,
so the row is refused, and names the field; ``ignore`` in ``data.yaml: fields`` is the person's word to drop it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from factory.ingest.shapes.bad_row import BadRow

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
}
_TEXT_PARTS = ("text", "input_text", "output_text")  # of content in parts: chat completions, and OpenAI's responses

# Fields of a message or a row that mean something to a reader of the chat, and that the template does not show.
Meaningful = Literal[
    "tools", "functions", "tool_calls", "function_call", "tool_call_id", "name", "reasoning_content", "reasoning", "thinking",
    "refusal", "audio", "audios", "image", "images", "video", "videos", "documents", "label", "train_detail",
]  # fmt: skip
MEANINGFUL: frozenset[str] = frozenset(get_args(Meaningful))
_OF_MESSAGES = MEANINGFUL - {"label"}
_OF_ROWS = MEANINGFUL - {"name"}
_READ = frozenset({"role", "content", "from", "value", "weight", "train", "training"})

Turn = dict[str, Any]  # {"role": str, "content": str}, and {"weight": 0} of an answer that carries no loss


@dataclass
class Notes:
    """What was found in a row beside its words. ``said``: sentences for a person; ``unread``: fields that nothing reads; ``refused``: those
    with a meaning that has no place in the template."""

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
    return [_turn(place, message, ignore, notes) for place, message in enumerate(messages)]


def refuse(notes: Notes) -> None:
    """Raises: BadRow where a field has a meaning that no document can hold."""
    if notes.refused:
        named = sorted(notes.refused)
        raise BadRow(
            "bad_schema",
            f"{', '.join(map(repr, named))}: the chat template has no place for "
            f"{'it' if len(named) == 1 else 'them'}; 'ignore: [{', '.join(named)}]' under 'fields' in data.yaml drops "
            f"{'it' if len(named) == 1 else 'them'} and keeps the words",
        )


def look_beside(row: Mapping[str, Any], read: Collection[str], ignore: Collection[str], notes: Notes) -> None:
    """The fields of a row that hold a chat: those that mean something for it are refused or, where a person said so, ignored."""
    for name in _OF_ROWS.intersection(row).difference(read):
        if _says_something(name, row[name]):
            _refused_or_ignored(name, ignore, notes)


def _turn(place: int, message: Any, ignore: Collection[str], notes: Notes) -> Turn:
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
    called = False
    for name in message.keys() - _READ:
        if name not in _OF_MESSAGES:
            if message[name] is not None:
                notes.unread.add(f"messages.{name}"[:80])
        elif _says_something(name, message[name]):
            _refused_or_ignored(name, ignore, notes)
            called = called or name in ("tool_calls", "function_call")
    content = _text(place, message.get("content", message.get("value")), notes)
    if content is None and called:  # all that it says is a call: refused, or dropped by the person's word
        return {"role": role, "content": "", "weight": 0}
    if content is None:
        raise BadRow("bad_schema", f"message {place}: content is not a string")
    turn: Turn = {"role": role, "content": content}
    return turn | {"weight": 0} if _weighs_nothing(place, role, message, notes) else turn


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
