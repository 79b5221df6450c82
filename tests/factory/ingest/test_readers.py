from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from factory.ingest.document import BadRow, parse_document, parse_json
from factory.ingest.readers import RawRow, ShardProblem, read_rows
from factory.ingest.rules.policy import ShardLimits
from tests.support.messages import refused

LIMITS = ShardLimits(max_row_bytes=1000)


def shard(tmp_path: Path, name: str, data: bytes) -> Path:
    path = tmp_path / name
    path.write_bytes(data)
    return path


def read(path: Path, limits: ShardLimits = LIMITS) -> list[RawRow]:
    return list(read_rows(path, limits))


def test_bad_utf8_in_parquet_is_one_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    broken = pa.array([b"fine", b"\xff\xfe\xfd"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": broken}), path)
    first, second = read(path)
    assert first == {"text": "fine"} and isinstance(second, BadRow) and second.rule == "bad_encoding"


def test_a_line_over_the_limit_is_a_bad_row_and_is_not_kept_in_memory(tmp_path: Path) -> None:
    path = shard(tmp_path, "a.jsonl", b'{"text":"a"}\n' + b"x" * 5_000_000 + b'\n{"text":"b"}\n' + b"y" * 2000)
    first, second, third, fourth = read(path)
    assert first == b'{"text":"a"}' and third == b'{"text":"b"}'
    assert isinstance(second, BadRow) and second.rule == "row_too_long" and second.data["size"] == 5_000_000
    assert isinstance(fourth, BadRow)


@pytest.mark.parametrize(
    ("name", "data", "code"),
    [
        ("a.jsonl", b"", "ingest.empty_file"),
        ("a.jsonl.gz", gzip.compress(b"", mtime=0), "reading.nothing_inside"),
        ("a.jsonl.gz", b"not gzip at all", "reading.decompression"),
        ("a.jsonl.gz", gzip.compress(b'{"text":"a"}\n' * 1000, mtime=0)[:-20], "reading.decompression"),
        ("a.jsonl.zst", b"not zstd at all", "reading.decompression"),
        ("a.jsonl", '{"text":"a"}'.encode("utf-16"), "reading.other_encoding"),
        ("a.txt", "café".encode("latin-1"), "reading.not_utf8"),
        ("a.txt", b"x" * 1001, "reading.document_too_large"),
        ("a.exe", b"MZ", "ingest.unknown_kind"),
        ("noname", b"x", "ingest.unknown_kind"),
        ("a.parquet", b"PAR1 but not really", "reading.parquet"),
        ("a.jsonl.gz", gzip.compress(b"\0" * 100_000_000, mtime=0), "reading.expansion"),
    ],
)
def test_an_unreadable_file_is_an_error_that_says_why(tmp_path: Path, name: str, data: bytes, code: str) -> None:
    with refused(code, ShardProblem) as caught:
        read(shard(tmp_path, name, data))
    assert caught.value.data.get("byte", 3) == 3


def test_parquet_without_any_text_names_its_columns(tmp_path: Path) -> None:
    pq.write_table(pa.table({"vector": [[0.5]]}), tmp_path / "a.parquet")
    with refused("reading.no_text_column", ShardProblem, columns=["vector"]):
        read(tmp_path / "a.parquet")


@given(lines=st.lists(st.binary(max_size=40).map(lambda b: b.replace(b"\n", b"")), min_size=1, max_size=30))
@settings(deadline=None)
def test_every_line_is_one_row(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]) -> None:
    data = b"\n".join([b"{}", *lines]) + b"\n"  # the first line keeps chance UTF-16 marks off the head
    assert read(shard(tmp_path_factory.mktemp("r"), "a.jsonl", data)) == [b"{}", *lines]


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.sampled_from(["text", "messages", "id", "role", "content"]), inner)
    ),
    max_leaves=12,
)


@given(st.one_of(st.binary(max_size=60), json_values.map(lambda value: json.dumps(value).encode())))
def test_any_bytes_give_documents_or_bad_rows(line: bytes) -> None:
    try:
        parsed = parse_document(parse_json(line), "text")
    except BadRow as bad:
        assert bad.rule in {"bad_json", "bad_encoding", "bad_schema", "empty", "no_supervised"} and bad.detail
    else:
        assert parsed.domain


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        (b'{"text": "cut o', "bad_json"),
        (b"[" * 100_000, "bad_json"),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, "bad_json"),
        (b'{"text": ' + b"9" * 10_000 + b"}", "bad_schema"),
        (b'{"text": NaN}', "bad_schema"),
        (b"\xff\xfe\x00", "bad_encoding"),
        (b'{"text": "half \\ud800 pair"}', "bad_encoding"),
        (b"  \x00\x00 ", "empty"),
        (b"", "empty"),
        (b'"just a string"', "bad_schema"),
        (b'{"words": "x"}', "bad_schema"),
        (b'{"text": 3}', "bad_schema"),
        (b'{"text": "x", "messages": []}', "bad_schema"),
        (b'{"messages": [{"role": "wizard", "content": "x"}]}', "bad_schema"),
        (b'{"messages": [{"role": "user", "content": null}]}', "bad_schema"),
        (b'{"text": "x", "domain": "../etc"}', "bad_schema"),
        (b'{"text": "x", "id": [1]}', "bad_schema"),
        (b'{"messages": [{"role": "user", "content": "x"}]}', "no_supervised"),
    ],
)
def test_each_bad_row_names_the_rule_that_it_breaks(line: bytes, rule: str) -> None:
    with pytest.raises(BadRow) as caught:
        parse_document(parse_json(line), "text")
    assert caught.value.rule == rule


@pytest.mark.parametrize("row", [{"text": "x", "id": 7, "extra": [1]}, {"text": "x", "domain": "", "source": None}])
def test_unusual_but_valid_rows_are_read(row: dict[str, Any]) -> None:
    assert parse_document(row, "text").domain == "text"


def test_a_byte_order_mark_is_not_part_of_the_first_row() -> None:
    assert parse_json(b"\xef\xbb\xbf" + b'{"text": "x"}') == {"text": "x"}
