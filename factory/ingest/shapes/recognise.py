"""A row of any known shape as the document contract has it: by a mapping where there is one, else by what columns it has.

    >>> notes = Notes()
    >>> as_contract({"instruction": "Add.", "input": "1, 2", "output": "3", "lang": "en"}, None, notes)
    {'messages': [{'role': 'user', 'content': 'Add.\\n\\n1, 2'}, {'role': 'assistant', 'content': '3'}]}
    >>> sorted(notes.said), sorted(notes.unread)
    (['read as Alpaca: instruction, input, output → messages'], ['lang'])

What the contract itself names goes first, so that a row with 'text' or 'messages' is what it always was. Sources of the shapes: ShareGPT's
and Alpaca's published files, OpenAI's fine-tuning format, and TRL's "Dataset formats and types" (prompt/completion, preference).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from factory.ingest.shapes.bad_row import BadRow
from factory.ingest.shapes.chats import Notes, Turn, carries_loss, look_beside, offering, refuse, thinking, turns
from factory.ingest.shapes.mapping import NAMES, FieldMapping, read

Shape = Callable[[dict[str, Any], frozenset[str], Notes], "Content | None"]
Content = tuple[str, Any, set[str]]  # 'text' or 'messages', its value, the columns it was made of

TEXTS = ("content", "body", "markdown", "code")  # of plain documents, under other names than 'text'
_NAMING = ("id", "domain", "source", "license", "url", "path", "conversation_id", "synthetic_by")
_CONTRACT = {*_NAMING, "created"}
_NAMED = {"conversation": "conversation_id"}  # keys of a mapping whose column the contract calls otherwise


def as_contract(row: Any, mapping: FieldMapping | None, notes: Notes) -> dict[str, Any]:
    """'text' or 'messages' and what names the document. What else was found is added to ``notes``.

    Raises: BadRow 'bad_schema' | 'no_supervised'.
    """
    if not isinstance(row, dict):
        raise BadRow("bad_schema", f"expected an object, got {type(row).__name__}")
    row = {key: value for key, value in row.items() if value is not None}
    ignore = frozenset(mapping.ignore if mapping else ())
    kind, value, used = (mapping and _mapped(row, mapping, ignore, notes)) or _recognised(row, ignore, notes)
    if kind == "messages":
        value = thinking(row, used, value, ignore, notes)
        look_beside(row, used, ignore, notes)
        value = offering(row, used, value, ignore, notes)
        named = {path for _, mapped in mapping.values() for path in mapped.columns} if mapping else set()
        if "label" not in used | ignore | named and _is_pair_of_one(used, mapping) and _is_zero(row.get("label")):
            notes.refused.add("label")
        refuse(notes)
        if not any(map(carries_loss, value)):
            some = any(turn["role"] == "assistant" for turn in value)
            why = "every answer is of weight 0" if some else "no assistant message"
            raise BadRow("no_supervised", f"{why}, so no token carries loss")
    found = {kind: value} | {name: row[name] for name in _NAMING if name in row}
    if isinstance(row.get("conversation"), str | int) and "conversation" not in used:
        found.setdefault("conversation_id", row["conversation"])
        used |= {"conversation"}
    if mapping:
        for name in NAMES:
            if (mapped := mapping.value(name)) is not None:
                found.pop(_NAMED.get(name, name), None)
                if (made := read(mapped, row)) is not None:
                    found[_NAMED.get(name, name)] = made
                used |= {key for key in row for path in mapped.columns if path == key or path.startswith(f"{key}.")}
    notes.unread |= {str(name)[:80] for name in row.keys() - used - _CONTRACT}
    return found


# -- by a mapping ------------------------------------------------------------------------------------------------------
def _mapped(row: dict[str, Any], mapping: FieldMapping, ignore: frozenset[str], notes: Notes) -> Content | None:
    """None: the mapping says nothing of the words."""

    def column(name: str) -> Any:
        value = mapping.value(name)
        assert value
        used.update(key for key in row for path in value.columns if path == key or path.startswith(f"{key}."))
        if (found := read(value, row)) is None:
            raise BadRow(
                "bad_schema", f"the row has no {' or no '.join(map(repr, value.columns))}, which is its {name!r}"
            )
        return found

    used: set[str] = set()
    if mapping.text is not None:
        return "text", column("text"), used
    if mapping.messages is not None:
        said = turns(column("messages"), ignore, notes)
    elif mapping.prompt is not None:
        said = _pair(column("prompt"), column("completion"), ignore, notes)
    elif mapping.system is None:
        return None
    else:
        kind, said, used = _recognised(row, ignore, notes)
        if kind == "text":
            raise BadRow("bad_schema", "'system' is mapped, and the row is a plain text: only a chat has a system turn")
    if mapping.system is not None:
        said = _with_system(column("system"), said)
    return "messages", said, used


# -- by its columns ----------------------------------------------------------------------------------------------------
def _recognised(row: dict[str, Any], ignore: frozenset[str], notes: Notes) -> Content:
    if "text" in row and "messages" in row:
        raise BadRow(
            "bad_schema",
            "exactly one of 'text' and 'messages' is needed; 'fields' in data.yaml says which column counts",
        )
    if "text" in row:
        return "text", row["text"], {"text"}
    if "messages" in row:
        return _with_row_system(row, turns(row["messages"], ignore, notes), {"messages"})
    for shape in SHAPES:
        if found := shape(row, ignore, notes):
            return found
    named = ", ".join(str(name)[:40] for name in [*row][:12]) or "none"
    raise BadRow(
        "bad_schema",
        f"neither 'text' nor 'messages', and no known shape; columns: {named}; 'fields' in data.yaml maps them",
    )


def _conversations(row: dict[str, Any], ignore: frozenset[str], notes: Notes) -> Content | None:
    """ShareGPT, and messages under its name."""
    for name in ("conversations", "conversation"):
        value = row.get(name)
        if not isinstance(value, list) or not value or not isinstance(value[0], dict):
            continue
        share = "from" in value[0]
        notes.said.add(f"read as {'ShareGPT' if share else 'a chat'}: {name} → messages")
        return _with_row_system(row, turns(value, ignore, notes), {name})
    return None


def _preference(row: dict[str, Any], ignore: frozenset[str], notes: Notes) -> Content | None:
    """The chosen answer, after the prompt; what both answers begin with is prompt too, where none is named."""
    if "chosen" not in row or "rejected" not in row:
        return None
    notes.said.add(
        "read as preference pairs: the prompt and the chosen answer → messages; the rejected one is not trained on"
    )
    used = {"chosen", "rejected", "prompt"}
    chosen, prompt = row["chosen"], row.get("prompt")
    if isinstance(chosen, str):
        if prompt is None:
            raise BadRow("bad_schema", "'chosen' is a text without a 'prompt': what it answers is not known")
        return _with_row_system(row, _pair(prompt, chosen, ignore, notes), used)
    whole = turns(chosen, ignore, notes)
    if isinstance(prompt, list):
        return _with_row_system(row, _pair(prompt, chosen, ignore, notes), used)
    if isinstance(prompt, str) and whole[0]["role"] == "assistant":
        return _with_row_system(row, _pair(prompt, chosen, ignore, notes), used)
    if isinstance(prompt, str) and all(turn["content"].strip() != prompt.strip() for turn in whole):
        raise BadRow("bad_schema", "'chosen' holds a whole chat in which 'prompt' does not occur: map one of them")
    shared = 0
    rejected = turns(row["rejected"], ignore, Notes()) if isinstance(row["rejected"], list) else []
    while shared < min(len(whole) - 1, len(rejected)) and whole[shared] == rejected[shared]:
        shared += 1
    return _with_row_system(row, [*_silent(whole[:shared]), *whole[shared:]], used)


def _alpaca(row: dict[str, Any], ignore: frozenset[str], notes: Notes) -> Content | None:
    """Instruction, perhaps an input, and the output; Dolly's names too. 'history' holds earlier pairs, as LLaMA-Factory has it."""
    answer = next((name for name in ("output", "response") if isinstance(row.get(name), str)), None)
    if not isinstance(row.get("instruction"), str) or answer is None:
        return None
    given = next((name for name in ("input", "context") if isinstance(row.get(name), str)), None)
    used = {name for name in ("instruction", given, answer) if name}
    title = "Alpaca" if answer == "output" else "Dolly"
    notes.said.add(f"read as {title}: instruction, {'context' if title == 'Dolly' else 'input'}, {answer} → messages")
    asked = "\n\n".join(part for part in (row["instruction"], row[given] if given else "") if part.strip())
    earlier = row.get("history", [])
    if not isinstance(earlier, list) or not all(_is_pair(one) for one in earlier):
        raise BadRow("bad_schema", "'history' is not a list of pairs, of a question and its answer")
    said = [turn for pair in (*earlier, (asked, row[answer])) for turn in _asked_and_answered(*pair)]
    return _with_row_system(row, said, used | {"history"})


def _is_pair(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(part, str) for part in value)


def _prompt_and_completion(row: dict[str, Any], ignore: frozenset[str], notes: Notes) -> Content | None:
    if "prompt" not in row or "completion" not in row:
        return None
    notes.said.add("read as prompt and completion: prompt → user, completion → assistant")
    said = _pair(row["prompt"], row["completion"], ignore, notes)
    return _with_row_system(row, said, {"prompt", "completion"})


def _is_pair_of_one(used: set[str], mapping: FieldMapping | None) -> bool:
    """Prompt and completion, where a ``label`` beside them says that the completion is good or bad (TRL's KTO)."""
    return used >= {"prompt", "completion"} or (mapping is not None and mapping.prompt is not None)


def _is_zero(label: Any) -> bool:
    """``false`` as a number, as tables write it. It may be a class too: the person says so with 'ignore: [label]'.

    >>> [_is_zero(label) for label in (0, 0.0, "0", "0.0", 1, "1", 2, "bad", None)]
    [True, True, True, True, False, False, False, False, False]
    """
    return isinstance(label, int | float) and label == 0 or isinstance(label, str) and label.strip() in ("0", "0.0")


def _question_and_answer(row: dict[str, Any], ignore: frozenset[str], notes: Notes) -> Content | None:
    """Only where nothing else may belong to the question: choices, or a passage that it is about."""
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
    notes.said.add("read as questions and answers: question → user, answer → assistant")
    return _with_row_system(row, _asked_and_answered(row["question"], row["answer"]), words)


def _other_text(row: dict[str, Any], ignore: frozenset[str], notes: Notes) -> Content | None:
    named = [name for name in TEXTS if isinstance(row.get(name), str)]
    if len(named) > 1:
        raise BadRow(
            "bad_schema",
            f"{' and '.join(map(repr, named))} may both be the text; 'fields' in data.yaml says which (text: {named[0]})",
        )
    if not named:
        return None
    notes.said.add(f"read as text: {named[0]} → text")
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


def _pair(prompt: Any, completion: Any, ignore: frozenset[str], notes: Notes) -> list[Turn]:
    """A prompt and its completion, each a text or a list of messages. Only the completion is learned (TRL's ``completion_only_loss``)."""
    for name, value in (("prompt", prompt), ("completion", completion)):
        if not isinstance(value, str | list | tuple):
            raise BadRow(
                "bad_schema", f"the {name} is {type(value).__name__}; a text or a list of messages is expected"
            )
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else turns(prompt, ignore, notes)
    after = (
        [{"role": "assistant", "content": completion}]
        if isinstance(completion, str)
        else turns(completion, ignore, notes)
    )
    return [*_silent(before), *after]


def _silent(before: list[Turn]) -> list[Turn]:
    """Turns that are only read: of the prompt."""
    return [turn | {"weight": 0} if turn["role"] == "assistant" else turn for turn in before]


def _with_row_system(row: Mapping[str, Any], said: list[Turn], used: set[str]) -> Content:
    """A column 'system' is the first turn: Anthropic's format, and LLaMA-Factory's."""
    system = row.get("system")
    if isinstance(system, str):
        return "messages", _with_system(system, said), used | {"system"}
    return "messages", said, used


def _with_system(system: Any, said: list[Turn]) -> list[Turn]:
    if not isinstance(system, str):
        raise BadRow("bad_schema", f"the system turn is {type(system).__name__}, and no text")
    if not system.strip():
        return said
    if said[0]["role"] == "system":
        if said[0]["content"].strip() == system.strip():
            return said
        raise BadRow("bad_schema", "a system turn is named beside the messages, which begin with another one")
    return [{"role": "system", "content": system}, *said]
