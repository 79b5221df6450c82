"""One row of a shard: from its bytes to a normalised document, or to the rule that drops it."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from dataclasses import dataclass, field
from typing import Any

from factory.ingest.reading.rows import BadRow

ROLES = ("system", "user", "assistant", "tool")
_RESERVED = frozenset({"cloze", "all", "target"})  # names of the release gate's own measures
_DOMAIN = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}\Z")

SYNTHETIC = "synthetic, by "  # how ``documents.detail`` begins of one that a model wrote

Content = dict[str, Any]  # {"text": str} or {"messages": [{"role", "content"}]}


@dataclass(slots=True)
class Row:
    """One row and its fate: empty until it is decided, then 'train' | 'held_out' | 'dropped'."""

    number: int
    key: str
    id: str
    domain: str
    source: str | None = None
    license: str | None = None
    releasable: bool = False
    content_sha256: str | None = None
    fate: str = ""
    rule: str | None = None
    matched: str | None = None
    detail: str | None = None
    tokens: int = 0
    supervised_tokens: int = 0
    trimmed: int = 0  # characters removed by decontamination
    wants_held_out: bool = False
    synthetic_by: str | None = None  # model or release that wrote it, as its metadata says
    barred: str = ""  # why its licence does not allow training: it is only compared with others, and then dropped
    pii: dict[str, int] = field(default_factory=dict)

    def drop(self, rule: str, detail: str, matched: str | None = None) -> None:
        assert not self.fate, f"{self.key} has a fate already: {self.fate}"
        self.fate, self.rule, self.detail, self.matched = "dropped", rule, detail, matched


@dataclass(frozen=True)
class Parsed:
    """A row that reads as a document (DESIGN §5)."""

    content: Content
    id: str | None
    domain: str
    source: str | None
    license: str | None
    synthetic_by: str | None


def written_by(release: int, export_sha256: str) -> str:
    """``synthetic_by`` of what a release of a factory wrote: its number, and of which weights.

    >>> written_by(3, "0123456789abcdef0123")
    'release 3 (weights 0123456789abcdef)'
    """
    return f"release {release} (weights {export_sha256[:16]})"


def maker_of(detail: str | None) -> str | None:
    """Which model wrote a document, by ``documents.detail``; None: it names none.

    >>> maker_of("synthetic, by release 3; replaced: 1 email"), maker_of("replaced: 1 email")
    ('release 3', None)
    """
    return detail.removeprefix(SYNTHETIC).partition("; ")[0] if detail and detail.startswith(SYNTHETIC) else None


def keeping_maker(before: str | None, detail: str | None) -> str | None:
    """Another ``documents.detail``, which still says who wrote the document.

    >>> keeping_maker("synthetic, by release 3; replaced: 1 email", "by ann: private"), keeping_maker("replaced: 1 email", None)
    ('synthetic, by release 3; by ann: private', None)
    """
    maker = maker_of(before)
    return "; ".join([f"{SYNTHETIC}{maker}", *([detail] if detail else [])]) if maker else detail


def parse_json(line: bytes) -> Any:
    """Raises: BadRow 'bad_encoding' | 'empty' | 'bad_json'."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRow("bad_encoding", f"not UTF-8 at byte {error.start} of the row") from error
    text = text.removeprefix("\ufeff").strip().strip("\x00")
    if not text:
        raise BadRow("empty", "an empty row")
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise BadRow("bad_json", "JSON nested too deeply") from None
    except ValueError as error:  # also numbers of more digits than Python reads
        raise BadRow("bad_json", str(error)[:200]) from None


def parse_document(row: Any, default_domain: str) -> Parsed:
    """Check a decoded row against the document contract. Unknown keys are ignored.

    Raises: BadRow 'bad_schema' | 'bad_encoding' | 'no_supervised' | 'empty'.
    """
    if not isinstance(row, dict):
        raise BadRow("bad_schema", f"expected an object, got {type(row).__name__}")
    text, messages = row.get("text"), row.get("messages")
    if (text is None) == (messages is None):
        raise BadRow("bad_schema", "exactly one of 'text' and 'messages' is needed")
    content: Content
    if text is not None:
        if not isinstance(text, str):
            raise BadRow("bad_schema", f"'text' is {type(text).__name__}, not a string")
        content = {"text": text}
    else:
        content = {"messages": _messages(messages)}
    domain = _string(row, "domain") or ("chat" if messages is not None else default_domain)
    if not _DOMAIN.match(domain) or domain in _RESERVED:
        raise BadRow("bad_schema", f"'domain' {domain[:40]!r}: letters a-z, digits, '-' and '_' only, 40 at most")
    identity = row.get("id")
    if isinstance(identity, int) and not isinstance(identity, bool):
        identity = str(identity)
    if identity is not None and (not isinstance(identity, str) or len(identity) > 500):
        raise BadRow("bad_schema", "'id' is not a string of 500 characters at most")
    parsed = Parsed(
        content, identity or None, domain, _string(row, "source"), _string(row, "license"), _string(row, "synthetic_by")
    )
    for value in (flat(content), parsed.id, parsed.source, parsed.license, parsed.synthetic_by):
        if value is not None:
            try:
                value.encode("utf-8")
            except UnicodeEncodeError:
                raise BadRow("bad_encoding", "contains half of a surrogate pair") from None
    return parsed


def normalise(content: Content, *, code: bool) -> Content:
    """Unix line ends, no BOM, no blank edge lines; prose in Unicode NFC. Code keeps its characters.

    Raises: BadRow 'empty' when nothing is left.
    """
    if "text" in content:
        text = _normal(content["text"], code)
        if not text:
            raise BadRow("empty", "there is no text")
        return {"text": text}
    # Blanks at the start of a message would merge with the line end after its role.
    messages = [{"role": m["role"], "content": _normal(m["content"], code).strip()} for m in content["messages"]]
    if not any(m["content"] for m in messages if m["role"] == "assistant"):
        raise BadRow("empty", "the assistant's messages are empty")
    return {"messages": messages}


def flat(content: Content) -> str:
    """All words of a document as one text, for hashes of words and filters."""
    return content["text"] if "text" in content else "\n".join(m["content"] for m in content["messages"])


def content_sha256(content: Content) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=False).encode("utf-8")).hexdigest()


def _normal(text: str, code: bool) -> str:
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\ufeff", "")
    if not code and not text.isascii():
        text = unicodedata.normalize("NFC", text)
    lines = text.split("\n")
    first, last = 0, len(lines)
    while first < last and not lines[first].strip():
        first += 1
    while last > first and not lines[last - 1].strip():
        last -= 1
    return "\n".join(lines[first:last])


def _messages(value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise BadRow("bad_schema", "'messages' is not a list of messages")
    messages = []
    for place, message in enumerate(value):
        if not isinstance(message, dict):
            raise BadRow("bad_schema", f"message {place} is not an object")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise BadRow("bad_schema", f"message {place}: role is not one of {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise BadRow("bad_schema", f"message {place}: content is not a string")
        messages.append({"role": role, "content": content})
    if all(message["role"] != "assistant" for message in messages):
        raise BadRow("no_supervised", "no assistant message, so no token carries loss")
    return messages


def _string(row: dict[str, Any], key: str) -> str | None:
    value = row.get(key)
    if value is None or value == "":
        return None
    if not isinstance(value, str) or len(value) > 1000:
        raise BadRow("bad_schema", f"{key!r} is not a string of 1000 characters at most")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
