"""Every kind of file gives the same three documents. The error of an unsupported kind says what to do. A hostile file or member does no harm to
others."""

from __future__ import annotations

import io
import json
import re
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from factory.ingest.document import parse_json
from factory.ingest.readers import RawRow, ShardProblem, read_rows
from factory.ingest.reading.rows import BadRow, add_path, format_row_as_line, pop_row_origin
from factory.ingest.reading.streams import BLOCK
from factory.ingest.rules.policy import ShardLimits
from tests.support.messages import codes, refused
from tests.support.reading.formats import (
    KINDS,
    REFUSED,
    ROWS,
    SINGLE,
    TEXTS,
    arrow_file,
    arrow_stream,
    compress,
    dataset,
    json_array,
    json_lines,
    one_each,
    table,
    tarred,
    web_archive,
    zipped,
)

LIMITS = ShardLimits(max_row_bytes=5000)
LeftOut = list[tuple[str, str]]


def shard(tmp_path: Path, name: str, data: bytes) -> Path:
    path = tmp_path / name
    path.write_bytes(data)
    return path


def read(path: Path, limits: ShardLimits = LIMITS, left_out: LeftOut | None = None) -> list[RawRow]:
    note: Callable[[str, str], object] = lambda where, why: (
        left_out.append((where, why)) if left_out is not None else None
    )
    return list(read_rows(path, limits, note))


def decoded(row: RawRow) -> dict[str, Any]:
    """The row as a worker decodes it; checks that a line of a packed shard decodes to the same row."""
    assert not isinstance(row, BadRow), row
    found = parse_json(format_row_as_line(row))
    assert found == (parse_json(row) if isinstance(row, bytes) else json.loads(json.dumps(row)))
    pop_row_origin(found)
    return found


def plain(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_of_file_gives_the_same_documents(tmp_path: Path, name: str) -> None:
    rows = [decoded(row) for row in read(shard(tmp_path, name, KINDS[name]()))]
    assert [plain(row["text"]) for row in rows] == [plain(text) for text in TEXTS]
    if "html" not in name and "warc" not in name and "pages" not in name:
        assert [row["text"] for row in rows] == TEXTS


@pytest.mark.parametrize("name", SINGLE)
def test_each_kind_of_single_document_file_gives_its_document(tmp_path: Path, name: str) -> None:
    for text in TEXTS:
        (row,) = read(shard(tmp_path, name, SINGLE[name](text)))
        found = decoded(row)
        assert plain(found["text"]) == plain(text) and found["source"] == name
        assert found.get("domain") == (
            "code"
            if name.rpartition(".")[2]
            in ("py", "c", "cpp", "rs", "go", "java", "ts", "sql", "kt", "Makefile", "Dockerfile")
            else None
        )


@pytest.mark.parametrize("name", REFUSED)
def test_the_error_of_an_unread_kind_says_what_to_do(tmp_path: Path, name: str) -> None:
    with refused("ingest.unknown_kind", ShardProblem, file=name) as caught:
        read(shard(tmp_path, name, b"\x00\x01"))
    assert REFUSED[name] in caught.value.data["hint"] and "\n" not in str(caught.value)


def test_at_least_seventy_kinds_of_file_are_read() -> None:
    """An older version refused 54 of 63."""
    assert len(KINDS) + len(SINGLE) >= 70


def test_a_data_set_on_disk_is_read_in_the_order_of_its_files(tmp_path: Path) -> None:
    assert [decoded(row) for row in read(dataset(tmp_path / "one"))] == ROWS
    rows = read(dataset(tmp_path / "splits", ["train", "test"]))
    assert [decoded(dict(row)) for row in rows if isinstance(row, dict)] == [*ROWS, *ROWS]
    assert [pop_row_origin(row).path for row in rows][2:4] == [
        "train/data-00002-of-00003.arrow",
        "test/data-00000-of-00003.arrow",
    ]
    (tmp_path / "one" / "data-00001-of-00003.arrow").unlink()
    with refused("reading.dataset_file", ShardProblem, file="data-00001-of-00003.arrow"):
        read(tmp_path / "one")
    (tmp_path / "one" / "state.json").write_text('{"_data_files": [{"filename": "../../etc/passwd"}]}')
    with refused("reading.dataset", ShardProblem, kind="ValueError"):
        read(tmp_path / "one")


def test_rows_of_members_name_their_origin(tmp_path: Path) -> None:
    data = zipped({"a/x.jsonl": json_lines(ROWS[:1]), "b/y.csv": table(), "c/z.md": b"some text"})
    rows = read(shard(tmp_path, "a.zip", data))
    found = [parse_json(format_row_as_line(row)) for row in rows]
    assert [pop_row_origin(row).path for row in found] == ["a/x.jsonl", "b/y.csv", "b/y.csv", "b/y.csv", "c/z.md"]
    assert found[-1] == {"text": "some text", "source": "c/z.md"}


def test_pages_of_web_archives_keep_their_addresses(tmp_path: Path) -> None:
    left: LeftOut = []
    rows = read(shard(tmp_path, "a.warc.gz", web_archive(True)), left_out=left)
    assert [row["url"] for row in rows if isinstance(row, dict)] == [f"https://example.org/{n}.html" for n in range(3)]
    assert all(isinstance(row, dict) and row["created"].startswith("20") for row in rows)
    assert sorted(codes(why for _, why in left)) == ["reading.page_content"] * 3 + ["reading.page_status"] * 3
    assert not any("Login" in str(row) or "Copyright" in str(row) for row in rows)


def test_a_notebook_has_its_code_and_not_its_outputs(tmp_path: Path) -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "words"]},
        {"cell_type": "code", "source": ["x = 1\n", "x"], "outputs": [{"text": "printed"}]},
    ]
    (row,) = read(shard(tmp_path, "a.ipynb", json.dumps({"cells": cells}).encode()))
    assert row == {"text": "# Title\nwords\n\n```python\nx = 1\nx\n```", "source": "a.ipynb"}
    with refused("reading.notebook", ShardProblem):
        read(shard(tmp_path, "b.ipynb", b'{"cells": 3}'))


# -- values that cannot be read ----------------------------------------------------------------------------------------
def odd_times() -> pa.Array:
    """Times in the year 33658, times before Python's calendar, and good times."""
    return pa.array([1_000_000_000_000_000_000, -62_135_596_800_000_001, 0, 1], pa.int64()).cast(
        pa.timestamp("us", tz="+01:00")
    )


@pytest.mark.parametrize("write", [pq.write_table, pa.feather.write_feather])
def test_a_row_is_dropped_only_if_ingest_needs_its_unreadable_value(tmp_path: Path, write: Callable[..., None]) -> None:
    path = tmp_path / ("a.parquet" if write is pq.write_table else "a.feather")
    scores = pa.array([float("nan"), 1.5, None, float("inf")])
    write(pa.table({"text": ["a", "b", "c", "d"], "created": odd_times(), "score": scores}), str(path))
    rows = [parse_json(format_row_as_line(row)) for row in read(path)]
    origins = [pop_row_origin(row) for row in rows]
    assert [row["text"] for row in rows] == ["a", "b", "c", "d"] and rows[1]["score"] == 1.5
    assert [sorted(origin.unreadable) for origin in origins] == [["created", "score"], ["created"], [], ["score"]]
    for origin in origins:
        origin.refuse_unreadable_values(["text"])
    with refused("reading.unreadable_value", BadRow, key="created"):
        origins[0].refuse_unreadable_values(["text", "created"])


def test_columns_without_text_are_not_read(tmp_path: Path) -> None:
    images = pa.array([{"bytes": b"\x89PNG", "path": "x"}])
    columns = {"text": ["a"], "image": images, "vector": pa.array([[0.5, 0.25]]), "tags": pa.array([["x", "y"]])}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == [{"text": "a", "tags": ["x", "y"]}]


# -- tables ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("data", "rows"),
    [
        (b'id,text\n1,"two\nlines"\n2,"a ""word"""\n', [{"id": "1", "text": "two\nlines"}, {"id": "2", "text": 'a "word"'}]),
        (b"id;text\r\n1;a, b\r\n\r\n2;c\r\n", [{"id": "1", "text": "a, b"}, {"id": "2", "text": "c"}]),
        (b"id,text\n1,a\n2\n3,c,d\n4,e", [{"id": "1", "text": "a"}, "bad_csv", "bad_csv", {"id": "4", "text": "e"}]),
        (b'id,text\n1,"a"b\n2,c\n', ["bad_csv", {"id": "2", "text": "c"}]),
        (b'id,text\n1,a\n2,"never closed\n3,c\n', [{"id": "1", "text": "a"}, "bad_csv"]),
        (b"id,text\n1," + b"x" * 9000 + b"\n2,b\n", ["row_too_long", {"id": "2", "text": "b"}]),
        (b'id,text\n1,"' + b"x,\n" * 4000 + b'"\n2,b\n', ["row_too_long", {"id": "2", "text": "b"}]),
        (b'id,text\n1,"' + b"x" * 3_000_000 + b'\n""\n",y\n2,b\n', ["row_too_long", {"id": "2", "text": "b"}]),
        (b"id,text\n1,caf\xe9\n", [{"id": "1", "text": "caf\udce9"}]),  # dropped as bad_encoding by what reads the row
        (b"text\n\xef\xbb\xbfa\n", [{"text": "\ufeffa"}]),
        (b'text;"title, long, of, it"\na, b;c\n', [{"text": "a, b", "title, long, of, it": "c"}]),
        (b'id,text\r1,"two\rlines"\r\r2,c', [{"id": "1", "text": "two\rlines"}, {"id": "2", "text": "c"}]),
        (b"id,text\r1," + b"x" * 9000 + b"\r2,b\r", ["row_too_long", {"id": "2", "text": "b"}]),
        (b"\xef\xbb\xbfsep=;\r\nid;text\r\n1;a, b, c\r\n", [{"id": "1", "text": "a, b, c"}]),
        (b'"sep=^"\rid^text\r1^a\r', [{"id": "1", "text": "a"}]),
        (b"id,shop,text\n1,,a\n", [{"id": "1", "shop": None, "text": "a"}]),  # there is such a column
    ],
)  # fmt: skip
def test_records_of_csv_tables_become_rows_or_dropped_rows(tmp_path: Path, data: bytes, rows: list[Any]) -> None:
    found = [row.rule if isinstance(row, BadRow) else row for row in read(shard(tmp_path, "a.csv", data))]
    assert found == rows


def test_a_line_end_that_spans_two_blocks_is_read_as_one(tmp_path: Path) -> None:
    many, first = divmod(BLOCK + 1 - len(b"text\r\n\r\n"), 100)
    data = b"text\r\n" + b"y" * first + b"\r\n" + (b"x" * 98 + b"\r\n") * (many + 3)
    assert data[BLOCK - 1 : BLOCK + 1] == b"\r\n"
    assert read(shard(tmp_path, "a.csv", data)) == [{"text": "y" * first}] + [{"text": "x" * 98}] * (many + 3)


@pytest.mark.parametrize(
    ("data", "code", "facts"),
    [(b"a,a\n1,2\n", "reading.same_column_name", {"name": "a"}), (b'"a\n', "reading.table_header", {})],
)
def test_a_table_without_a_header_is_refused(tmp_path: Path, data: bytes, code: str, facts: dict[str, str]) -> None:
    with refused(code, ShardProblem, **facts):
        read(shard(tmp_path, "a.csv", data))


# -- JSON --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("data", "rows"),
    [
        (b"[]", []),
        (b'[{"a": "[]{}\\"\\\\"}, {"b": [1, {"c": 2}]}]', [b'{"a": "[]{}\\"\\\\"}', b'{"b": [1, {"c": 2}]}']),
        (b'[{"a": 1},\n\n {"b" 2}, 3 ,"x"]', [b'{"a": 1}', b'{"b" 2}', b"3", b'"x"']),
        (b'[{"a": "' + b"x" * 3_000_000 + b'"}, {"b": 1}]', ["row_too_long", b'{"b": 1}']),
        (b'{\n"a": 1\n}\n{\n"b": 2}', [b'{\n"a": 1\n}', b'{\n"b": 2}']),
    ],
)  # fmt: skip
def test_json_values_become_rows_or_dropped_rows(tmp_path: Path, data: bytes, rows: list[Any]) -> None:
    found = [row.rule if isinstance(row, BadRow) else row for row in read(shard(tmp_path, "a.json", data))]
    assert found == rows


@pytest.mark.parametrize("cut", [1, 2, 30, 100])
def test_a_json_array_is_read_across_blocks(tmp_path: Path, cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("factory.ingest.reading.streams.BLOCK", cut)
    assert [parse_json(row) for row in read(shard(tmp_path, "a.json", json_array(1))) if isinstance(row, bytes)] == ROWS


# -- what is hostile or broken -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "data", "code"),
    [
        ("a.json", json_array()[:-5], "reading.json_cut_off"),
        ("a.json", b'[{"a": 1}] {"b": 2}', "reading.json_after_array"),
        ("a.json", b'[{"a": 1}}]', "reading.json_unopened"),
        *((f"a.jsonl.{kind}", compress(json_lines() * 400, kind)[:-40], "reading.decompression") for kind in ("gz", "bz2", "xz", "zst")),
        ("a.zip", zipped(one_each("txt"))[:-30], "reading.zip"),
        ("a.tar", tarred(one_each("txt", [b"x" * 4000] * 3))[:6000], "reading.tar"),
        ("a.tar.gz", compress(tarred(one_each("txt")), "gz")[:-30], "reading.decompression"),
        ("a.tar", b"no tar at all" * 100, "reading.tar"),
        ("a.arrow", arrow_file()[:-100], "reading.arrow"),
        ("a.arrow", arrow_stream()[:-100], "reading.arrow"),
        ("a.arrow", b"no arrow at all", "reading.arrow"),
        ("a.warc", b"no web archive at all", "reading.warc_start"),
        ("a.warc.gz", web_archive(True)[:-60], "reading.(decompression|warc|warc_cut_off)"),
        ("a.warc", web_archive()[:-60], "reading.(warc|warc_cut_off)"),
        ("a.zip", zipped({"a.txt": b"\0" * 100_000_000}), "reading.(document_too_large|expansion)"),
    ],
)  # fmt: skip
def test_the_error_of_a_broken_file_names_the_fault(tmp_path: Path, name: str, data: bytes, code: str) -> None:
    left: LeftOut = []
    try:
        read(shard(tmp_path, name, data), left_out=left)
    except ShardProblem as problem:
        left.append(("", problem.message))
    assert any(re.fullmatch(code, found) for found in codes(why for _, why in left)), left
    assert all("\n" not in words and len(words) < 400 for _, words in left)


@pytest.mark.parametrize("pack", [zipped, tarred])
def test_the_limit_of_expansion_counts_all_members_together(tmp_path: Path, pack: Callable[..., bytes]) -> None:
    line = b'{"text": "' + b"a" * 4000 + b'"}\n'
    data = pack({f"{n}.jsonl": line * 5000 for n in range(5)})
    name, data = ("a.zip", data) if pack is zipped else ("a.tar.gz", compress(data, "gz"))
    with refused("reading.expansion", ShardProblem, limit=200.0):
        read(shard(tmp_path, name, data))


def test_forbidden_members_of_an_archive_are_left_out_by_name(tmp_path: Path) -> None:
    names = ["../up.txt", "/etc/passwd.txt", "C:\\x.txt", "in.zip", "in.tar.gz", "x.png", ".hidden.txt", "good.txt"]
    left: LeftOut = []
    (row,) = read(shard(tmp_path, "a.zip", zipped(dict.fromkeys(names, b"text"))), left_out=left)
    assert isinstance(row, dict) and row["source"] == "good.txt"
    why = dict(left)
    assert set(why) == {*names} - {".hidden.txt", "good.txt", "C:\\x.txt"} | {"C:/x.txt"} or set(why) == {*names} - {
        ".hidden.txt",
        "good.txt",
    }
    assert "leads out" in why["../up.txt"] and "leads out" in why["/etc/passwd.txt"]
    assert (
        "archive inside an archive" in why["in.zip"]
        and "archive inside an archive" in why["in.tar.gz"]
        and "an image" in why["x.png"]
    )


def test_links_and_devices_of_a_tar_are_left_out(tmp_path: Path) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, kind in (
            ("a.txt", tarfile.SYMTYPE),
            ("b.txt", tarfile.LNKTYPE),
            ("c.txt", tarfile.CHRTYPE),
            ("d.txt", tarfile.FIFOTYPE),
        ):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            archive.addfile(info)
    left: LeftOut = []
    assert read(shard(tmp_path, "a.tar", out.getvalue()), left_out=left) == []
    assert left == [(f"{name}.txt", "the member is a link or a device") for name in "abcd"]


def test_a_link_of_a_zip_and_a_damaged_member_are_left_out(tmp_path: Path) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        link = zipfile.ZipInfo("link.txt")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
        archive.writestr("broken.txt", "some text of this member")
        archive.writestr("good.txt", "good text")
    left: LeftOut = []
    (row,) = read(shard(tmp_path, "a.zip", out.getvalue().replace(b"some text of", b"same text of")), left_out=left)
    assert isinstance(row, dict) and row["text"] == "good text"
    assert [where for where, _ in left] == ["link.txt", "broken.txt"] and "CRC" in left[1][1]


def test_hostile_arrow_offsets_are_refused_and_not_followed(tmp_path: Path) -> None:
    data = arrow_stream()
    first, second = (len(text.encode()).to_bytes(4, "little") for text in (TEXTS[0], TEXTS[0] + TEXTS[1]))
    assert data.count(first + second) == 1
    (tmp_path / "a.arrow").write_bytes(data.replace(first + second, (1 << 30).to_bytes(4, "little") + second))
    with refused("reading.arrow", ShardProblem):
        read(tmp_path / "a.arrow")


@pytest.mark.parametrize("line", [b"{}", b' {"a": 1}', b'\xef\xbb\xbf{"a": 1}', b'{"a": {"b": "}"}}'])
def test_a_line_keeps_its_content_when_its_path_is_added(line: bytes) -> None:
    row = parse_json(format_row_as_line(add_path(line, 'a "b".jsonl')))
    assert pop_row_origin(row).path == 'a "b".jsonl' and row == parse_json(line)


@pytest.mark.parametrize("line", [b"", b"[1]", b'{"a": ', b"\xff\xfe", b"nonsense"])
def test_a_line_that_is_not_an_object_stays_invalid_when_its_path_is_added(line: bytes) -> None:
    with pytest.raises(BadRow):
        found = parse_json(format_row_as_line(add_path(line, "a")))
        assert not isinstance(found, dict)
        raise BadRow("bad_schema", "as what reads it says")
