"""Reads prompts. A prompt is a text to continue, or messages to answer, with a source and a licence."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from factory.core.errors import InputError
from factory.ingest.document import BadRow, Content, parse_document, parse_json
from factory.ingest.reading.streams import make_unreadable_file_error
from factory.ingest.rules.policy import LicenceRules
from factory.ingest.shapes.bad_row import make_not_an_object_error
from factory.ingest.shapes.tool_calls import TOOLS
from kernels.contract.message import Message

JSON_LINES = (".jsonl", ".json", ".ndjson")
LONGEST = 1 << 20  # bytes of the longest line
ANSWER = {"role": "assistant", "content": "an answer"}  # makes a whole chat of a prompt, for the checks


@dataclass(frozen=True)
class Prompt:
    """One prompt. ``content``: {"text": …} or {"messages": […]}. ``opening_of``: the key of the training document whose opening the prompt is;
    None: a person gave the prompt."""

    content: Content
    domain: str
    source: str | None = None
    license: str | None = None
    opening_of: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def make_document(self, answer: str) -> Content:
        """The document that consists of the prompt and the answer.

        >>> Prompt({"text": "Once"}, "text").make_document(" upon a time")
        {'text': 'Once upon a time'}
        """
        if "text" in self.content:
            return {"text": self.content["text"] + answer}
        return {"messages": [*self.content["messages"], {"role": "assistant", "content": answer}]}


def read_prompts(path: Path, default_domain: str, count: int | None) -> list[Prompt]:
    """The first ``count`` prompts of a file; None: all. The file has JSON lines with ``prompt`` or ``messages`` (and ``domain``, ``source``,
    ``license``), or, if its suffix is not in ``JSON_LINES``, one text on each line.

    Raises: InputError that names file and line.
    """
    found: list[Prompt] = []
    number = 0
    try:
        with open(path, "rb") as lines:
            while (count is None or len(found) < count) and (line := lines.readline(LONGEST + 1)):
                number += 1
                if len(line) > LONGEST:
                    raise InputError(
                        "synthetic.long_line",
                        "{path}, line {line}: the line has more than {limit} bytes",
                        path=path,
                        line=number,
                        limit=LONGEST,
                    )
                if line.strip():
                    found.append(_prompt(line, path.suffix.lower() in JSON_LINES, default_domain))
    except BadRow as bad:
        raise InputError(
            "synthetic.bad_line", "{path}, line {line}: {why}", path=path, line=number, why=bad.detail
        ) from None
    except OSError as error:
        raise make_unreadable_file_error(path, error) from error
    if not found:
        raise InputError(
            "synthetic.no_prompts",
            '{path} has no prompt. Write one prompt on each line, as {{"prompt": "…"}} or as text',
            path=path,
        )
    return found


def _prompt(line: bytes, as_json: bool, default_domain: str) -> Prompt:
    """The prompt of a line. Raises: BadRow."""
    if not as_json:
        try:
            row: Any = {"prompt": line.decode("utf-8").strip("\r\n\ufeff")}
        except UnicodeDecodeError as error:
            unread = Message("synthetic.line_not_utf8", "the line is not UTF-8 at byte {byte}", byte=error.start)
            raise BadRow("bad_encoding", unread) from error
    else:
        row = parse_json(line)
    if not isinstance(row, dict):
        raise make_not_an_object_error(row)
    text, messages = row.get("prompt"), row.get("messages")
    if (text is None) == (messages is None):
        one = Message("synthetic.one_prompt", "a row needs either 'prompt' or 'messages', not both")
        raise BadRow("bad_schema", one)
    if isinstance(messages, list) and messages and _role(messages[-1]) == "assistant":
        answered = Message(
            "synthetic.answered",
            "'messages' ends with an answer. Remove this answer, because the model writes the answer",
        )
        raise BadRow("bad_schema", answered)
    whole = {key: row.get(key) for key in ("domain", "source", "license")}
    if messages is not None:
        whole["messages"] = [*messages, ANSWER] if isinstance(messages, list) and messages else messages
        whole |= {name: row[name] for name in TOOLS if name in row}  # the system turn lists the tools, as in training
    elif isinstance(text, str) and text.strip():
        whole["text"] = text
    else:
        raise BadRow("bad_schema", Message("synthetic.blank_prompt", "'prompt' is not a text, or is blank"))
    parsed = parse_document(whole, default_domain)
    content = {"messages": parsed.content["messages"][:-1]} if messages is not None else parsed.content
    return Prompt(content, parsed.domain, parsed.source, parsed.license)


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def choose_licence(prompt: Prompt, named_licence: str | None, policy: LicenceRules) -> str | None:
    """The licence of a document that begins with ``prompt``. ``named_licence``: the licence that the person gives to the model's text.

    The stricter of both licences counts, so the licence is never laxer than that of the opening. If the document of the opening has no licence, the
    result has none.

    >>> policy = LicenceRules(known={"MIT": {"train": True, "release": True}})
    >>> mine, nobodys = Prompt({"text": "a"}, "text"), Prompt({"text": "a"}, "text", opening_of="k")
    >>> choose_licence(mine, "MIT", policy), choose_licence(nobodys, "MIT", policy), choose_licence(nobodys, None, policy)
    ('MIT', None, None)
    >>> choose_licence(Prompt({"text": "a"}, "text", license="CC-BY-NC-4.0"), "MIT", policy)
    'CC-BY-NC-4.0'
    """
    if named_licence is None or (prompt.license is None and prompt.opening_of is None):
        return named_licence or prompt.license
    its, own = policy.find_licence(prompt.license), policy.find_licence(named_licence)
    return named_licence if (own.train, own.release) <= (its.train, its.release) else prompt.license
