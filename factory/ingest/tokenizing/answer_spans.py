"""Finds what the assistant wrote in a chat that a template rendered. What cannot be proven is refused.

A template may trim contents, merge system prompts, add a default one, or write tool calls. So the places of the answers are not computed but
seen: the chat is rendered again with marks around each answer, characters that occur nowhere else. The marks show the places only if the
second rendering without marks is the first one, character by character.

1. Marks stand around the whole content. This is enough for every template that does not trim, and for contents without blanks at their ends.
2. Marks stand inside the blanks. Which of the blanks were kept is seen from a third rendering, of contents without blanks: the text between two
   answers may be longer only by blanks of their ends.
3. An empty answer may have no place for marks (templates ask ``if content``). It begins where the rendering of the chat up to it ends, with the
   words that ask for an answer. So does an answer with tool calls or reasoning. It ends where the rendering up to the next message ends. If the
   template writes the beginning of the chat otherwise when messages follow (reasoning is often left out then), the answer begins and ends where
   another content in its place does, as far as the text before and after that content is the same.
4. Some templates read reasoning out of a content that has ``</think>``, and write it anew. Such an answer is found like one with reasoning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from factory.ingest.shapes.tool_calls import CALLS, REASONING_KEYS
from factory.ingest.tokenizing.chat_rendering import Chat, ChatRefusedError

_FIRST_MARK, _MARKS = 0xF0000, 0xFFFE  # supplementary private use area A
_THINKS = "</think>"
Render = Callable[[Chat, bool], str]  # (messages, whether the text ends with the words that ask for an answer) → text
Span = tuple[int, int]


@dataclass(frozen=True)
class RenderedChat:
    """The text of a chat. ``answers``: (start, stop) of each of the assistant's messages, in order. ``whole_turns``: which of them reach to the
    end of the turn, with the token that closes it."""

    text: str
    answers: tuple[Span, ...]
    whole_turns: tuple[bool, ...]


def find_answers(messages: Chat, render: Render) -> RenderedChat:
    """Render a chat and find the assistant's answers in its text.

    Raises: ``ChatRefusedError`` if the template refuses the chat, or the place of an answer cannot be proven.

        >>> template = lambda chat, waits: "".join(f"[{m['role']}]{m['content'].strip()};" for m in chat) + "[assistant]" * waits
        >>> find_answers([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": " Yes "}], template).answers
        ((20, 23),)
    """
    plain = render(messages, False)
    places = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    if 2 * len(places) > _MARKS or not _strip_marks(plain) == plain:
        raise _unproven(0)
    turns = [at for at in places if _writes_more_than_content(messages[at])]
    marked = [at for at in places if at not in turns]
    spans = _see_contents(messages, marked, plain, render)
    thinking = [at for at in marked if _THINKS in messages[at]["content"]]
    if spans is None and thinking:
        turns, marked = [*turns, *thinking], [at for at in marked if at not in thinking]
        spans = _see_contents(messages, marked, plain, render)
    elif spans is not None:
        turns += [at for at in thinking if at in spans and plain[slice(*spans[at])] not in messages[at]["content"]]
    if spans is None:
        raise _unproven(places[0] if places else 0)
    whole = set()
    for at in places:
        if at in turns:
            start, stop, is_whole = _see_turn(messages, at, plain, render)
            spans[at] = start, stop
            whole |= {at} if is_whole else set()
        elif at not in spans:
            spans[at] = (_see_start(messages, at, plain, render),) * 2
    found = [spans[at] for at in places]
    for at, (one, following) in zip(places[1:], zip(found, found[1:])):
        if one[1] > following[0]:
            raise _unproven(at)
    return RenderedChat(plain, tuple(found), tuple(at in whole for at in places))


def _writes_more_than_content(message: Mapping[str, Any]) -> bool:
    return not isinstance(message.get("content"), str) or any(message.get(key) for key in (*CALLS, *REASONING_KEYS))


def _see_contents(messages: Chat, places: Sequence[int], plain: str, render: Render) -> dict[int, Span] | None:
    """Return the places of the contents, by the message's number, as far as they are not blank. None if they cannot be seen."""
    found = _see_whole_contents(messages, places, plain, render)
    if found is not None:
        return found
    return _see_cores(messages, [at for at in places if messages[at]["content"].strip()], plain, render)


def _see_whole_contents(messages: Chat, places: Sequence[int], plain: str, render: Render) -> dict[int, Span] | None:
    """Return the places of the contents, by the message's number, if marks around them change nothing."""
    contents = {at: f"{_mark(2 * n)}{messages[at]['content']}{_mark(2 * n + 1)}" for n, at in enumerate(places)}
    cut = _cut(messages, contents, render)
    if cut is None or "".join(cut) != plain:
        return None
    return {at: _span(cut, 2 * n + 1) for n, at in enumerate(places)}


def _see_cores(messages: Chat, places: Sequence[int], plain: str, render: Render) -> dict[int, Span] | None:
    """Return the places of the contents, each with the blanks at its ends that the template kept."""
    texts = [messages[at]["content"] for at in places]
    cores = [text.strip() for text in texts]
    leads = [text[: len(text) - len(text.lstrip())] for text in texts]
    trails = [text[len(text.rstrip()) :] for text in texts]
    with_marks = [f"{_mark(2 * n)}{core}{_mark(2 * n + 1)}" for n, core in enumerate(cores)]
    inside = _cut(messages, dict(zip(places, map("".join, zip(leads, with_marks, trails)))), render)
    bare = _cut(messages, dict(zip(places, with_marks)), render)
    if inside is None or bare is None or "".join(inside) != plain:
        return None
    kept = [[0, 0] for _ in places]
    for gap in range(len(places) + 1):
        before, after = trails[gap - 1] if gap else "", leads[gap] if gap < len(places) else ""
        ways = [
            (left, right)
            for left in range(len(before) + 1)
            for right in range(len(after) + 1)
            if before[:left] + bare[2 * gap] + after[len(after) - right :] == inside[2 * gap]
        ]
        if len(ways) != 1:
            return None
        if gap:
            kept[gap - 1][1] = ways[0][0]
        if gap < len(places):
            kept[gap][0] = ways[0][1]
    found = {}
    for n, at in enumerate(places):
        start, stop = _span(inside, 2 * n + 1)
        found[at] = (start - kept[n][0], stop + kept[n][1])
    return found


def _see_start(messages: Chat, at: int, plain: str, render: Render) -> int:
    """Return where the answer at a place begins: after the words that ask for it, or where another content in its place begins."""
    try:
        start = render(messages[:at], True)
        if plain.startswith(start):
            return len(start)
    except ChatRefusedError:
        pass
    around = _see_around(messages, at, render)
    if around is None or not plain.startswith(around[0]):
        raise _unproven(at)
    return len(around[0])


def _see_turn(messages: Chat, at: int, plain: str, render: Render) -> tuple[int, int, bool]:
    """Return where the answer at a place begins, where it ends, and whether this end is that of the turn, with what closes it."""
    start = _see_start(messages, at, plain, render)
    try:
        whole = render(messages[: at + 1], False)
        if plain.startswith(whole) and start <= len(whole):
            return start, len(whole), True
    except ChatRefusedError:
        pass  # some templates refuse a chat that ends with a call
    around = _see_around(messages, at, render)
    if around is None or not plain.endswith(around[1]) or len(plain) - len(around[1]) < start:
        raise _unproven(at)
    return start, len(plain) - len(around[1]), False


def _see_around(messages: Chat, at: int, render: Render) -> tuple[str, str] | None:
    """Return the text before and after another content in place of the answer. None if the template does not write it once."""
    others = [*messages[:at], {"role": "assistant", "content": ""}, *messages[at + 1 :]]
    cut = _cut(others, {at: f"{_mark(0)}{_mark(1)}"}, render)
    return None if cut is None else (cut[0], cut[2])


def _cut(messages: Chat, contents: Mapping[int, str], render: Render) -> list[str] | None:
    """Return the text of a chat with other contents, cut at the marks. None unless each mark is there once and in order."""
    changed = [
        message | {"content": contents[at]} if at in contents else message
        for at, message in enumerate(map(dict, messages))
    ]
    try:
        text = render(changed, False)
    except ChatRefusedError:
        return None
    cut, rest = [], text
    for number in range(2 * len(contents)):
        part, mark, rest = rest.partition(_mark(number))
        if not mark:
            return None
        cut.append(part)
    cut.append(rest)
    joined = "".join(cut)
    return cut if _strip_marks(joined) == joined else None


def _span(cut: Sequence[str], part: int) -> Span:
    start = sum(map(len, cut[:part]))
    return start, start + len(cut[part])


def _mark(number: int) -> str:
    return chr(_FIRST_MARK + number)


def _strip_marks(text: str) -> str:
    return text if text.isascii() else "".join(x for x in text if not _FIRST_MARK <= ord(x) < _FIRST_MARK + _MARKS)


def _unproven(at: int) -> ChatRefusedError:
    return ChatRefusedError(
        "ingest.unproven_answer",
        "the place of the assistant's answer, message {place}, cannot be proven in the text that the chat template writes",
        place=at,
    )
