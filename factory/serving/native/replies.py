"""Formats tokens for OpenAI's API: choices, chunks and usage. Text consists of complete characters, and ends before a stop string."""

from __future__ import annotations

import codecs
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from factory.evals.token_bytes import TokenBytes
from factory.release.published_link import MODEL_NAME
from factory.serving.api.request import CompletionRequest
from factory.serving.native.batch import ComputedToken

NO_TOKEN = 1 << 62  # a token id without text
_AS_BYTES = "bytes:"


class ChoiceTextDecoder:
    """Decodes the tokens of one choice. It holds back an incomplete character, and text that may be the beginning of a stop string."""

    def __init__(self, token_bytes: TokenBytes, stops: tuple[str, ...]) -> None:
        self._bytes, self._stops = token_bytes, stops
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.characters = 0  # number of characters decoded so far
        self.stopped = False  # True once a stop string was found: the text ends before it

    def decode_token(self, token: int, last: bool) -> str:
        """Add a token. Returns the text that became final with it. ``last``: no token follows."""
        piece = find_token_text_bytes(self._bytes, token)
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


def find_token_text_bytes(token_bytes: TokenBytes, token: int) -> bytes:
    """Return the bytes of a token; empty for a special token, and for an id that only pads the vocabulary."""
    return bytes(token_bytes.find_bytes_of_ids(np.array([token]))[0]) if token < len(token_bytes.lengths) else b""


def make_token_name(token_bytes: TokenBytes, token: int) -> str:
    """Return the unique name of a token for lists of log-probabilities.

    A special token has its own name. Any other token has its text as its name. Bytes that are not UTF-8 are written as in OpenAI's completions:
    'bytes:\\xe2\\x80'. An id that only pads the vocabulary is 'token_id:N'.
    """
    if token in token_bytes.special:
        return token_bytes.special[token]
    raw = find_token_text_bytes(token_bytes, token)
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
    """Return the length of the longest suffix of ``text`` that is a proper prefix of ``stop``."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)


@dataclass
class ChoiceReply:
    """One choice of an answer, while it grows."""

    index: int
    decoder: ChoiceTextDecoder
    text: str = ""
    tokens: list[ComputedToken] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)  # number of characters before each token
    finish: str | None = None

    def add_token(self, token: ComputedToken) -> str:
        """Add a token. Returns the text that became final with it."""
        self.tokens.append(token)
        self.offsets.append(self.decoder.characters)
        ends = token.end == "stop"
        text = self.decoder.decode_token(NO_TOKEN if ends else token.token, last=bool(token.end))
        self.text += text
        if self.decoder.stopped or ends:
            self.finish = "stop"
        elif token.end:
            self.finish = "length"
        return text


class CompletionReply:
    """Builds the answer to one request."""

    def __init__(self, ask: CompletionRequest, token_bytes: TokenBytes, release: str) -> None:
        self.ask, self._bytes = ask, token_bytes
        kind = "chatcmpl" if ask.chat else "cmpl"
        self._head = {
            "id": f"{kind}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": MODEL_NAME,
            "system_fingerprint": release,
        }
        count = len(ask.prompts) * ask.n
        self.choices = [ChoiceReply(number, ChoiceTextDecoder(token_bytes, ask.stops)) for number in range(count)]

    def make_full_answer(self) -> dict[str, Any]:
        """Return the whole answer as one object."""
        choices = []
        for choice in self.choices:
            said: dict[str, Any] = {"index": choice.index, "finish_reason": choice.finish}
            said["logprobs"] = self._logprobs(choice.tokens, choice.offsets)
            said |= (
                {"message": {"role": "assistant", "content": choice.text}} if self.ask.chat else {"text": choice.text}
            )
            choices.append(said)
        kind = "chat.completion" if self.ask.chat else "text_completion"
        return self._head | {"object": kind, "choices": choices, "usage": self.count_usage()}

    def make_chunk(self, choice: ChoiceReply, text: str, tokens: list[ComputedToken], first: bool) -> dict[str, Any]:
        """Return a chunk with the text and tokens since the previous chunk. ``first``: the choice's first chunk, which has the role."""
        said: dict[str, Any] = {"index": choice.index, "finish_reason": choice.finish}
        said["logprobs"] = self._logprobs(tokens, choice.offsets[len(choice.tokens) - len(tokens) :])
        role = {"role": "assistant"} if first else {}
        said |= {"delta": role | {"content": text}} if self.ask.chat else {"text": text}
        return self._head | {"object": self._chunk_kind, "choices": [said]}

    def make_usage_chunk(self) -> dict[str, Any]:
        return self._head | {"object": self._chunk_kind, "choices": [], "usage": self.count_usage()}

    def count_usage(self) -> dict[str, int]:
        written = sum(len(choice.tokens) for choice in self.choices)
        read = self.ask.prompt_tokens
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.ask.chat else "text_completion"

    def _logprobs(self, tokens: list[ComputedToken], offsets: list[int]) -> dict[str, Any] | None:
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
        raw = find_token_text_bytes(self._bytes, token)
        return {"token": self._name(token), "logprob": logprob, "bytes": list(raw) if raw else None}

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self.ask.tokens_as_ids else make_token_name(self._bytes, token)
