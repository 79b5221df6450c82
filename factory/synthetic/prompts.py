"""Prompts: a text to be continued, or messages that wait for an answer, with where they are from and under which licence."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from factory.core.errors import InputError
from factory.ingest.document import BadRow, Content, parse_document, parse_json
from factory.ingest.rules.policy import Licences
from factory.ingest.shapes.calls import TOOLS

JSON_LINES = (".jsonl", ".json", ".ndjson")
LONGEST = 1 << 20  # bytes of a line
ANSWER = {"role": "assistant", "content": "an answer"}  # so that a prompt reads as a document


@dataclass(frozen=True)
class Prompt:
    """``content``: {"text": …} or {"messages": […]}. ``opening_of``: key of the training document that it is the opening of; None: a person
    gave it."""

    content: Content
    domain: str
    source: str | None = None
    license: str | None = None
    opening_of: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def with_answer(self, answer: str) -> Content:
        """The document: the prompt is part of it.

        >>> Prompt({"text": "Once"}, "text").with_answer(" upon a time")
        {'text': 'Once upon a time'}
        """
        if "text" in self.content:
            return {"text": self.content["text"] + answer}
        return {"messages": [*self.content["messages"], {"role": "assistant", "content": answer}]}


def read_prompts(path: Path, default_domain: str, count: int | None) -> list[Prompt]:
    """The first ``count`` prompts of a file, all without one: JSON lines with ``prompt`` or ``messages`` (and ``domain``, ``source``,
    ``license``), or, in a file of another name, a text a line.

    Raises: InputError that names file and line.
    """
    found: list[Prompt] = []
    number = 0
    try:
        with open(path, "rb") as lines:
            while (count is None or len(found) < count) and (line := lines.readline(LONGEST + 1)):
                number += 1
                if len(line) > LONGEST:
                    raise InputError(f"{path}, line {number}: longer than {LONGEST} bytes")
                if line.strip():
                    found.append(_prompt(line, path.suffix.lower() in JSON_LINES, default_domain))
    except BadRow as bad:
        raise InputError(f"{path}, line {number}: {bad.detail}") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    if not found:
        raise InputError(f'{path} holds no prompt: one a line is expected, as {{"prompt": "…"}} or as text')
    return found


def _prompt(line: bytes, as_json: bool, default_domain: str) -> Prompt:
    """Raises: BadRow."""
    if not as_json:
        try:
            row: Any = {"prompt": line.decode("utf-8").strip("\r\n\ufeff")}
        except UnicodeDecodeError as error:
            raise BadRow("bad_encoding", f"not UTF-8 at byte {error.start} of the line") from error
    else:
        row = parse_json(line)
    if not isinstance(row, dict):
        raise BadRow("bad_schema", f"expected an object, got {type(row).__name__}")
    text, messages = row.get("prompt"), row.get("messages")
    if (text is None) == (messages is None):
        raise BadRow("bad_schema", "exactly one of 'prompt' and 'messages' is needed")
    if isinstance(messages, list) and messages and _role(messages[-1]) == "assistant":
        raise BadRow("bad_schema", "'messages' ends with an answer: leave that out, it is to be written")
    whole = {key: row.get(key) for key in ("domain", "source", "license")}
    if messages is not None:
        whole["messages"] = [*messages, ANSWER] if isinstance(messages, list) and messages else messages
        whole |= {name: row[name] for name in TOOLS if name in row}  # listed in the system turn, as in training
    elif isinstance(text, str) and text.strip():
        whole["text"] = text
    else:
        raise BadRow("bad_schema", "'prompt' is not a text with a character in it")
    parsed = parse_document(whole, default_domain)
    content = {"messages": parsed.content["messages"][:-1]} if messages is not None else parsed.content
    return Prompt(content, parsed.domain, parsed.source, parsed.license)


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def licence_of(prompt: Prompt, named: str | None, policy: Licences) -> str | None:
    """Of a document that begins with ``prompt``; ``named``: by the person, who has the rights in what the model writes.

    The stricter one counts, so that no text changes its licence by being an opening: an opening keeps what its document has, also none.

    >>> policy = Licences(known={"MIT": {"train": True, "release": True}})
    >>> mine, nobodys = Prompt({"text": "a"}, "text"), Prompt({"text": "a"}, "text", opening_of="k")
    >>> licence_of(mine, "MIT", policy), licence_of(nobodys, "MIT", policy), licence_of(nobodys, None, policy)
    ('MIT', None, None)
    >>> licence_of(Prompt({"text": "a"}, "text", license="CC-BY-NC-4.0"), "MIT", policy)
    'CC-BY-NC-4.0'
    """
    if named is None or (prompt.license is None and prompt.opening_of is None):
        return named or prompt.license
    its, own = policy.of(prompt.license), policy.of(named)
    return named if (own.train, own.release) <= (its.train, its.release) else prompt.license
