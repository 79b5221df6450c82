"""The factory's own documents: text as a byte-level BPE with Qwen2's split pattern, and chats as ChatML.

Its special tokens have the ids 0, 1 and 2. A document begins and ends with ``<|endoftext|>``; a tokenizer of an older factory has no BOS.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from factory.ingest.shapes.chats import has_loss, make_turn
from factory.ingest.tokenizing.description import SpecialIds
from factory.ingest.tokenizing.fast_path import QWEN_SPLIT, FastPath, get_split_rule
from factory.ingest.tokenizing.tokenizer_probes import PROBES

END, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (END, IM_START, IM_END)  # their ids are 0, 1, 2
SPLIT_PATTERN = QWEN_SPLIT
_ADDED_AT_MOST = 256  # the spelling of at most this many added tokens is checked


class FactoryFormat:
    """The documents of the factory's own tokenizer. Several threads may use it at the same time."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self.inner = inner
        inner.encode_special_tokens = True  # special tokens in text are encoded as ordinary characters
        self.vocab_size = inner.get_vocab_size()
        self.special: Mapping[str, int] = {token: number for number, token in enumerate(SPECIAL)}
        begin = tuple(inner.encode("").ids)  # (0,) or ()
        self.ids = SpecialIds(begin=begin, end=0, stop=(0, 2), bos=0 if begin else None, pad=0)
        self.turn_start, self.turn_end = 1, 2
        self._fast = FastPath(inner, get_split_rule("qwen"), self._encode_by_library, [])
        self._line_end = inner.encode("\n", add_special_tokens=False).ids

    is_lossless = True  # text decodes to itself

    def has_id_gaps(self) -> bool:
        """Return whether the ids are not exactly 0 to ``vocab_size`` − 1."""
        return sorted(self.inner.get_vocab().values()) != list(range(self.vocab_size))

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens."""
        return self._fast.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids without special tokens. Bytes that are not UTF-8 become U+FFFD."""
        return str(self.inner.decode(ids, skip_special_tokens=True))

    def encode_messages(
        self, messages: Sequence[Mapping[str, Any]], *, now: datetime.datetime | None = None
    ) -> tuple[list[int], list[bool]]:
        """Return the ids of a chat from BOS to the last line end, and its loss mask. The factory's template writes no date (``now``)."""
        ids, mask = list(self.ids.begin), [False] * len(self.ids.begin)
        for message in messages:
            role, content = message["role"], message["content"]
            answer = has_loss(message)
            head, body = self._message(f"{role}\n", content)
            ids += [self.turn_start, *head, *body, self.turn_end, *self._line_end]
            mask += [False] * (1 + len(head)) + [answer] * (len(body) + 1)
            mask += [False] * len(self._line_end)
        return ids, mask

    def encode_prompt(
        self, messages: Sequence[Mapping[str, Any]], *, now: datetime.datetime | None = None
    ) -> list[int]:
        """Return the ids of a chat that waits for the assistant's answer."""
        ids, _ = self.encode_messages(messages)
        return [*ids, self.turn_start, *self._encode_by_library("assistant\n")]

    def decode_messages(self, ids: Sequence[int], mask: Sequence[bool]) -> list[dict[str, Any]]:
        """Return the messages that have these ids and this loss mask."""
        starts, stops = (
            [at for at, one in enumerate(ids) if one == token] for token in (self.turn_start, self.turn_end)
        )
        found = []
        for start, stop in zip(starts, stops, strict=True):
            role, content = self.decode(ids[start + 1 : stop]).split("\n", 1)
            found.append(make_turn(role, content, bool(mask[stop])))
        return found

    def gives_library_ids(self) -> bool:
        """Return whether this format's ids are those of the tokenizer's own library, for ``PROBES`` and the spelling of every added token.

        At least one of these texts gets other ids, or decodes to another text, if the tokenizer has another split pattern, a normaliser, an added
        leading blank, or words that are matched as a whole.
        """
        added = [token.content for token in self.inner.get_added_tokens_decoder().values()]
        return all(
            (ids := self._encode_by_library(text)) == self.encode(text) and self.decode(ids) == text
            for text in (*PROBES, *(f"a {word} b{word}" for word in added[:_ADDED_AT_MOST]))
        )

    def _encode_by_library(self, text: str) -> list[int]:
        return list(self.inner.encode(text, add_special_tokens=False).ids)

    def _message(self, head: str, content: str) -> tuple[list[int], list[int]]:
        """Return the ids of role and content, as if both were encoded as one string. Programs that render the chat template to a string encode it
        so."""
        if not content[:1].isspace():  # then no piece contains the line end between the two
            return self.encode(head), self.encode(content)
        encoded = self.inner.encode(head + content, add_special_tokens=False)
        cut = sum(start < len(head) for start, _ in encoded.offsets)
        return encoded.ids[:cut], encoded.ids[cut:]
