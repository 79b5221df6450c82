"""JSON that live code wrote: what is read can be stored, compared and printed."""

from __future__ import annotations

import pytest

from factory.core.left_files import parse_json, parse_json_object


@pytest.mark.parametrize(
    "text",
    ['{"step": ' + "9" * 400 + "}", '{"kind": "\\ud800"}', "[" * 100_000, '{"loss": 1', b"\xff", ""],
    ids=["400 digits", "half a pair", "deep", "torn", "no text", "empty"],
)
def test_what_could_not_be_stored_is_refused(text: str | bytes) -> None:
    with pytest.raises(ValueError):
        parse_json(text)


def test_whole_pairs_and_long_integers_are_read() -> None:
    assert parse_json(b'{"kind": "\\ud83d\\ude00", "step": 123456789012345678}') == {
        "kind": "\U0001f600",
        "step": 123456789012345678,
    }


@pytest.mark.parametrize("text", ["[]", "3", "null"])
def test_only_objects_are_objects(text: str) -> None:
    with pytest.raises(ValueError, match="no JSON object"):
        parse_json_object(text)
