"""Files that untrusted code wrote: their values can be stored, compared and printed. Their errors do not count as the machine's faults."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from factory.core.errors import SegmentError
from factory.core.faults import find_fault_in, is_machine_fault_unrelated_to_files
from factory.core.untrusted_trainer_files import parse_json, parse_json_object, read_text
from tests.support.failing.limits import few_handles
from tests.support.messages import refused


@pytest.mark.parametrize(
    "text",
    ['{"step": ' + "9" * 400 + "}", '{"kind": "\\ud800"}', "[" * 100_000, '{"loss": 1', b"\xff", ""],
    ids=["400 digits", "half a pair", "deep", "torn", "no text", "empty"],
)
def test_json_that_the_ledger_cannot_store_is_refused(text: str | bytes) -> None:
    with pytest.raises(ValueError):
        parse_json(text)


def test_whole_surrogate_pairs_and_18_digit_integers_are_read() -> None:
    assert parse_json(b'{"kind": "\\ud83d\\ude00", "step": 123456789012345678}') == {
        "kind": "\U0001f600",
        "step": 123456789012345678,
    }


@pytest.mark.parametrize("text", ["[]", "3", "null"])
def test_other_json_values_are_not_objects(text: str) -> None:
    with pytest.raises(ValueError, match="not a JSON object"):
        parse_json_object(text)


@pytest.mark.parametrize("left", [Path.mkdir, os.mkfifo, lambda path: path.write_bytes(b"\xff"), lambda path: None])
def test_a_trainers_file_never_counts_as_a_fault_of_the_machine(tmp_path: Path, left: Callable[[Path], object]) -> None:
    left(tmp_path / "metrics.jsonl")
    with refused("untrusted_trainer_files.unreadable", SegmentError, path=tmp_path / "metrics.jsonl") as raised:
        read_text(tmp_path / "metrics.jsonl")
    assert not is_machine_fault_unrelated_to_files(raised.value)


def test_a_read_without_file_handles_does_not_count_against_the_file(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}")
    with few_handles(), pytest.raises(OSError) as raised:
        read_text(tmp_path / "metrics.jsonl")
    assert find_fault_in(raised.value) and read_text(tmp_path / "metrics.jsonl") == "{}"
