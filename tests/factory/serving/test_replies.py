"""Text of replies from tokens has only whole characters, and never a piece of a stop string."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from factory.evals.token_bytes import TokenBytes
from factory.serving.api.defaults import SamplingSettings
from factory.serving.api.request import CompletionRequest
from factory.serving.native.batch import ComputedToken
from factory.serving.native.replies import ChoiceTextDecoder, CompletionReply, make_token_name

BYTES = TokenBytes([bytes([value]) for value in range(256)])  # a token for each byte
texts = st.text(alphabet="ab<é🙂\n", max_size=30)


def streamed(data: bytes, stops: tuple[str, ...]) -> list[str]:
    wording, parts = ChoiceTextDecoder(BYTES, stops), []
    for number, value in enumerate(data):
        parts.append(wording.decode_token(value, last=number == len(data) - 1))
        if wording.stopped:
            break
    return parts


@given(text=texts, stops=st.lists(st.text(alphabet="ab<é🙂\n", min_size=1, max_size=4), max_size=3))
def test_the_text_ends_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    """The first stop string that is complete; among several, the one that begins first."""
    first = min((text.index(stop) + len(stop) for stop in stops if stop in text), default=None)
    expected = (
        text if first is None else text[: min(text[:first].index(stop) for stop in stops if stop in text[:first])]
    )
    assert "".join(streamed(text.encode(), tuple(stops))) == expected


@given(text=texts, cut=st.integers(0, 3))
def test_a_stream_has_only_whole_characters_and_replaces_an_incomplete_end(text: str, cut: int) -> None:
    data = (text + "🙂").encode()[: len(text.encode()) + cut] if cut else text.encode()
    parts = streamed(data, ())
    assert "".join(parts) == data.decode("utf-8", "replace")
    assert all("\ufffd" not in part for part in parts[:-1])


# Every byte but one that a special token's row stands at, texts that look like another name, and half characters of two bytes.
NAMED = [bytes([value]) for value in range(256)] + [
    "é".encode(),
    b"\xf0\x9f",
    b"bytes:\\xe2",
    b"bytes:",
    b"token_id:5",
    b"",
]
SPECIAL = {len(NAMED) - 1: "<|im_end|>"}
PADDED = (len(NAMED), len(NAMED) + 1)


def completion(chat: bool, tokens: list[ComputedToken]) -> dict[str, Any]:
    ask = CompletionRequest(
        chat=chat, prompts=((0,),), n=1, most_tokens=9, sampling=SamplingSettings(0.0, 1.0, 0), seed=None, stops=(), stop_ids=frozenset(), logprobs=5,
        stream=False, usage_in_stream=False, tokens_as_ids=False,
    )  # fmt: skip
    said = CompletionReply(ask, TokenBytes(NAMED, SPECIAL), "r1")
    for token in tokens:
        said.choices[0].add_token(token)
    return said.make_full_answer()["choices"][0]["logprobs"]  # type: ignore[no-any-return]


def test_top_tokens_that_are_not_whole_characters_have_separate_entries() -> None:
    top = tuple((0x80 + number, -1.0 - number) for number in range(5))
    (entries,) = completion(False, [ComputedToken(0, 0x80, -1.0, top, "length")])["top_logprobs"]
    assert entries == {rf"bytes:\x8{number}": -1.0 - number for number in range(5)}
    (entry,) = completion(True, [ComputedToken(0, 0x80, -1.0, top, "length")])["content"]
    assert [one["bytes"] for one in entry["top_logprobs"]] == [[0x80 + number] for number in range(5)]
    assert entry["token"] == r"bytes:\x80" and entry["bytes"] == [0x80]


def test_every_token_has_a_unique_name() -> None:
    vocabulary = TokenBytes(NAMED, SPECIAL)
    names = [make_token_name(vocabulary, token) for token in (*range(len(NAMED)), *PADDED)]
    assert len(set(names)) == len(names)
    assert names[ord("a")] == "a" and names[256] == "é" and names[257] == r"bytes:\xf0\x9f"
    assert names[len(NAMED) - 1 :] == ["<|im_end|>", *(f"token_id:{token}" for token in PADDED)]
    end = len(NAMED) - 1
    (entry,) = completion(True, [ComputedToken(0, end, -0.5, ((PADDED[0], -3.0),), "stop")])["content"]
    assert (entry["token"], entry["bytes"]) == ("<|im_end|>", None)
    assert entry["top_logprobs"] == [{"token": f"token_id:{PADDED[0]}", "logprob": -3.0, "bytes": None}]
