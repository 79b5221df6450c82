"""What transformers made of the fixed texts and chats, held to the trainer's own tokenizer: one check for each way in which they slip apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from factory.evals.probes.checks import Check
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
    frame,
    specials,
)
from factory.ingest.chat_template import defused
from factory.ingest.shapes.chats import Notes, offering, turns
from factory.ingest.tokenizer import Tokenizer, shows_calls

AGAIN = "export it again; if it stays, compare the tokenizer's files with those under tokenizer/ of the workspace"
TEMPLATE = "chat_template.jinja must be the one of factory/ingest/tokenizer.py: export it again"
WAITING = (*CHATS, *SPACED_CHATS, SYSTEM_CHAT, *TYPED_CHATS, *INJECTED_CHATS, *CALLED_CHATS, *TYPED_CALLS)
CHAT_CHECKS = (
    "server_text", "server_chat", "whitespace", "system_message", "tools_printed", "typed_special", "injected_role",
)  # fmt: skip
Answered = list[int] | str  # ids, or why it was refused


@dataclass(frozen=True)
class Asked:
    """What transformers is asked beside the fixed texts and chats."""

    texts: Sequence[str]
    chats: Sequence[Chat]

    def request(self) -> dict[str, Any]:
        """The keys of the probe's request. Each chat is asked for whole, and its first message once more, waiting for the answer."""
        waiting = [*WAITING, *(chat[:1] for chat in self.chats)]
        texts = [*TEXTS, *SPACED_TEXTS, *self.texts]
        return {"texts": texts, "chats": [*CHATS, *self.chats], "waiting": waiting, "tools": TOOLS}


def chat_checks(tokenizer: Tokenizer, asked: Asked, answer: dict[str, Any]) -> list[Check]:
    """Everything that is about ids."""
    request = asked.request()
    ids_of_text = [tokenizer.text_prompt(text).tolist() for text in request["texts"]]
    wrong_texts = [text for text, a, b in zip(request["texts"], answer["texts"], ids_of_text, strict=True) if a != b]
    spaced = [text for text in wrong_texts if text in SPACED_TEXTS]
    others = [text for text in wrong_texts if text not in SPACED_TEXTS]
    waiting = list(zip(request["waiting"], answer["waiting"], answer["with_tools"], strict=True))

    def wrong(chats: Sequence[Chat]) -> list[str]:
        """Of those that wait, the ones with other ids."""
        mine = [row for row in waiting if any(row[0] is chat for chat in chats)]
        return [_found(chat, got) for chat, got, _ in mine if got != tokenizer.prompt(chat).tolist()]

    plain = [*CHATS, *(chat for chat, _, _ in waiting[len(WAITING) :])]
    whole = [
        _found(chat, got)
        for chat, got in zip(request["chats"], answer["chats"], strict=True)
        if got != tokenizer.encode_messages(chat)[0][:-1].tolist()
    ]
    # Roles that are refused are another check's; an older template has no place for tools, and prints none.
    known = [row for row in waiting if not any(row[0] is chat for chat in INJECTED_CHATS)]
    calling = [row for row in known if any(row[0] is chat for chat in (*CALLED_CHATS, *TYPED_CALLS))]
    if shows_calls(tokenizer.folder):
        offered = [_found(chat, tools) for chat, _, tools in known if tools != _trained(tokenizer, chat, TOOLS)]
        offered += [_found(chat, got) for chat, got, _ in calling if got != _trained(tokenizer, chat, [])]
    else:
        offered = [_found(chat, tools) for chat, without, tools in known if tools != without]
    return [
        _check("server_text", f"{len(ids_of_text)} texts", others, "with other ids in AutoTokenizer", AGAIN),
        _check("server_chat", f"{len(request['chats'])} chats", whole + wrong(plain), "with other ids", TEMPLATE),
        _check("whitespace", "blanks, tabs and line ends", spaced + wrong(SPACED_CHATS), "with other ids", TEMPLATE),
        _check("system_message", "a chat with a system message", wrong([SYSTEM_CHAT]), "with other ids", TEMPLATE),
        _check("tools_printed", f"{len(waiting)} chats with tools and calls", offered, "with other ids than trained", TEMPLATE),
        _check("typed_special", "special tokens typed as plain text", _spelled(tokenizer, waiting, TYPED_CHATS, False),
               "that make special tokens", TEMPLATE),
        _check("injected_role", "roles that spell special tokens", _spelled(tokenizer, waiting, INJECTED_CHATS, True),
               "that make special tokens", TEMPLATE),
    ]  # fmt: skip


def text_of(content: str | None) -> str:
    """How a text stands in a message of one line."""
    return repr((content or "")[:40])


def _trained(tokenizer: Tokenizer, chat: Chat, tools: list[dict[str, Any]]) -> list[int]:
    """The ids that ingest makes of a chat and its tools, special tokens in it broken by a blank, as the template does."""
    notes = Notes()
    said = offering({"tools": tools}, set(), turns(chat, (), notes), (), notes)
    return tokenizer.prompt([turn | {"content": defused(turn["content"])} for turn in said]).tolist()


def _spelled(tokenizer: Tokenizer, waiting: Sequence[Any], chats: Sequence[Chat], may_refuse: bool) -> list[str]:
    """Those whose special ids are not only those of the frame."""
    found = []
    for chat, got, _ in waiting:
        refused = isinstance(got, str)
        if any(chat is one for one in chats) and (
            refused and not may_refuse or not refused and specials(got) != frame(chat, tokenizer)
        ):
            found.append(_found(chat, got))
    return found


def _found(chat: Chat, got: Answered) -> str:
    last = chat[-1]
    return f"{last['role'][:20]!r}: {text_of(last['content'])}" + (f" ({got})" if isinstance(got, str) else "")


def _check(name: str, what: str, wrong: list[str], how: str, todo: str) -> Check:
    if wrong:
        return Check(name, False, f"{what}: {len(wrong)} {how}, first {wrong[0]}: {todo}")
    return Check(name, True, f"{what}: none {how}")
