"""Text from tokens: whole characters, and never a piece of a stop string."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from factory.evals.token_bytes import TokenBytes
from factory.serving.native.replies import ChoiceText

BYTES = TokenBytes([bytes([value]) for value in range(256)])  # a token for each byte
texts = st.text(alphabet="ab<é🙂\n", max_size=30)


def streamed(data: bytes, stops: tuple[str, ...]) -> list[str]:
    wording, parts = ChoiceText(BYTES, stops), []
    for number, value in enumerate(data):
        parts.append(wording.add(value, last=number == len(data) - 1))
        if wording.stopped:
            break
    return parts


@given(text=texts, stops=st.lists(st.text(alphabet="ab<é🙂\n", min_size=1, max_size=4), max_size=3))
def test_the_text_ends_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    """The first to be complete, and of those that are complete at once the one that begins first."""
    first = min((text.index(stop) + len(stop) for stop in stops if stop in text), default=None)
    expected = (
        text if first is None else text[: min(text[:first].index(stop) for stop in stops if stop in text[:first])]
    )
    assert "".join(streamed(text.encode(), tuple(stops))) == expected


@given(text=texts, cut=st.integers(0, 3))
def test_only_whole_characters_are_told_and_what_is_left_is_replaced(text: str, cut: int) -> None:
    data = (text + "🙂").encode()[: len(text.encode()) + cut] if cut else text.encode()
    parts = streamed(data, ())
    assert "".join(parts) == data.decode("utf-8", "replace")
    assert all("\ufffd" not in part for part in parts[:-1])
