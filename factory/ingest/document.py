"""Turns one row of a shard from bytes into a normalised document, or names the rule that drops the row."""

from __future__ import annotations

import hashlib
import json
import math
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from factory.core.errors import InputError
from factory.ingest.rules.held_out_split import read_grouping_facts
from factory.ingest.shapes.bad_row import BadRow as BadRow
from factory.ingest.shapes.chats import ROLES as ROLES
from factory.ingest.shapes.chats import ReadingNotes, has_loss
from factory.ingest.shapes.field_mapping import FieldMapping
from factory.ingest.shapes.row_shapes import normalise_row
from factory.ingest.shapes.tool_calls import strip_tools
from kernels.contract.message import Message

_RESERVED = frozenset({"cloze", "all", "target"})  # names of the release gate's own measures
_OPERATOR = re.compile(
    r"\s(OR|or|WITH|with)\s"
)  # operators of SPDX expressions that bind more or less strongly than AND
_DOMAIN = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}\Z")

SYNTHETIC_PREFIX = "synthetic, by "  # the beginning of ``documents.detail`` of a document that a model wrote

LONGEST_NAME = 1000  # characters of a source, a licence, a URL …
# {"text": str} or {"messages": [{"role", "content"}]}; an answer that carries no loss has {"weight": 0} too. See ``chats.Turn``.
Content = dict[str, Any]


@dataclass(slots=True)
class Row:
    """One row of a shard and its fate. The fate is '' until ingest decides it, then 'train', 'held_out' or 'dropped'."""

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
    spells_special_token: bool = (
        False  # the text spells a special token; programs encode such a text differently, so it cannot be held out
    )
    group_key: str | None = (
        None  # the document's group, by ``group`` of its domain; None: the document is a group of its own
    )
    grouping_facts: dict[str, str] = field(
        default_factory=dict
    )  # other names that may group it (``rules/held_out_split``)
    held_out_group: str = ""  # for a held-out document: the group that it counts as
    is_sealed: bool = False  # for a held-out document: whether it is in the sealed half
    synthetic_by: str | None = None  # the model or release that wrote the document, from its metadata
    licence_refusal: str = (
        ""  # why the licence does not allow training; such a row is compared with other rows before it is dropped
    )
    pii: dict[str, int] = field(default_factory=dict)

    @property
    def group(self) -> str:
        return self.group_key or self.key

    def drop(self, rule: str, detail: str, matched: str | None = None) -> None:
        assert not self.fate, f"{self.key} has a fate already: {self.fate}"
        self.fate, self.rule, self.detail, self.matched = "dropped", rule, detail, matched


@dataclass(frozen=True)
class ParsedDocument:
    """A document in the form of the document contract (DESIGN §5), read from a row."""

    content: Content
    id: str | None
    domain: str
    source: str | None
    license: str | None
    synthetic_by: str | None
    facts: dict[str, str] = field(default_factory=dict)  # names that may group the document (``rules/held_out_split``)


def format_release_as_author(release: int, export_sha256: str) -> str:
    """Return the ``synthetic_by`` of documents that a release wrote: the release's number and the hash of its weights.

    >>> format_release_as_author(3, "0123456789abcdef0123")
    'release 3 (weights 0123456789abcdef)'
    """
    return f"release {release} (weights {export_sha256[:16]})"


def read_author_model(detail: str | None) -> str | None:
    """Return the model that wrote a document, from ``documents.detail``, or None if the detail names no model.

    >>> read_author_model("synthetic, by release 3; replaced: 1 email"), read_author_model("replaced: 1 email")
    ('release 3', None)
    """
    return (
        detail.removeprefix(SYNTHETIC_PREFIX).partition("; ")[0]
        if detail and detail.startswith(SYNTHETIC_PREFIX)
        else None
    )


def copy_author_model(old_detail: str | None, new_detail: str | None) -> str | None:
    """Return ``new_detail`` as the new ``documents.detail``, with the model that wrote the document if ``old_detail`` names one.

    >>> (copy_author_model("synthetic, by release 3; replaced: 1 email", "by ann: private"),
    ...  copy_author_model("replaced: 1 email", None))
    ('synthetic, by release 3; by ann: private', None)
    """
    maker = read_author_model(old_detail)
    return "; ".join([f"{SYNTHETIC_PREFIX}{maker}", *([new_detail] if new_detail else [])]) if maker else new_detail


def parse_json(line: bytes) -> Any:
    """Decode the JSON value of a line. Raises: BadRow 'bad_encoding' | 'empty' | 'bad_json'."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        unread = Message("ingest.row_not_utf8", "byte {byte} of the row is not valid UTF-8", byte=error.start)
        raise BadRow("bad_encoding", unread) from error
    text = text.removeprefix("\ufeff").strip().strip("\x00")
    if not text:
        raise BadRow("empty", Message("ingest.empty_row", "the row is empty"))
    try:
        try:
            return json.loads(text)
        except (
            ValueError
        ):  # the cause may be a number with more digits than Python reads, in a field that ingest does not need
            return json.loads(text, parse_int=_bounded_int)
    except RecursionError:
        raise BadRow("bad_json", Message("ingest.deep_json", "the JSON is nested too deeply")) from None
    except ValueError as error:
        raise BadRow(
            "bad_json", Message("ingest.bad_json", "the row is not JSON: {error}", error=str(error)[:200])
        ) from None


def check_domain_name(name: str) -> None:
    """Check that a domain may have this name. Raises: InputError."""
    if not _DOMAIN.match(name) or name in _RESERVED:
        raise InputError(
            "ingest.domain_name",
            "{name!r} cannot be the name of a domain: {why}",
            name=name[:40],
            why=_better_domain(name),
        )


def parse_document(
    row: Any, default_domain: str, mapping: FieldMapping | None = None, notes: ReadingNotes | None = None
) -> ParsedDocument:
    """Read a decoded row as a document, by the mapping of its file or by its shape (``shapes/``), and check it against the document contract.

    Adds to ``notes`` how the row was read, and which fields are not used.

    Raises: BadRow 'bad_schema' | 'bad_encoding' | 'no_supervised' | 'empty'.
    """
    notes = ReadingNotes() if notes is None else notes
    row = normalise_row(row, mapping, notes)
    content: Content = {"messages": row["messages"]} if "messages" in row else {"text": row["text"]}
    if "text" in content and not isinstance(content["text"], str):
        kind = type(content["text"]).__name__
        raise BadRow("bad_schema", Message("ingest.text_type", "'text' is {kind}, not a string", kind=kind))
    domain = _string(row, "domain", notes) or ("chat" if "messages" in content else default_domain)
    if not _DOMAIN.match(domain) or domain in _RESERVED:
        why = _better_domain(domain)
        raise BadRow(
            "bad_schema", Message("ingest.row_domain", "'domain' cannot be {name!r}: {why}", name=domain[:40], why=why)
        )
    identity = row.get("id")
    if isinstance(identity, int) and not isinstance(identity, bool):
        identity = _digits("id", identity)
    if identity is not None and (not isinstance(identity, str) or len(identity) > 500):
        wrong = Message(
            "ingest.row_id",
            "'id' must be a string of at most 500 characters or a whole number ({value})",
            value=_shown(identity),
        )
        raise BadRow("bad_schema", wrong)
    named = {name: _string(row, name, notes) for name in ("source", "license", "synthetic_by")}
    parsed = ParsedDocument(content, identity or None, domain, **named, facts=read_grouping_facts(row))
    for value in (join_texts(content), parsed.id, *named.values()):
        if value is not None:
            try:
                value.encode("utf-8")
            except UnicodeEncodeError:
                half = Message("ingest.surrogate", "the row contains half of a surrogate pair")
                raise BadRow("bad_encoding", half) from None
    return parsed


def normalise_content(content: Content, *, code: bool) -> Content:
    """Return the content with Unix line ends, without a BOM and without blank lines at its start and end. Prose is normalised to Unicode NFC, code
    is not.

    Raises: BadRow 'empty' when nothing is left.
    """
    if "text" in content:
        text = _normal(content["text"], code)
        if not text:
            raise BadRow("empty", Message("ingest.no_text", "the row has no text"))
        return {"text": text}
    # Blanks at the start of a message would merge with the line end after its role.
    parts = ("content", "reasoning_content")
    messages = [m | {key: _normal(m[key], code).strip() for key in parts if key in m} for m in content["messages"]]
    if not any(m["content"] or m.get("tool_calls") for m in messages if has_loss(m)):
        raise BadRow("empty", Message("ingest.no_answer", "the assistant's messages are empty"))
    return {"messages": messages}


def join_texts(content: Content) -> str:
    """Return the whole text of a document as one string, for filters and for the training of the tokenizer."""
    return content["text"] if "text" in content else "\n".join(map(join_parts, content["messages"]))


def join_parts(turn: Mapping[str, Any]) -> str:
    """Return the text of a turn: its tools, reasoning, content and calls, as far as it has them.

    >>> join_parts({"role": "assistant", "content": "Hm.", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]})
    'Hm.\\n{"name": "add", "arguments": {"a": 1}}'
    """
    calls = [call["function"] for call in turn.get("tool_calls", ())]
    parts = [turn.get("reasoning_content"), turn["content"]]
    objects = [json.dumps(one, ensure_ascii=False) for one in (*turn.get("tools", ()), *calls)]
    tools, calls_text = objects[: len(objects) - len(calls)], objects[len(objects) - len(calls) :]
    return "\n".join([*tools, *(part for part in parts if part), *calls_text])


def make_comparison_text(content: Content) -> str:
    """Return the text by which a document is compared with others. A chat's list of tools is left out: many chats share the list, and it carries no
    loss."""
    if "messages" not in content:
        return join_texts(content)
    first, *others = content["messages"]
    own = strip_tools(first["content"]) if first["role"] == "system" else first["content"]
    return join_texts({"messages": [first | {"content": own, "tools": []}, *others]})


def hash_content(content: Content) -> str:
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


def _string(row: dict[str, Any], key: str, notes: ReadingNotes) -> str | None:
    value = row.get(key)
    if key == "license" and isinstance(value, list | tuple) and all(isinstance(name, str) for name in value):
        names = [name.strip() for name in dict.fromkeys(value) if name.strip()]
        value = " AND ".join(f"({name})" if _OPERATOR.search(name) and len(names) > 1 else name for name in names)
        notes.messages.add(
            Message("ingest.licence_list", "'license' is a list, so all of its licences apply, joined by AND")
        )
    if value is None or value == "":
        return None
    if key in ("source", "domain") and isinstance(value, int) and not isinstance(value, bool):
        value = _digits(key, value)
        notes.messages.add(
            Message("ingest.number_as_text", "{key!r} is a number, and ingest uses its digits as a name", key=key)
        )
    if not isinstance(value, str) or len(value) > LONGEST_NAME:
        wrong = Message(
            "ingest.row_name",
            "{key!r} must be a string of at most {limit} characters ({value})",
            key=key,
            limit=LONGEST_NAME,
            value=_shown(value),
        )
        raise BadRow("bad_schema", wrong)
    return value


def _digits(key: str, value: int) -> str:
    if abs(value) >= 1 << 128:
        raise BadRow("bad_schema", Message("ingest.long_number", "{key!r} is a number with too many digits", key=key))
    return str(value)


def _shown(value: Any) -> str:
    return f"it is {value}" if isinstance(value, float | bool) else f"it is {type(value).__name__}"


def _better_domain(domain: str) -> Message:
    """Return why a name cannot be the name of a domain, and how to change it."""
    if domain in _RESERVED:
        return Message(
            "ingest.reserved_domain",
            "the release gate uses the name {name!r} for a measure. Name the domain '{name}-text', for example",
            name=domain,
        )
    return Message(
        "ingest.domain_characters", "a domain has at most 40 characters, all of them letters a-z, digits, '-' or '_'"
    )


def _bounded_int(digits: str) -> float:
    """Return the number, or infinity if it has more digits than Python reads. A field that needs the number refuses infinity."""
    return int(digits) if len(digits) < 1000 else math.inf
