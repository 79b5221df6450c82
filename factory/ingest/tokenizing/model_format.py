"""Encodes and decodes documents with the tokenizer and the chat template of a model, as transformers does.

Ids of a text are those of the library. Ids of a chat are those of ``apply_chat_template(messages, tokenize=True)``. There is one difference, which
only texts that spell a special token show: here such a text stays text.

A chat's text is rendered, its special tokens are written as marks (``marked_library``), and the whole text is encoded at once, so that every rule of
the library about neighbours holds. Spelled special tokens in messages are hidden from the template by private characters and put back afterwards.
"""

from __future__ import annotations

import datetime
import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import tokenizers

from factory.core.errors import InputError
from factory.ingest.shapes.chats import Structure, has_loss, make_turn
from factory.ingest.tokenizing.answer_spans import RenderedChat, find_answers
from factory.ingest.tokenizing.chat_rendering import DATE_OF_DOCUMENTS, Chat, ChatRefusedError, ChatTemplate
from factory.ingest.tokenizing.description import TOOL_USE, TokenizerFolder, find_special_ids
from factory.ingest.tokenizing.fast_path import find_fast_path
from factory.ingest.tokenizing.marked_library import MarkedLibrary
from factory.ingest.tokenizing.tokenizer_probes import PROBES
from factory.ingest.tokenizing.turn_grammar import TurnGrammar

_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
_FIRST_HIDDEN, _HIDDEN = 0x100000, 0xFFFE  # supplementary private use area B
# What reads as a special token of a known family. A template that writes one as plain text was made for another vocabulary.
_LOOKS_SPECIAL = re.compile(
    r"<\|[^\s<>|]{1,60}\|>|<(?:start|end)_of_turn>|</?s>|<(?:bos|eos)>|<\uff5c[^\uff5c<>]{1,60}\uff5c>"
)
_PROBE_CHATS: tuple[tuple[str, ...], ...] = (
    ("user",),
    ("user", "assistant"),
    ("system", "user", "assistant", "user", "assistant"),
)


@dataclass(frozen=True)
class EncodedChat:
    """The ids of a chat. ``answers``: for each of the assistant's messages, the positions of its tokens and of those that close it."""

    ids: list[int]
    answers: list[list[int]]


@dataclass(frozen=True)
class AnswerSpan:
    """An answer in the text of a chat: where it starts, where its content ends, and where the tokens that close it end."""

    start: int
    stop: int
    closed: int


class ModelFormat:
    """The documents of a model's tokenizer. Several threads may use it at the same time."""

    def __init__(self, found: TokenizerFolder) -> None:
        """Raises: InputError if the folder's tokenizer or chat template cannot be used."""
        self.found = found
        library = tokenizers.Tokenizer.from_str(json.dumps(found.library))
        self.library = MarkedLibrary(found.library, found.special)
        self.template = (
            None if found.chat_template is None else ChatTemplate(found.chat_template, found.template_variables)
        )
        self._tool_template = (
            ChatTemplate(found.templates[TOOL_USE], found.template_variables) if TOOL_USE in found.templates else None
        )
        self.special = found.special
        self.vocab_size = 1 + max(found.ids.values())
        ids = find_special_ids(found, library)
        self.turn_end: int | None = None  # the id that closes an answer, if the template closes it with a special token
        if self.template is not None:
            self._refuse_missing_tokens()
            self.turn_end, closing = self._find_closing(ids.end)
            ids = replace(ids, stop=tuple(dict.fromkeys([*ids.stop, *closing[:1]])))
            self._closing = frozenset([*closing, *ids.stop])
        self.ids = ids
        self._fast = find_fast_path(self.library.inner, found.library, self._encode_by_library)

    @cached_property
    def is_lossless(self) -> bool:
        """Whether every probe text decodes to itself. A tokenizer that normalises text is not lossless."""
        return all(self.library.decode(self.encode(text)) == text for text in PROBES)

    def has_id_gaps(self) -> bool:
        """Return whether the ids are not exactly 0 to ``vocab_size`` − 1."""
        return len(set(self.found.ids.values())) != self.vocab_size

    def _refuse_missing_tokens(self) -> None:
        if missing := find_missing_special_tokens(self.found):
            raise InputError(
                "ingest.template_tokens_missing",
                "the chat template in {folder} writes the tokens {tokens}, but the vocabulary lacks them. Use the tokenizer that the template "
                "was made for, or have these tokens added as new rows of the embedding",
                folder=self.found.folder,
                tokens=missing,
            )

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text. Special tokens that it spells are text. Raises: ``SpellsMarkError``."""
        self.library.refuse_marks(text)
        return self._fast.encode(text) if self._fast else self._encode_by_library(text)

    def _encode_by_library(self, text: str) -> list[int]:
        return list(self.library.encode(text).ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids without special tokens."""
        return self.library.decode([int(number) for number in ids])

    # -- chats ---------------------------------------------------------------------------------------------------------
    def encode_messages(
        self,
        messages: Chat,
        tools: Sequence[Any] | None = None,
        now: datetime.datetime = DATE_OF_DOCUMENTS,
        strict: bool = False,
    ) -> tuple[list[int], list[bool]]:
        """Return the ids of a chat, and its loss mask: the assistant's answers and the tokens that close them, except answers of weight 0.

        ``strict``: refuse a chat that the template writes without one of its tools or calls, or without the last reasoning.

        Raises: ``ChatRefusedError`` if the template refuses the chat or an answer's place is not proven; ``SpellsMarkError``."""
        encoded = self._encode_chat(messages, tools, now, strict)
        return encoded.ids, _make_mask(encoded, messages)

    def encode_prompt(
        self, messages: Chat, tools: Sequence[Any] | None = None, now: datetime.datetime = DATE_OF_DOCUMENTS
    ) -> list[int]:
        """Return the ids of a chat up to the assistant's next answer. Raises: ``ChatRefusedError``, ``SpellsMarkError``."""
        hidden, said, offered = self._hide(*_take_tools(messages, tools))
        text = self._template(offered).render(said, True, offered, now)
        return list(self.library.encode(self._restore(text, hidden)[0]).ids)

    def decode_messages(self, ids: Sequence[int], mask: Sequence[bool]) -> list[dict[str, Any]]:
        """Return messages that have these ids and this loss mask. Blanks that the template trimmed are lost, and a system prompt that it wrote
        into the user's turn stays there. Raises: ``ChatRefusedError`` if no such messages were found."""
        turns = self._grammar.read(self.library.decode(ids, keep_special=True))
        said = [{"role": role, "content": self.library.write_names(content)} for role, content in turns or []]
        try:
            encoded = self._encode_chat(said) if said else EncodedChat([], [])
        except InputError:
            encoded = EncodedChat([], [])
        if turns and encoded.ids == list(ids):
            weighed, answers = [], iter(encoded.answers)
            for turn in said:
                places = next(answers) if turn["role"] == "assistant" else []
                weighed.append(make_turn(turn["role"], turn["content"], any(mask[place] for place in places)))
            if _make_mask(encoded, weighed) == [bool(flag) for flag in mask]:
                return weighed
        raise ChatRefusedError("ingest.chat_not_decodable", "the turns of the chat cannot be read back from its tokens")

    def decode_rendered(self, ids: Sequence[int], mask: Sequence[bool]) -> list[dict[str, Any]]:
        """Return the text of a chat as its template wrote it, cut where loss begins and ends: ``{"text", "loss"}`` of each piece.

        Raises: ``ChatRefusedError`` if the pieces do not have these ids and this mask."""
        ends = [at for at in range(1, len(ids)) if bool(mask[at]) != bool(mask[at - 1])] + [len(ids)]
        pieces: list[dict[str, Any]] = []
        before = ""
        for end in ends:
            text = self.library.write_names(self.library.decode(ids[:end], keep_special=True))
            if not text.startswith(before):
                break  # a piece ends inside a character
            pieces.append({"text": text[len(before) :], "loss": bool(mask[end - 1])})
            before = text
        if not pieces or self.encode_rendered(pieces) != (list(ids), [bool(flag) for flag in mask]):
            raise ChatRefusedError(
                "ingest.text_not_decodable", "the text of the chat cannot be read back from its tokens"
            )
        return pieces

    def encode_rendered(self, pieces: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[bool]]:
        """Return the ids and the loss mask of a chat from what ``decode_rendered`` returns. Each spelled special token is the token."""
        marked = [self.library.write_marks(piece["text"]) for piece in pieces]
        stops = list(accumulate(map(len, marked)))
        encoded = self.library.encode("".join(marked))
        owners = [min(bisect_right(stops, max(first, after - 1)), len(pieces) - 1) for first, after in encoded.offsets]
        return list(encoded.ids), [bool(pieces[owner]["loss"]) for owner in owners]

    def _encode_chat(
        self,
        messages: Chat,
        tools: Sequence[Any] | None = None,
        now: datetime.datetime = DATE_OF_DOCUMENTS,
        strict: bool = False,
    ) -> EncodedChat:
        hidden, said, offered = self._hide(*_take_tools(messages, tools))
        template = self._template(offered)
        rendered = find_answers(said, lambda chat, waits: template.render(chat, waits, offered, now))
        if strict:
            _refuse_lost_structure(said, offered, rendered)
        spans = self._close(rendered)
        text, moved = self._restore(rendered.text, hidden)
        encoded = self.library.encode(text)
        marks = self.library.find_marks(text)
        answers = [AnswerSpan(moved(span.start), moved(span.stop), moved(span.closed)) for span in spans]
        return EncodedChat(list(encoded.ids), _choose_tokens(encoded, marks, answers, self._special_ids))

    def _template(self, tools: Sequence[Any] | None = None) -> ChatTemplate:
        if tools and self._tool_template is not None:
            return self._tool_template
        if self.template is None:
            raise ChatRefusedError(
                "ingest.no_chat_template",
                "the tokenizer has no chat template, so chats cannot be encoded. Add a chat_template.jinja to the tokenizer's folder before "
                "the first ingest",
            )
        return self.template

    @cached_property
    def _grammar(self) -> TurnGrammar:
        def write(messages: list[dict[str, str]]) -> str | None:
            try:
                text = self._template().render(messages)
            except ChatRefusedError:
                return None
            return self.library.decode(self.library.encode(self.library.write_marks(text)).ids, keep_special=True)

        return TurnGrammar(write)

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(self.found.special.values())

    @cached_property
    def _edges(self) -> tuple[frozenset[str], frozenset[str]]:
        """The beginnings and the endings of special tokens: what a message may end or begin with, so that it and its neighbour spell one."""
        cuts = [(text[:at], text[at:]) for text in self.found.special for at in range(1, len(text))]
        return frozenset(left for left, _ in cuts), frozenset(right for _, right in cuts)

    # -- special tokens that messages spell -------------------------------------------------------------------------------
    def _hide(
        self, messages: Chat, tools: Sequence[Any] | None
    ) -> tuple[dict[str, str], list[dict[str, Any]], list[Any] | None]:
        """Return the messages and tools with private characters in place of spelled special tokens, and what each stands for."""
        hidden: dict[str, str] = {}
        texts = list(_texts([*messages, *(tools or [])]))
        for text in texts:
            self.library.refuse_marks(text)
        for message in messages:
            if message.get("role") not in _ROLES:
                raise ChatRefusedError(
                    "ingest.unknown_role", "a message has the role {role!r}, which is not one of {roles}",
                    role=str(message.get("role"))[:40], roles=_ROLES,
                )  # fmt: skip
        if not any(self._spells(text) for text in texts):
            return hidden, [dict(message) for message in messages], list(tools) if tools else None
        used = {letter for text in texts for letter in text if ord(letter) >= _FIRST_HIDDEN}
        free = (letter for number in range(_HIDDEN) if (letter := chr(_FIRST_HIDDEN + number)) not in used)
        by_text: dict[str, str] = {}

        def hide(spelled: str) -> str:
            if spelled not in by_text:
                letter = next(free)
                by_text[spelled], hidden[letter] = letter, spelled
            return by_text[spelled]

        said = [_map_texts(message, lambda text: self._hide_in(text, hide)) for message in messages]
        return (
            hidden,
            said,
            [_map_texts(tool, lambda text: self._hide_in(text, hide)) for tool in tools] if tools else None,
        )

    def _spells(self, text: str) -> bool:
        return self.library.find_spelled(text) is not None or self._find_edges(text) != (0, 0)

    def _find_edges(self, text: str) -> tuple[int, int]:
        """Return how many characters at the beginning and at the end of a text, without blanks, are of a special token."""
        longest = max(map(len, self.found.special), default=1) - 1
        endings, beginnings = self._edges[1], self._edges[0]
        core = text.strip()
        first = next((n for n in range(min(longest, len(core)), 0, -1) if core[:n] in endings), 0)
        last = next((n for n in range(min(longest, len(core)), 0, -1) if core[-n:] in beginnings), 0)
        return (first, last) if first + last <= len(core) else (len(core), 0)

    def _hide_in(self, text: str, hide: Callable[[str], str]) -> str:
        lead, core, trail = _split_blanks(self.library.replace_spelled(text, hide))
        first, last = self._find_edges(core)
        beginning = hide(core[:first]) if first else ""
        ending = hide(core[len(core) - last :]) if last else ""
        return f"{lead}{beginning}{core[first : len(core) - last]}{ending}{trail}"

    def _restore(self, rendered: str, hidden: Mapping[str, str]) -> tuple[str, Callable[[int], int]]:
        """Return the text with marks for the template's special tokens and with the hidden texts, and where each place of ``rendered`` is in it."""
        parts: list[str] = []
        before, after = [0], [0]
        end = length = 0
        pieces = [
            (start, stop, self.library.marks[token]) for start, stop, token in self.library.find_special(rendered)
        ]
        if hidden:
            letters = re.compile(f"[{''.join(hidden)}]")
            pieces += [(match.start(), match.end(), hidden[match.group()]) for match in letters.finditer(rendered)]
        for start, stop, replacement in sorted(pieces):
            parts += [rendered[end:start], replacement]
            length += start - end + len(replacement)
            end = stop
            before.append(stop)
            after.append(length)
        parts.append(rendered[end:])

        def move(place: int) -> int:
            at = bisect_right(before, place) - 1
            return after[at] + place - before[at]

        return "".join(parts), move

    # -- what closes an answer ---------------------------------------------------------------------------------------------
    def _close(self, rendered: RenderedChat) -> list[AnswerSpan]:
        """Return the answers with the special tokens that close each: those that follow it after blanks only."""
        specials = self.library.find_special(rendered.text)
        found = []
        for (start, stop), whole in zip(rendered.answers, rendered.whole_turns, strict=True):
            if whole:  # the turn reaches beyond its closing token
                inside = [special for special in specials if start <= special[0] and special[1] <= stop]
                content_end = closed = stop
                while inside and self._closes(inside[-1][2]) and not rendered.text[inside[-1][1] : content_end].strip():
                    closed = max(inside[-1][1], closed) if content_end != stop else inside[-1][1]
                    content_end = inside.pop()[0]
                found.append(AnswerSpan(start, content_end, closed))
                continue
            closed = stop
            for special in specials:
                if special[0] >= closed:
                    if rendered.text[closed : special[0]].strip() or not self._closes(special[2]):
                        break
                    closed = special[1]
            found.append(AnswerSpan(start, stop, closed))
        return found

    def _closes(self, token: str) -> bool:
        return self.found.special[token] in self._closing

    def _find_closing(self, end: int) -> tuple[int | None, list[int]]:
        """Return the id that closes an answer, if any, and the ids with which a chat that ends with an answer ends. ``end`` ends a document."""
        try:
            rendered = find_answers(_make_probe(("user", "assistant")), self._template().render)
        except ChatRefusedError:
            return None, [end]
        closed, closing = rendered.answers[-1][1], []
        for start, stop, token in self.library.find_special(rendered.text):
            if start >= closed and not rendered.text[closed:start].strip():
                closing.append(self.found.special[token])
                closed = stop
        return next(iter(closing), None), closing


def find_missing_special_tokens(found: TokenizerFolder, with_structure: bool = False) -> list[str]:
    """Return the special tokens that the chat template writes for plain chats, and that the vocabulary lacks, in order. ``with_structure``: also for
    chats with tools, calls and reasoning.

    A model cannot learn or stop at a token that it has no row for. Raises: InputError if the template is broken or refuses every plain chat.
    """
    if found.chat_template is None:
        return []
    template = ChatTemplate(found.chat_template, found.template_variables)
    written, refusals = [], []
    for roles in _PROBE_CHATS:
        for waits in (False, True):
            try:
                written.append(template.render(_make_probe(roles), waits))
            except ChatRefusedError as error:
                refusals.append(error)
    if not written:
        raise InputError(
            "ingest.template_renders_nothing",
            "the chat template cannot write a chat of a user and an assistant: {reason}. Correct chat_template.jinja",
            reason=refusals[0].message,
        )
    if with_structure:
        written += _write_structures(found).values()
    named = [text for text in found.names.values() if text not in found.ids]
    missing = _find_looks_special(found, written)
    return list(dict.fromkeys([*missing, *(text for text in named if any(text in one for one in written))]))


def _refuse_lost_structure(messages: Chat, tools: Sequence[Any] | None, rendered: RenderedChat) -> None:
    """Raises: ``ChatRefusedError`` if the template wrote the chat without a tool, without a call, or without the reasoning of the last answer."""
    answers = [message for message in messages if message["role"] == "assistant"]
    texts = [rendered.text[start:stop] for start, stop in rendered.answers]
    wanted = [
        (call["function"]["name"], text) for one, text in zip(answers, texts) for call in one.get("tool_calls") or ()
    ]
    wanted += [
        (tool["function"]["name"] if "function" in tool else tool["name"], rendered.text) for tool in tools or ()
    ]
    wanted += [((one.get("reasoning_content") or "").strip(), text) for one, text in zip(answers[-1:], texts[-1:])]
    if lost := next((part for part, text in wanted if part not in text), None):
        raise ChatRefusedError(
            "ingest.structure_not_written",
            "the chat template does not write the tool, the call or the reasoning {part!r} of the chat",
            part=lost[:40],
        )


def _take_tools(messages: Chat, tools: Sequence[Any] | None) -> tuple[Chat, Sequence[Any] | None]:
    """Return messages and the tools that are offered, which stand in the first message of a document."""
    return messages, tools or (messages[0].get("tools") if messages else None) or None


_TOOL = {
    "type": "function",
    "function": {
        "name": "find_river",
        "description": "Finds a meadow",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}
_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "find_river", "arguments": {"town": "harbour"}}}
_ASKED = {"role": "user", "content": "Hello there"}
_ANSWERED = {"role": "assistant", "content": "Good day"}
# What a template must write of a chat to count as one that takes a thing: a chat, its tools, and words.
_STRUCTURES: dict[Structure, tuple[list[dict[str, Any]], list[Any] | None, tuple[str, ...]]] = {
    "tools": ([_ASKED, _ANSWERED], [_TOOL], ("find_river", "meadow", "town")),
    "calls": (
        [
            _ASKED,
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            {"role": "tool", "content": "a bridge", "name": "find_river", "tool_call_id": "abcdefghi"},
            _ANSWERED,
        ],
        None,
        ("find_river", "town", "harbour", "bridge"),
    ),
    "reasoning": ([_ASKED, _ANSWERED | {"reasoning_content": "a lantern"}], None, ("lantern",)),
}


def find_structure_of_template(found: TokenizerFolder) -> frozenset[Structure]:
    """Return what the folder's chat template takes as objects: it writes their words, and no token that the vocabulary lacks."""
    if found.chat_template is None:
        return frozenset()
    shown: set[Structure] = set()
    for name, text in _write_structures(found).items():
        if not _find_looks_special(found, [text]):
            shown.add(name)
    return frozenset(shown)


def _write_structures(found: TokenizerFolder) -> dict[Structure, str]:
    """Return the text of a chat with each structure that the folder's chat template writes."""
    assert found.chat_template is not None
    template = ChatTemplate(found.chat_template, found.template_variables)
    with_tools = (
        ChatTemplate(found.templates[TOOL_USE], found.template_variables) if TOOL_USE in found.templates else template
    )
    written: dict[Structure, str] = {}
    for name, (chat, tools, words) in _STRUCTURES.items():
        for offered in (tools, [_TOOL]):
            try:
                text = (with_tools if offered else template).render(chat, tools=offered)
            except ChatRefusedError:
                continue
            if all(word in text for word in words):
                written[name] = text
                break
    return written


def _find_looks_special(found: TokenizerFolder, texts: Sequence[str]) -> list[str]:
    added = {token["content"] for token in found.library["added_tokens"]}
    looks = [match.group() for text in texts for match in _LOOKS_SPECIAL.finditer(text)]
    return [text for text in looks if text not in added]


def _make_mask(encoded: EncodedChat, messages: Chat) -> list[bool]:
    mask = [False] * len(encoded.ids)
    answers = [message for message in messages if message["role"] == "assistant"]
    for message, places in zip(answers, encoded.answers, strict=True):
        if has_loss(message):
            for place in places:
                mask[place] = True
    return mask


def _make_probe(roles: Sequence[str]) -> list[dict[str, str]]:
    words = {"system": "Be brief.", "user": "Hello there", "assistant": "Good day"}
    return [{"role": role, "content": words[role]} for role in roles]


def _choose_tokens(
    encoded: tokenizers.Encoding,
    marks: Sequence[tuple[int, int]],
    answers: Sequence[AnswerSpan],
    special: frozenset[int],
) -> list[list[int]]:
    """Return the positions of each answer's tokens. A token of a text is of the answer if it has a character of the answer, and a special token if
    its mark closes the answer. Raises: ``ChatRefusedError`` if the library did not match a mark."""
    chosen: list[list[int]] = [[] for _ in answers]
    starts = [answer.start for answer in answers]
    matched = 0
    for number, (token, (first, after)) in enumerate(zip(encoded.ids, encoded.offsets, strict=True)):
        is_mark = False
        if token in special and matched < len(marks) and first <= marks[matched][0] and marks[matched][1] <= after:
            first, after = marks[matched]  # without the blanks that the token swallows
            matched, is_mark = matched + 1, True
        at = bisect_right(starts, max(first, after - 1)) - 1
        if at < 0:
            continue
        answer = answers[at]
        low = answer.stop if is_mark else answer.start
        if (first < answer.closed and after > low and first < after) or low <= first == after < answer.closed:
            chosen[at].append(number)
    if matched != len(marks):
        raise ChatRefusedError(
            "ingest.special_not_matched",
            "the tokenizer does not read a special token that the chat template writes, because of the text around the token",
        )
    return chosen


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _texts(key)
            yield from _texts(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts(part)


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_texts(key, change): _map_texts(part, change) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_map_texts(part, change) for part in value]
    return value


def _split_blanks(text: str) -> tuple[str, str, str]:
    core = text.strip()
    lead = text[: len(text) - len(text.lstrip())]
    return lead, core, text[len(lead) + len(core) :]
