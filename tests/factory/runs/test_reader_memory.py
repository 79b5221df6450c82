"""Every reader of files that untrusted code wrote needs little memory, whatever the file holds: 16 MiB of ``{}`` once cost a gigabyte."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.reader_memory import MIB, READERS, measure_growth

SIZE = 8 * MIB
MOST = 110.0  # MiB: the floor of 32, eight times the file, and what parsing holds for a moment


def fill(unit: str, before: str = "", after: str = "") -> bytes:
    return (before + unit * (SIZE // len(unit.encode())) + after).encode()


DOCUMENTS = {
    "one list": fill("{},", '{"step": 1, "a": [', "0]}\n"),
    "nested lists": fill("[[]],", '{"step": 1, "a": [', "0]}\n"),
    "small objects": fill('{"a":1},', '{"step": 1, "a": [', "0]}\n"),
    "integers": fill("1000,", '{"step": 1, "a": [', "0]}\n"),
    "many keys": b'{"step": 1, ' + b",".join(b'"%x":1' % number for number in range(SIZE // 10)) + b"}\n",
    "small strings": fill('"\U0001f600",', '{"step": 1, "a": [', "0]}\n"),
    "long key": fill("k", '{"step": 1, "', '": 1}\n'),
    "long text": fill("\U0001f600", '{"step": 1, "a": "', '"}\n'),
    "half a pair": fill("k", '{"step": 1, "a": "\\ud800', '"}\n'),
    "deep": fill('{"step":'),
    "huge number": fill("9", '{"step": ', "}\n"),
}
LINES = {
    "empty objects": fill("{}\n"),
    "short steps": fill('{"step":1}\n'),
    "empty lines": fill("\n"),
    "different steps": b"".join(
        b'{"step":%d,"supervised_tokens":1,"time":1,"loss":1,"kind":"a"}\n' % number for number in range(SIZE // 66)
    ),
    "lines of many keys": b"".join(
        b'{"step":%d,%s}\n' % (step, b",".join(b'"%x":1' % key for key in range(2000)))
        for step in range(SIZE // 16_000)
    ),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_hostile_file_costs_a_reader_little_memory(tmp_path: Path, reader: str) -> None:
    files = {**DOCUMENTS, **(LINES if READERS[reader][1].endswith(".jsonl") else {})}
    found = measure_growth(reader, tmp_path, files)
    assert {kind: grown for kind, (grown, _) in found.items() if grown > MOST} == {}, found
    refusals = {"UntrustedFileError", "SegmentError", "CheckpointError", ""}
    assert {error for _, error in found.values()} <= refusals, found
