"""Compares transformers' ids of fixed texts and chats with those of the trainer's own tokenizer. Each check finds one kind of difference."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from factory.evals.probes.checks import ProbeCheck, join_sentences
from factory.evals.probes.conversations import (
    CALLED_CHATS,
    CHATS,
    INJECTED_CHATS,
    SPACED_CHATS,
    SPACED_TEXTS,
    SYSTEM_CHAT,
    TEXTS,
    TOOLS,
    TYPED_CALLS,
    TYPED_CHATS,
    Chat,
    encode_prompt_or_none,
    list_expected_special_ids,
    select_special_ids,
)
from factory.ingest.chat_template import put_blanks_in_special_tokens
from factory.ingest.shapes.chats import ReadingNotes, add_tools, read_turns
from factory.ingest.tokenizer import Tokenizer, has_template_with_tool_calls
from factory.ingest.tokenizing.chat_rendering import ChatRefusedError
from kernels.contract.message import Message

AGAIN = Message(
    "chat_checks.again",
    "Export the checkpoint again. If the check still fails, compare the export's tokenizer files with "
    "the workspace's folder tokenizer/",
)
TEMPLATE = Message(
    "chat_checks.template",
    "chat_template.jinja must be the template of factory/ingest/tokenizer.py. Export the checkpoint again",
)
OF_TEMPLATE = Message(
    "chat_checks.of_template",
    "The check was skipped. The export has the chat template of its model, and with this template transformers reads text that spells a special "
    "token as the token. The server of 'factory serve' does not",
)
WAITING = (*CHATS, *SPACED_CHATS, SYSTEM_CHAT, *TYPED_CHATS, *INJECTED_CHATS, *CALLED_CHATS, *TYPED_CALLS)
CHAT_CHECKS = (
    "server_text", "server_chat", "whitespace", "system_message", "tools_printed", "typed_special", "injected_role",
)  # fmt: skip
Answered = list[int] | str  # ids, or the reason why the chat was refused


@dataclass(frozen=True)
class ProbeRequest:
    """The texts and chats that transformers encodes, in addition to the fixed ones."""

    texts: Sequence[str]
    chats: Sequence[Chat]

    def to_json(self) -> dict[str, Any]:
        """Return the keys of the probe's request. It has each whole chat, and the first message of each chat as a prompt that waits for an answer."""
        waiting = [*WAITING, *(chat[:1] for chat in self.chats)]
        texts = [*TEXTS, *SPACED_TEXTS, *self.texts]
        return {"texts": texts, "chats": [*CHATS, *self.chats], "waiting": waiting, "tools": TOOLS}


def check_chats(tokenizer: Tokenizer, probe_request: ProbeRequest, answer: dict[str, Any]) -> list[ProbeCheck]:
    """Return all checks that compare ids."""
    request = probe_request.to_json()
    ids_of_text = [tokenizer.encode_text_prompt(text).tolist() for text in request["texts"]]
    wrong_texts = [text for text, a, b in zip(request["texts"], answer["texts"], ids_of_text, strict=True) if a != b]
    spaced = [text for text in wrong_texts if text in SPACED_TEXTS]
    others = [text for text in wrong_texts if text not in SPACED_TEXTS]
    waiting = list(zip(request["waiting"], answer["waiting"], answer["with_tools"], strict=True))

    def wrong(chats: Sequence[Chat]) -> list[str]:
        """Return those of ``chats`` whose prompts get other ids."""
        mine = [row for row in waiting if any(row[0] is chat for chat in chats)]
        return [_found(chat, got) for chat, got, _ in mine if _differs(got, encode_prompt_or_none(chat, tokenizer))]

    plain = [*CHATS, *(chat for chat, _, _ in waiting[len(WAITING) :])]
    whole = [
        _found(chat, got)
        for chat, got in zip(request["chats"], answer["chats"], strict=True)
        if _differs(got, _whole(tokenizer, chat))
    ]
    # The check 'injected_role' covers refused roles. An older template prints no tools.
    known = [row for row in waiting if not any(row[0] is chat for chat in INJECTED_CHATS)]
    calling = [row for row in known if any(row[0] is chat for chat in (*CALLED_CHATS, *TYPED_CALLS))]
    if not tokenizer.is_own:  # ingest offers no tools in a foreign template, so only calls are compared
        offered = [_found(chat, got) for chat, got, _ in calling if _differs(got, _plain_prompt(tokenizer, chat, got))]
    elif has_template_with_tool_calls(tokenizer.folder):
        offered = [_found(chat, tools) for chat, _, tools in known if tools != _trained(tokenizer, chat, TOOLS)]
        offered += [_found(chat, got) for chat, got, _ in calling if got != _trained(tokenizer, chat, [])]
    else:
        offered = [_found(chat, tools) for chat, without, tools in known if tools != without]
    return [
        _same_ids("server_text", f"{len(ids_of_text)} texts", others, AGAIN),
        _same_ids("server_chat", f"{len(request['chats'])} chats", whole + wrong(plain), TEMPLATE),
        _same_ids("whitespace", "blanks, tabs, line ends", spaced + wrong(SPACED_CHATS), TEMPLATE),
        _same_ids("system_message", "a system message", wrong([SYSTEM_CHAT]), TEMPLATE),
        _same_ids("tools_printed", f"{len(waiting)} chats with tools", offered, TEMPLATE),
        *(
            [
                _no_specials("typed_special", "texts", _spelled(tokenizer, waiting, TYPED_CHATS, False)),
                _no_specials("injected_role", "roles", _spelled(tokenizer, waiting, INJECTED_CHATS, True)),
            ]
            if tokenizer.is_own
            else [ProbeCheck(name, True, OF_TEMPLATE) for name in ("typed_special", "injected_role")]
        ),
    ]


def quote_text_start(content: str | None) -> str:
    """Return the start of a text, quoted for a message of one line."""
    return repr((content or "")[:40])


def _trained(tokenizer: Tokenizer, chat: Chat, tools: list[dict[str, Any]]) -> list[int]:
    """Return the ids that ingest gives a chat with tools. Like the template, ingest breaks special tokens in text with a blank."""
    notes = ReadingNotes()
    said = add_tools({"tools": tools}, set(), read_turns(chat, (), notes), (), notes)
    return tokenizer.encode_chat_prompt(
        [turn | {"content": put_blanks_in_special_tokens(turn["content"])} for turn in said]
    ).tolist()


def _whole(tokenizer: Tokenizer, chat: Chat) -> list[int] | None:
    """Return the ids of a whole chat with today's date, or None if the template refuses the chat."""
    try:
        return [int(number) for number in tokenizer.encode_chat(chat, datetime.datetime.now())[0]]
    except ChatRefusedError:
        return None


def _plain_prompt(tokenizer: Tokenizer, chat: Chat, got: Answered) -> Answered | None:
    """Return the ids of a prompt, or what transformers gave for a chat that spells a special token, which cannot be compared."""
    spelled = any(tokenizer.spells_special_token(json.dumps(turn, ensure_ascii=False)) for turn in chat)
    return got if spelled else encode_prompt_or_none(chat, tokenizer)


def _differs(got: Answered, ours: Answered | None) -> bool:
    """Return whether transformers gave other ids. If both refuse a chat, the ids do not differ."""
    return ours is not None if isinstance(got, str) and not isinstance(ours, str) else got != ours


def _spelled(tokenizer: Tokenizer, waiting: Sequence[Any], chats: Sequence[Chat], may_refuse: bool) -> list[str]:
    """Return the chats whose ids contain other special tokens than those of the frame around the messages."""
    found = []
    for chat, got, _ in waiting:
        refused = isinstance(got, str)
        if any(chat is one for one in chats) and (
            refused
            and not may_refuse
            or not refused
            and select_special_ids(got, tokenizer.special_ids) != list_expected_special_ids(chat, tokenizer)
        ):
            found.append(_found(chat, got))
    return found


def _found(chat: Chat, got: Answered) -> str:
    last = chat[-1]
    return f"{last['role'][:20]!r}: {quote_text_start(last['content'])}" + (f" ({got})" if isinstance(got, str) else "")


def _same_ids(name: str, what: str, wrong: list[str], todo: Message) -> ProbeCheck:
    if not wrong:
        return ProbeCheck(
            name,
            True,
            Message(
                "chat_checks.same_ids", "For {what}, transformers gives the ids that were used in training", what=what
            ),
        )
    other = Message(
        "chat_checks.other_ids", "For {what}, transformers gives other ids than those used in training: {count:,} differ. First: " "{first}",
        what=what, count=len(wrong), first=wrong[0],
    )  # fmt: skip
    return ProbeCheck(name, False, join_sentences([other, todo]))


def _no_specials(name: str, what: str, wrong: list[str]) -> ProbeCheck:
    if not wrong:
        return ProbeCheck(
            name,
            True,
            Message("chat_checks.no_specials", "In {what}, text that spells a special token stays text", what=what),
        )
    made = Message(
        "chat_checks.specials", "In {count:,} {what}, text that spells a special token becomes a special token. First: {first}",
        count=len(wrong), what=what, first=wrong[0],
    )  # fmt: skip
    return ProbeCheck(name, False, join_sentences([made, TEMPLATE]))
