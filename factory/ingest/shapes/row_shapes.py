"""Turns a row of any known shape into the form of the document contract. A mapping decides how, if there is one, else the row's columns do.

    >>> notes = ReadingNotes()
    >>> normalise_row({"instruction": "Add.", "input": "1, 2", "output": "3", "lang": "en"}, None, notes)
    {'messages': [{'role': 'user', 'content': 'Add.\\n\\n1, 2'}, {'role': 'assistant', 'content': '3'}]}
    >>> sorted(notes.messages), sorted(notes.unread_fields)
    (['read as Alpaca: instruction, input, output → messages'], ['lang'])

The contract's own keys take precedence: a row with 'text' or 'messages' never has another shape. Sources of the shapes: ShareGPT's and Alpaca's
published files, OpenAI's fine-tuning format, and TRL's "Dataset formats and types" (prompt/completion, preference).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from factory.ingest.shapes.bad_row import BadRow, make_not_an_object_error
from factory.ingest.shapes.chats import (
    ReadingNotes,
    Turn,
    add_reasoning,
    add_tools,
    collect_refused_fields,
    has_loss,
    raise_for_refused_fields,
    read_turns,
)
from factory.ingest.shapes.field_mapping import NAMES, FieldMapping, read_mapped_value
from kernels.contract.message import Message

Shape = Callable[[dict[str, Any], frozenset[str], ReadingNotes], "Content | None"]
Content = tuple[str, Any, set[str]]  # ('text' or 'messages', the value, the columns from which it was made)

TEXTS = ("content", "body", "markdown", "code")  # columns other than 'text' that may hold a plain document
_NAMING = ("id", "domain", "source", "license", "url", "path", "conversation_id", "synthetic_by")
_CONTRACT = {*_NAMING, "created"}
_NAMED = {"conversation": "conversation_id"}  # keys of a mapping that have a different name in the contract


def normalise_row(row: Any, mapping: FieldMapping | None, notes: ReadingNotes) -> dict[str, Any]:
    """Return the row's 'text' or 'messages', and the keys that describe the document. Adds to ``notes`` how the row was read.

    Raises: BadRow 'bad_schema' | 'no_supervised'.
    """
    if not isinstance(row, dict):
        raise make_not_an_object_error(row)
    row = {key: value for key, value in row.items() if value is not None}
    ignore = frozenset(mapping.ignore if mapping else ())
    kind, value, used = (mapping and _mapped(row, mapping, ignore, notes)) or _recognised(row, ignore, notes)
    if kind == "messages":
        value = add_reasoning(row, used, value, ignore, notes)
        collect_refused_fields(row, used, ignore, notes)
        value = add_tools(row, used, value, ignore, notes)
        named = {path for _, mapped in mapping.list_mapped_values() for path in mapped.columns} if mapping else set()
        if "label" not in used | ignore | named and _is_pair_of_one(used, mapping) and _is_zero(row.get("label")):
            notes.refused_fields.add("label")
        raise_for_refused_fields(notes)
        if not any(map(has_loss, value)):
            if any(turn["role"] == "assistant" for turn in value):
                weightless = Message("shapes.all_weight_0", "every answer has weight 0, so no token carries loss")
                raise BadRow("no_supervised", weightless)
            unanswered = Message(
                "shapes.no_answer", "the chat has no message of the assistant, so no token carries loss"
            )
            raise BadRow("no_supervised", unanswered)
    found = {kind: value} | {name: row[name] for name in _NAMING if name in row}
    if isinstance(row.get("conversation"), str | int) and "conversation" not in used:
        found.setdefault("conversation_id", row["conversation"])
        used |= {"conversation"}
    if mapping:
        for name in NAMES:
            if (mapped := mapping.get_mapped_value(name)) is not None:
                found.pop(_NAMED.get(name, name), None)
                if (made := read_mapped_value(mapped, row)) is not None:
                    found[_NAMED.get(name, name)] = made
                used |= {key for key in row for path in mapped.columns if path == key or path.startswith(f"{key}.")}
    notes.unread_fields |= {str(name)[:80] for name in row.keys() - used - _CONTRACT}
    return found


# -- by a mapping ------------------------------------------------------------------------------------------------------
def _mapped(row: dict[str, Any], mapping: FieldMapping, ignore: frozenset[str], notes: ReadingNotes) -> Content | None:
    """Return the row's content by the mapping, or None if the mapping names no content."""

    def column(name: str) -> Any:
        value = mapping.get_mapped_value(name)
        assert value
        used.update(key for key in row for path in value.columns if path == key or path.startswith(f"{key}."))
        if (found := read_mapped_value(value, row)) is None:
            lacks = Message(
                "shapes.no_column",
                "the row lacks a column ({columns}) that 'fields' in data.yaml maps to {key!r}",
                columns=value.columns,
                key=name,
            )
            raise BadRow("bad_schema", lacks)
        return found

    used: set[str] = set()
    if mapping.text is not None:
        return "text", column("text"), used
    if mapping.messages is not None:
        said = read_turns(column("messages"), ignore, notes)
    elif mapping.prompt is not None:
        said = _pair(column("prompt"), column("completion"), ignore, notes)
    elif mapping.system is None:
        return None
    else:
        kind, said, used = _recognised(row, ignore, notes)
        if kind == "text":
            plain = Message(
                "shapes.system_of_text",
                "'system' is mapped, but the row is a plain text: only a chat has a system turn",
            )
            raise BadRow("bad_schema", plain)
    if mapping.system is not None:
        said = _with_system(column("system"), said)
    return "messages", said, used


# -- by its columns ----------------------------------------------------------------------------------------------------
def _recognised(row: dict[str, Any], ignore: frozenset[str], notes: ReadingNotes) -> Content:
    if "text" in row and "messages" in row:
        both = Message(
            "shapes.text_and_messages",
            "the row has 'text' and 'messages', but a document has only one of the two. Choose the column under 'fields' in "
            "data.yaml",
        )
        raise BadRow("bad_schema", both)
    if "text" in row:
        return "text", row["text"], {"text"}
    if "messages" in row:
        return _with_row_system(row, read_turns(row["messages"], ignore, notes), {"messages"})
    for shape in SHAPES:
        if found := shape(row, ignore, notes):
            return found
    unknown = Message(
        "shapes.unknown",
        "the row has neither 'text' nor 'messages' and no known shape. Its columns: {columns}. Map the columns under 'fields' in data.yaml",
        columns=[str(name)[:40] for name in [*row][:12]] or ["none"],
    )
    raise BadRow("bad_schema", unknown)


def _conversations(row: dict[str, Any], ignore: frozenset[str], notes: ReadingNotes) -> Content | None:
    """Read the column 'conversations': ShareGPT's turns, or messages."""
    for name in ("conversations", "conversation"):
        value = row.get(name)
        if not isinstance(value, list) or not value or not isinstance(value[0], dict):
            continue
        shape = "ShareGPT" if "from" in value[0] else "a chat"
        notes.messages.add(
            Message("shapes.read_conversations", "read as {shape}: {column} → messages", shape=shape, column=name)
        )
        return _with_row_system(row, read_turns(value, ignore, notes), {name})
    return None


def _preference(row: dict[str, Any], ignore: frozenset[str], notes: ReadingNotes) -> Content | None:
    """Read the prompt and the chosen answer. If the row names no prompt, the turns with which both answers begin are the prompt."""
    if "chosen" not in row or "rejected" not in row:
        return None
    notes.messages.add(
        Message(
            "shapes.read_preference",
            "read as preference pairs: the prompt and the chosen answer → messages; the rejected answer is not used",
        )
    )
    used = {"chosen", "rejected", "prompt"}
    chosen, prompt = row["chosen"], row.get("prompt")
    if isinstance(chosen, str):
        if prompt is None:
            alone = Message("shapes.chosen_without_prompt", "'chosen' is only an answer, and the row has no 'prompt'")
            raise BadRow("bad_schema", alone)
        return _with_row_system(row, _pair(prompt, chosen, ignore, notes), used)
    whole = read_turns(chosen, ignore, notes)
    if isinstance(prompt, list):
        return _with_row_system(row, _pair(prompt, chosen, ignore, notes), used)
    if isinstance(prompt, str) and whole[0]["role"] == "assistant":
        return _with_row_system(row, _pair(prompt, chosen, ignore, notes), used)
    if isinstance(prompt, str) and all(turn["content"].strip() != prompt.strip() for turn in whole):
        other = Message(
            "shapes.prompt_not_in_chosen",
            "'chosen' is a whole chat that does not contain 'prompt', so the factory cannot join them: map either 'chosen' "
            "or 'prompt' under 'fields' in data.yaml",
        )
        raise BadRow("bad_schema", other)
    shared = 0
    rejected = read_turns(row["rejected"], ignore, ReadingNotes()) if isinstance(row["rejected"], list) else []
    while shared < min(len(whole) - 1, len(rejected)) and whole[shared] == rejected[shared]:
        shared += 1
    return _with_row_system(row, [*_silent(whole[:shared]), *whole[shared:]], used)


def _alpaca(row: dict[str, Any], ignore: frozenset[str], notes: ReadingNotes) -> Content | None:
    """Read an instruction, an optional input, and the output, also under Dolly's names. 'history' has earlier pairs, as in LLaMA-Factory."""
    answer = next((name for name in ("output", "response") if isinstance(row.get(name), str)), None)
    if not isinstance(row.get("instruction"), str) or answer is None:
        return None
    given = next((name for name in ("input", "context") if isinstance(row.get(name), str)), None)
    used = {name for name in ("instruction", given, answer) if name}
    shape, context = ("Alpaca", "input") if answer == "output" else ("Dolly", "context")
    notes.messages.add(
        Message(
            "shapes.read_instruction",
            "read as {shape}: {columns} → messages",
            shape=shape,
            columns=("instruction", context, answer),
        )
    )
    asked = "\n\n".join(part for part in (row["instruction"], row[given] if given else "") if part.strip())
    earlier = row.get("history", [])
    if not isinstance(earlier, list) or not all(_is_pair(one) for one in earlier):
        raise BadRow("bad_schema", Message("shapes.history", "'history' is not a list of pairs [question, answer]"))
    said = [turn for pair in (*earlier, (asked, row[answer])) for turn in _asked_and_answered(*pair)]
    return _with_row_system(row, said, used | {"history"})


def _is_pair(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(part, str) for part in value)


def _prompt_and_completion(row: dict[str, Any], ignore: frozenset[str], notes: ReadingNotes) -> Content | None:
    if "prompt" not in row or "completion" not in row:
        return None
    notes.messages.add(
        Message("shapes.read_prompts", "read as prompt and completion: prompt → user, completion → assistant")
    )
    said = _pair(row["prompt"], row["completion"], ignore, notes)
    return _with_row_system(row, said, {"prompt", "completion"})


def _is_pair_of_one(used: set[str], mapping: FieldMapping | None) -> bool:
    """Return whether the row is a prompt and a completion. Its ``label`` may then call the completion good or bad (TRL's KTO)."""
    return used >= {"prompt", "completion"} or (mapping is not None and mapping.prompt is not None)


def _is_zero(label: Any) -> bool:
    """Return whether the label is ``false`` written as a number, as in tables. If a 0 is a class instead, a person writes 'ignore: [label]'.

    >>> [_is_zero(label) for label in (0, 0.0, "0", "0.0", 1, "1", 2, "bad", None)]
    [True, True, True, True, False, False, False, False, False]
    """
    return isinstance(label, int | float) and label == 0 or isinstance(label, str) and label.strip() in ("0", "0.0")


def _question_and_answer(row: dict[str, Any], ignore: frozenset[str], notes: ReadingNotes) -> Content | None:
    """Read a question and its answer, if no other column may belong to the question (choices, or a passage)."""
    words = {"question", "answer"}
    other_files = {
        "choices",
        "options",
        "context",
        "passage",
        "document",
        "paragraph",
        "story",
        "table",
        "contexts",
        "distractors",
    }
    if not all(isinstance(row.get(name), str) for name in words) or other_files & row.keys():
        return None
    notes.messages.add(
        Message("shapes.read_questions", "read as questions and answers: question → user, answer → assistant")
    )
    return _with_row_system(row, _asked_and_answered(row["question"], row["answer"]), words)


def _other_text(row: dict[str, Any], ignore: frozenset[str], notes: ReadingNotes) -> Content | None:
    named = [name for name in TEXTS if isinstance(row.get(name), str)]
    if len(named) > 1:
        several = Message(
            "shapes.several_texts",
            "each of the columns {columns} may be the text. Choose a column under 'fields' in data.yaml (for example 'text: "
            "{first}')",
            columns=named,
            first=named[0],
        )
        raise BadRow("bad_schema", several)
    if not named:
        return None
    notes.messages.add(Message("shapes.read_text", "read as text: {column} → text", column=named[0]))
    return "text", row[named[0]], {named[0]}


SHAPES: tuple[Shape, ...] = (
    _conversations,
    _preference,
    _alpaca,
    _prompt_and_completion,
    _question_and_answer,
    _other_text,
)


# -- turns -------------------------------------------------------------------------------------------------------------
def _asked_and_answered(prompt: str, completion: str) -> list[Turn]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]


def _pair(prompt: Any, completion: Any, ignore: frozenset[str], notes: ReadingNotes) -> list[Turn]:
    """Return the turns of a prompt and its completion, each a text or a list of messages. Only the completion carries loss (TRL's
    ``completion_only_loss``)."""
    for name, value in (("prompt", prompt), ("completion", completion)):
        if not isinstance(value, str | list | tuple):
            wrong = Message(
                "shapes.pair_type",
                "the {name} is {kind}; a text or a list of messages is expected",
                name=name,
                kind=type(value).__name__,
            )
            raise BadRow("bad_schema", wrong)
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else read_turns(prompt, ignore, notes)
    after = (
        [{"role": "assistant", "content": completion}]
        if isinstance(completion, str)
        else read_turns(completion, ignore, notes)
    )
    return [*_silent(before), *after]


def _silent(before: list[Turn]) -> list[Turn]:
    """Return the turns of a prompt without loss."""
    return [turn | {"weight": 0} if turn["role"] == "assistant" else turn for turn in before]


def _with_row_system(row: Mapping[str, Any], said: list[Turn], used: set[str]) -> Content:
    """Return the chat with the column 'system' as its first turn, as in Anthropic's and LLaMA-Factory's formats."""
    system = row.get("system")
    if isinstance(system, str):
        return "messages", _with_system(system, said), used | {"system"}
    return "messages", said, used


def _with_system(system: Any, said: list[Turn]) -> list[Turn]:
    if not isinstance(system, str):
        kind = type(system).__name__
        raise BadRow("bad_schema", Message("shapes.system_type", "the system turn is {kind}, not a text", kind=kind))
    if not system.strip():
        return said
    if said[0]["role"] == "system":
        if said[0]["content"].strip() == system.strip():
            return said
        other = Message(
            "shapes.two_system_turns",
            "the row has two different system turns: the column 'system' and the first message",
        )
        raise BadRow("bad_schema", other)
    return [{"role": "system", "content": system}, *said]
