"""Files that become JSON lines before they are ingested: what is stored and kept, also after a kill, a change or an erasure."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sqlalchemy as sa

from factory.core.errors import InputError
from factory.core.workspace import Workspace
from factory.data.removing import apply_removal, plan_removal
from factory.data.selecting import DocumentSelection
from factory.erasing.erasing import finish_pending_removals, list_erasure_consequences
from factory.ingest.chain import ShardReport
from factory.ingest.document import parse_json
from factory.ingest.file_groups import FileGroup, ingest_file_group
from factory.ingest.inbox import ingest_path
from factory.ingest.readers import read_rows
from factory.ingest.reading.rows import pop_row_origin
from factory.ingest.rules.policy import DataPolicy
from factory.ledger.file_events import list_shards_made_from
from factory.ledger.ledger import Ledger, documents, shards
from factory.ledger.plant import Plant
from factory.repairs.lost_ledger import reingest_raw_shard
from factory.repairs.token_shards import rebuild_token_shard
from tests.support.factory.inbox import exactly, one_pass, put, rows, trained_on
from tests.support.factory.made_up_text import prose, texts, use_policy, use_small_vocabulary
from tests.support.messages import codes, refused, the
from tests.support.paths import ROOT
from tests.support.reading.formats import compress, tarred, zipped
from tests.support.said import Said


@pytest.fixture(autouse=True)
def small_vocabulary(workspace: Workspace) -> None:
    use_small_vocabulary(workspace)


def with_limits(workspace: Workspace, limits: str) -> None:
    policy = workspace.root / "policies" / "data.yaml"
    use_policy(workspace, f"{policy.read_text()}\nlimits: {{{limits}}}\n")


def names(ledger: Ledger) -> list[str]:
    return [row["name"] for row in ledger.select_rows(sa.select(shards.c.name).order_by(shards.c.ingested_at))]


def csv_of(first: int, count: int) -> bytes:
    lines = [f'd{one["id"][1:]},s{one["id"][1:]},MIT,"{one["text"]}"' for one in texts(first, count)]
    return "\n".join(["id,source,license,text", *lines]).encode()


def test_a_table_becomes_a_shard_of_json_lines_and_the_original_file_is_kept(
    workspace: Workspace, ledger: Ledger
) -> None:
    put(workspace, csv_of(0, 20), "a.csv")
    said = one_pass(workspace, ledger)
    assert trained_on(ledger) == exactly(20) and names(ledger) == ["a.csv#1.jsonl.zst"], said.lines
    (raw,) = (workspace.root / "shards" / "raw").iterdir()
    (original,) = (workspace.root / "shards" / "originals").iterdir()
    limits = DataPolicy.load(workspace.policy_path("data.yaml")).limits
    assert [parse_json(row)["id"] for row in read_rows(raw, limits) if isinstance(row, bytes)] == [
        f"d{i}" for i in range(20)
    ]
    assert original.read_bytes() == csv_of(0, 20) and not list(workspace.inbox.iterdir())
    put(workspace, csv_of(0, 20), "b.csv")
    assert one_pass(workspace, ledger).about("b.csv was already ingested") and names(ledger) == ["a.csv#1.jsonl.zst"]


def test_a_file_with_too_many_rows_or_bytes_is_cut_into_several_shards(workspace: Workspace, ledger: Ledger) -> None:
    with_limits(workspace, "max_rows: 8, part_bytes: 50000")
    put(workspace, rows(0, 20), "rows.jsonl")
    put(workspace, compress(rows(20, 10), "gz"), "packed.jsonl.gz")
    one_pass(workspace, ledger)
    assert names(ledger) == [f"packed.jsonl.gz#{n}.jsonl.zst" for n in (1, 2)] + [
        f"rows.jsonl#{n}.jsonl.zst" for n in (1, 2, 3)
    ]
    assert trained_on(ledger) == exactly(30)
    table = pa.Table.from_pylist(texts(30, 9))
    pq.write_table(table, workspace.inbox / "a.parquet")
    os.utime(workspace.inbox / "a.parquet", (time.time() - 10,) * 2)
    one_pass(workspace, ledger)
    assert trained_on(ledger) == exactly(39) and names(ledger)[-2:] == [
        "a.parquet#1.jsonl.zst",
        "a.parquet#2.jsonl.zst",
    ]


@pytest.mark.parametrize("first", [True, False])
def test_a_column_of_one_part_counts_as_a_column_of_the_file(
    workspace: Workspace, ledger: Ledger, tmp_path: Path, first: bool
) -> None:
    fields = "fields: [{files: '*', source: shop, license: =MIT}]"
    use_policy(workspace, f"tokenizer: {{vocab_size: 400}}\nlimits: {{max_rows: 8}}\n{fields}\n")
    named = slice(0, 4) if first else slice(16, 20)
    found = [{"text": one["text"], "id": one["id"]} for one in texts(0, 20)]
    found[named] = [one | {"shop": "s"} for one in found[named]]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, found)))
    reports = ingest_path(Plant(workspace, ledger), tmp_path / "a.jsonl")
    assert [one.state for one in reports] == ["ingested"] * 3 and trained_on(ledger) == exactly(20)


def test_a_truncated_file_is_quarantined_and_its_parts_before_the_error_stay(
    workspace: Workspace, ledger: Ledger
) -> None:
    with_limits(workspace, "max_rows: 8")
    array = json.dumps(texts(0, 20)).encode()
    put(workspace, array[:-40], "a.json", age=3600)
    said = one_pass(workspace, ledger)
    assert said.about("a.json: ") and said.about("cut off after 19 complete items") and said.about("16 rows before")
    assert trained_on(ledger) == exactly(16) and [path.name[17:] for path in workspace.quarantine.iterdir()] == [
        "a.json"
    ]
    put(workspace, array, "a.json")
    one_pass(workspace, ledger)
    assert trained_on(ledger) == exactly(20)


def test_an_archive_without_readable_members_is_quarantined_with_the_reason(
    workspace: Workspace, ledger: Ledger
) -> None:
    put(workspace, zipped({"a.png": b"x", "b.pdf": b"y"}), "a.zip")
    said = one_pass(workspace, ledger)
    assert said.about("a.zip: 0 rows; QUARANTINED:") and said.about("type are not supported")
    assert len(list(workspace.quarantine.iterdir())) == 1 and not list(workspace.inbox.iterdir())


def test_members_that_are_left_out_of_an_archive_are_reported(workspace: Workspace, ledger: Ledger) -> None:
    members = {"a.jsonl": rows(0, 20), "x.png": b"x", "y.png": b"y", "in.zip": b"z", "../up.txt": b"up"}
    put(workspace, compress(tarred(members), "zst"), "a.tar.zst")
    said = one_pass(workspace, ledger)
    assert trained_on(ledger) == exactly(20)
    left = the(said.lines, "ingest.left_out").data
    assert left["count"] == 4 and left["reasons"][0].endswith("not supported (x.png, …)")
    assert "archive inside an archive" in str(left["reasons"]) and "../up.txt" in str(left["reasons"])


# -- kills -------------------------------------------------------------------------------------------------------------
_KILLED = """
import os, signal, sys
from pathlib import Path
from factory.ledger.plant import Plant
from factory.core.workspace import Workspace
from factory.ingest.inbox import ingest_path
from factory.ledger.ledger import Ledger

seen = []
def ingested(report):
    seen.append(report)
    if len(seen) == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
workspace = Workspace.open(Path(sys.argv[1]))
ingest_path(Plant(workspace, Ledger.open(workspace.ledger_url, workspace.root)), Path(sys.argv[2]), workers=0, ingested=ingested)
"""


def test_a_killed_ingest_of_a_large_file_continues_at_the_next_part(
    workspace: Workspace, ledger: Ledger, tmp_path: Path
) -> None:
    with_limits(workspace, "max_rows: 8")
    path = tmp_path / "large.jsonl"
    path.write_bytes(rows(0, 30))
    dead = subprocess.run([sys.executable, "-c", _KILLED, str(workspace.root), str(path), "3"], cwd=ROOT)
    assert dead.returncode == -signal.SIGKILL
    before = {row["name"]: row["ingested_at"] for row in ledger.select_rows(sa.select(shards))}
    assert len(before) == 3  # the third is stored, and not recorded as a part yet
    said = Said()
    reports = ingest_path(Plant(workspace, ledger, said), path, workers=0)
    assert the(said.lines, "ingest.continues").data == {"pack": "large.jsonl", "parts": 2, "rows": 16}
    after = {row["name"]: row["ingested_at"] for row in ledger.select_rows(sa.select(shards))}
    assert {name: after[name] for name in before} == before and len(after) == 4
    assert trained_on(ledger) == exactly(30) and [report.rows for report in reports] == [8, 6]
    assert [part["part"] for part in list_shards_made_from(ledger, FileGroup.of_file(path).compute_sha256())] == [
        1,
        2,
        3,
        4,
    ]
    assert [one.name for one in ingest_path(Plant(workspace, ledger), path, workers=0)] == list(after)


def test_after_a_policy_change_an_unfinished_file_is_read_again_without_duplicates(
    workspace: Workspace, ledger: Ledger, tmp_path: Path
) -> None:
    with_limits(workspace, "max_rows: 8")
    path = tmp_path / "large.jsonl"
    path.write_bytes(rows(0, 20))
    subprocess.run([sys.executable, "-c", _KILLED, str(workspace.root), str(path), "2"], cwd=ROOT)
    use_small_vocabulary(workspace)
    with_limits(workspace, "max_rows: 6")
    ingest_path(Plant(workspace, ledger), path, workers=0)
    assert trained_on(ledger) == exactly(20)


def test_a_file_that_changes_during_its_ingest_is_refused(workspace: Workspace, ledger: Ledger, tmp_path: Path) -> None:
    with_limits(workspace, "max_rows: 8")
    path = tmp_path / "large.jsonl"
    path.write_bytes(rows(0, 20))

    def change(report: ShardReport) -> None:
        path.write_bytes(rows(100, 20))

    with refused("ingest.packed_file_changed", InputError):
        ingest_path(Plant(workspace, ledger), path, workers=0, ingested=change)
    assert trained_on(ledger) == exactly(8)


# -- many small files --------------------------------------------------------------------------------------------------
def small_files(folder: Path, numbers: Iterable[int], suffix: str = "txt") -> None:
    for number in numbers:
        path = folder / f"d{number}.{suffix}"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(prose(number))
        os.utime(path, (time.time() - 10,) * 2)


def test_many_small_files_of_the_inbox_become_one_shard(workspace: Workspace, ledger: Ledger) -> None:
    small_files(workspace.inbox, range(300))
    put(workspace, b"\xff\xfe not UTF-8", "bad.txt")
    put(workspace, rows(1000, 20), "large.jsonl")
    put(workspace, b"MZ", "a.exe")
    said = one_pass(workspace, ledger)
    assert the(said.lines, "ingest.together").data["files"] == 302
    assert sorted(names(ledger)) == ["a.exe", "bad.txt", "inbox#1.jsonl.zst"]
    kept = ledger.select_rows(sa.select(documents.c.source).where(documents.c.fate.in_(["train", "held_out"])))
    assert {row["source"] for row in kept} == {f"d{n}.txt" for n in range(300)} | {f"s{n}" for n in range(1000, 1020)}
    assert not list(workspace.inbox.iterdir()) and [path.name[17:] for path in sorted(workspace.quarantine.iterdir())]
    (raw,) = (workspace.root / "shards" / "raw").iterdir()
    limits = DataPolicy.load(workspace.policy_path("data.yaml")).limits
    found = [parse_json(row) for row in read_rows(raw, limits) if isinstance(row, bytes)]
    assert [pop_row_origin(row).path for row in found][:2] == ["d0.txt", "d1.txt"]
    assert reingest_raw_shard(Plant(workspace, ledger), raw, "inbox#1.jsonl.zst")  # as a lost ledger is made again
    assert len(names(ledger)) == 3


def test_files_that_spoil_a_pack_are_quarantined_and_the_others_ingested(
    workspace: Workspace, ledger: Ledger, tmp_path: Path
) -> None:
    """In the inbox each bad file is quarantined once; in a folder the bad files are named."""
    for number in range(60):
        data = rows(number, 1) if number % 3 == 0 else b"garbage %d\n" % number
        put(workspace, data, f"f{number:02d}.jsonl")
        (tmp_path / f"g{number:02d}.jsonl").write_bytes(data + b"\n")
    said = one_pass(workspace, ledger)
    assert the(said.lines, "ingest.together").data["files"] == 60
    left = the(said.lines, "ingest.left_out").data
    assert (left["pack"], left["count"]) == ("inbox", 40) and left["reasons"][0].startswith("40 because the file")
    assert sorted(names(ledger)) == sorted(["inbox#1.jsonl.zst", *(f"f{n:02d}.jsonl" for n in range(60) if n % 3)])
    assert trained_on(ledger) == Counter(f"d{n}" for n in range(0, 60, 3))
    assert len(list(workspace.quarantine.iterdir())) == 40 and not list(workspace.inbox.iterdir())
    pack = FileGroup("docs", [(path.name, path) for path in sorted(tmp_path.glob("g*"))])
    unread: set[Path] = set()
    (one,) = ingest_file_group(Plant(workspace, ledger), pack, workers=0, unread=unread)
    assert (one.state, one.rows, sum(one.counts["dropped"].values())) == ("ingested", 40, 40)
    assert one.counts["dropped"]["empty"] == 20  # the others are copies
    assert len(unread) == 40


def test_each_of_many_bad_files_is_quarantined_once(workspace: Workspace, ledger: Ledger) -> None:
    for number in range(40):
        put(workspace, b"garbage %d\n" % number, f"f{number:02d}.jsonl")
    said = one_pass(workspace, ledger)
    assert codes(said.lines).count("ingest.together") == 1
    assert sorted(names(ledger)) == [f"f{n:02d}.jsonl" for n in range(40)]
    assert len(list(workspace.quarantine.iterdir())) == 40 and not list(workspace.inbox.iterdir())


def test_the_same_files_are_not_ingested_twice(workspace: Workspace, ledger: Ledger, tmp_path: Path) -> None:
    small_files(tmp_path / "docs", range(40))
    pack = FileGroup("docs", [(path.name, path) for path in sorted((tmp_path / "docs").iterdir())])
    (first,) = ingest_file_group(Plant(workspace, ledger), pack, workers=0)
    (again,) = ingest_file_group(Plant(workspace, ledger), pack, workers=0)
    assert first == again and first.rows == 40 and names(ledger) == ["docs#1.jsonl.zst"]
    small_files(tmp_path / "docs", [3])  # written again: the same content
    assert ingest_file_group(Plant(workspace, ledger), pack, workers=0) == [first]


def test_an_unreadable_file_is_left_out_and_a_group_of_only_such_files_is_refused(
    workspace: Workspace, ledger: Ledger, tmp_path: Path
) -> None:
    small_files(tmp_path, range(5))
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe")
    unread: set[Path] = set()
    pack = FileGroup("docs", [(path.name, path) for path in sorted(tmp_path.glob("*.txt"))])
    (one,) = ingest_file_group(Plant(workspace, ledger), pack, workers=0, unread=unread)
    assert one.rows == 5 and unread == {tmp_path / "bad.txt"}
    with refused("ingest.pack", InputError, pack="bad") as caught:
        ingest_file_group(Plant(workspace, ledger), FileGroup("bad", [("bad.txt", tmp_path / "bad.txt")]), workers=0)
    assert caught.value.data["why"].data["why"].data == {"encoding": "UTF-16"}


# -- erasure and repair ------------------------------------------------------------------------------------------------
def test_an_erasure_deletes_the_file_that_the_shard_was_made_from(workspace: Workspace, ledger: Ledger) -> None:
    put(workspace, zipped({"a.csv": csv_of(0, 20)}), "a.zip")
    one_pass(workspace, ledger)
    (token_shard,) = ledger.select_rows(sa.text("SELECT id, path FROM token_shards"))
    (one,) = ledger.select_rows(sa.select(documents.c.id, documents.c.key).where(documents.c.fate == "train").limit(1))
    apply_removal(ledger, plan_removal(ledger, DocumentSelection("key", (one["key"],)), True), "ann", "law", erase=True)
    said = finish_pending_removals(Plant(workspace, ledger))
    assert the(said, "ingest.original_deleted").data["file"] == "a.zip"
    assert not list((workspace.root / "shards" / "originals").iterdir())
    (raw,) = (workspace.root / "shards" / "raw").iterdir()
    limits = DataPolicy.load(workspace.policy_path("data.yaml")).limits
    left = [parse_json(row) for row in read_rows(raw, limits) if isinstance(row, bytes)]
    assert {"erased": True} in left and len(left) == 20 and one["id"] not in {row.get("id") for row in left}
    assert rebuild_token_shard(Plant(workspace, ledger), token_shard["id"]) == ""
    put(workspace, zipped({"a.csv": csv_of(0, 20)}), "a.zip")  # the same file again: its text does not come back
    one_pass(workspace, ledger)
    assert not list((workspace.root / "shards" / "originals").iterdir()) and len(names(ledger)) == 1


def test_an_original_outside_the_workspace_is_named_before_an_erasure(
    workspace: Workspace, ledger: Ledger, tmp_path: Path
) -> None:
    (tmp_path / "a.csv").write_bytes(csv_of(0, 20))
    ingest_path(Plant(workspace, ledger), tmp_path / "a.csv", workers=0)
    keys = tuple(row["key"] for row in ledger.select_rows(sa.select(documents.c.key)))
    said = list_erasure_consequences(Plant(workspace, ledger), DocumentSelection("key", keys))
    assert the(said, "erasing.outside").data["path"] == str(tmp_path / "a.csv")
