"""Tokens as OpenAI's API words them: text that is whole characters and stops before a stop string, choices, chunks, usage."""

from __future__ import annotations

import codecs
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from factory.evals.token_bytes import TokenBytes
from factory.release.serving import MODEL_NAME
from factory.serving.api.request import CompletionAsk
from factory.serving.native.batch import Token

NO_TOKEN = 1 << 62  # has no text
_AS_BYTES = "bytes:"


class ChoiceText:
    """The text of one choice, as its tokens come. A character whose bytes are not all there is held back, and so is what may turn out to
    be the beginning of a stop string."""

    def __init__(self, token_bytes: TokenBytes, stops: tuple[str, ...]) -> None:
        self._bytes, self._stops = token_bytes, stops
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.characters = 0  # decoded so far
        self.stopped = False  # a stop string came; the text ends before it

    def add(self, token: int, last: bool) -> str:
        """The text that is certain now. ``last``: no token follows."""
        piece = bytes_of(self._bytes, token)
        decoded = self._decoder.decode(piece, last)
        self.characters += len(decoded)
        text = self._held + decoded
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = 0 if last else max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def bytes_of(token_bytes: TokenBytes, token: int) -> bytes:
    """Of a special token, or a row that the vocabulary is padded with: none."""
    return bytes(token_bytes.expand(np.array([token]))[0]) if token < len(token_bytes.lengths) else b""


def name_of(token_bytes: TokenBytes, token: int) -> str:
    """No two tokens have one name, so that log-probabilities can be given by it: a special token's own, the text that its bytes are, or, as
    OpenAI's completions write it, the bytes where they are no text: 'bytes:\\xe2\\x80'. 'token_id:N' for a row that pads the vocabulary."""
    if token in token_bytes.special:
        return token_bytes.special[token]
    raw = bytes_of(token_bytes, token)
    if not raw:
        return f"token_id:{token}"
    try:
        name = raw.decode("utf-8")
    except UnicodeDecodeError:
        name = _AS_BYTES
    if name.startswith((_AS_BYTES, "token_id:")):
        return _AS_BYTES + "".join(f"\\x{byte:02x}" for byte in raw)
    return name


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of ``text`` that ``stop`` begins with."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)


@dataclass
class ChoiceReply:
    """One answer, growing."""

    index: int
    wording: ChoiceText
    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)  # characters before each token
    finish: str | None = None

    def add(self, token: Token) -> str:
        """Take a token; the text that it makes certain."""
        self.tokens.append(token)
        self.offsets.append(self.wording.characters)
        ends = token.end == "stop"
        words = self.wording.add(NO_TOKEN if ends else token.token, last=bool(token.end))
        self.text += words
        if self.wording.stopped or ends:
            self.finish = "stop"
        elif token.end:
            self.finish = "length"
        return words


class Completion:
    """All that is said about one request."""

    def __init__(self, ask: CompletionAsk, token_bytes: TokenBytes, release: str) -> None:
        self.ask, self._bytes = ask, token_bytes
        kind = "chatcmpl" if ask.chat else "cmpl"
        self._head = {
            "id": f"{kind}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": MODEL_NAME,
            "system_fingerprint": release,
        }
        count = len(ask.prompts) * ask.n
        self.choices = [ChoiceReply(number, ChoiceText(token_bytes, ask.stops)) for number in range(count)]

    def whole(self) -> dict[str, Any]:
        choices = []
        for choice in self.choices:
            said: dict[str, Any] = {"index": choice.index, "finish_reason": choice.finish}
            said["logprobs"] = self._logprobs(choice.tokens, choice.offsets)
            said |= (
                {"message": {"role": "assistant", "content": choice.text}} if self.ask.chat else {"text": choice.text}
            )
            choices.append(said)
        kind = "chat.completion" if self.ask.chat else "text_completion"
        return self._head | {"object": kind, "choices": choices, "usage": self.usage()}

    def chunk(self, choice: ChoiceReply, words: str, tokens: list[Token], first: bool) -> dict[str, Any]:
        """``words`` and the tokens since the chunk before. ``first``: the role is told too."""
        said: dict[str, Any] = {"index": choice.index, "finish_reason": choice.finish}
        said["logprobs"] = self._logprobs(tokens, choice.offsets[len(choice.tokens) - len(tokens) :])
        role = {"role": "assistant"} if first else {}
        said |= {"delta": role | {"content": words}} if self.ask.chat else {"text": words}
        return self._head | {"object": self._chunk_kind, "choices": [said]}

    def usage_chunk(self) -> dict[str, Any]:
        return self._head | {"object": self._chunk_kind, "choices": [], "usage": self.usage()}

    def usage(self) -> dict[str, int]:
        written = sum(len(choice.tokens) for choice in self.choices)
        read = self.ask.prompt_tokens
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.ask.chat else "text_completion"

    def _logprobs(self, tokens: list[Token], offsets: list[int]) -> dict[str, Any] | None:
        if self.ask.logprobs is None:
            return None
        if self.ask.chat:
            return {
                "content": [
                    self._entry(token.token, token.logprob)
                    | {"top_logprobs": [self._entry(number, logprob) for number, logprob in token.top]}
                    for token in tokens
                ]
            }
        names = [self._name(token.token) for token in tokens]
        return {
            "tokens": names,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [
                {self._name(number): logprob for number, logprob in (*token.top, (token.token, token.logprob))}
                for token in tokens
            ],
            "text_offset": offsets,
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        raw = bytes_of(self._bytes, token)
        return {"token": self._name(token), "logprob": logprob, "bytes": list(raw) if raw else None}

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self.ask.tokens_as_ids else name_of(self._bytes, token)
