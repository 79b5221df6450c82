"""An erasure removes the text from every file; the data order, repairs and the refusal of copies still work."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from factory.bundles.shards import read_releasable_documents
from factory.core.errors import InputError
from factory.core.workspace import Workspace
from factory.data.removing import apply_removal, plan_removal, undo_removal
from factory.data.selecting import list_removable_fates, select_documents_by_name
from factory.erasing import erasing
from factory.erasing.erasing import finish_pending_removals, rewrite_shard_without_rows
from factory.ingest.inbox import ingest_and_move, update_inbox
from factory.ingest.readers import read_rows
from factory.ingest.rules.policy import LicencePermissions, LicenceRules, ShardLimits
from factory.ingest.tokenizer import Tokenizer
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.ledger.removals import list_removals, read_erased_shards
from factory.ledger.rows import SegmentRow
from factory.repairs.token_shards import find_token_shard_damage, rebuild_token_shard
from factory.repairs.workspace_examination import CHECKS
from factory.show.pages.provenance import read_document_provenance
from factory.training.planning import plan_trunk
from factory.training.training import run_segment
from tests.support.factory.command import command_here
from tests.support.messages import codes, refused, the
from trainer.contract.data.token_shard import TokenShard

Copy = Callable[[], tuple[Workspace, Ledger]]


def chosen(ledger: Ledger) -> list[str]:
    """A text, a chat and a held-out document of one shard."""
    find = "SELECT key FROM documents WHERE fate = '{}' AND domain = '{}' AND key LIKE '{}%' ORDER BY key LIMIT 1"
    shard = ledger.read("SELECT sha256 FROM shards ORDER BY sha256")[0]["sha256"][:16]
    kinds = (("train", "docs"), ("train", "chat"), ("held_out", "docs"))
    return [ledger.read(find.format(fate, domain, shard))[0]["key"] for fate, domain in kinds]


def erase(ledger: Ledger, keys: list[str]) -> None:
    apply_removal(
        ledger,
        plan_removal(ledger, select_documents_by_name(ledger, keys, list_removable_fates(True)), True),
        "ann",
        "law",
        erase=True,
    )


def text_of(row: dict[str, Any]) -> str:
    return str(row.get("text") or row["messages"][1]["content"])


def raw_lines(workspace: Workspace) -> dict[str, list[bytes]]:
    return {path.name: path.read_bytes().splitlines() for path in sorted((workspace.shards / "raw").glob("[!.]*"))}


def readable(workspace: Workspace, ledger: Ledger) -> str:
    """All text that is left in the workspace's shards and held-out documents."""
    tokenizer = Tokenizer.load(workspace.tokenizer)
    folders = [path.parent for path in workspace.shards.glob("*/manifest.json")]
    shards = [tokenizer.decode(np.asarray(TokenShard(folder).tokens).tolist()) for folder in folders]
    raw = [line.decode() for lines in raw_lines(workspace).values() for line in lines]
    held = [json.dumps(row["content"]) for row in ledger.read("SELECT content FROM held_out")]
    return "\n".join([*shards, *raw, *held])


def state(workspace: Workspace, ledger: Ledger) -> Any:
    """The state after an erasure, without random names and times."""
    shards = sorted(
        (path.parent.name, path.parent.joinpath("tokens.bin").read_bytes())
        for path in workspace.shards.glob("*/manifest.json")
    )
    rows = ledger.read("SELECT id, path FROM token_shards ORDER BY id")
    held = ledger.read("SELECT key FROM held_out ORDER BY key")
    return (
        shards,
        [(row["id"], Path(row["path"]).name) for row in rows],
        held,
        raw_lines(workspace),
        list_removals(ledger)[0].state,
    )


def test_an_erasure_leaves_no_text_and_training_continues(copied: Copy) -> None:
    workspace, ledger = copied()
    keys = chosen(ledger)
    before, shard = raw_lines(workspace), keys[0].partition(":")[0]
    (name,) = (name for name in before if name.startswith(shard))
    gone = [json.loads(before[name][int(key.partition(":")[2])]) for key in keys]
    assert all(text_of(row) in readable(workspace, ledger).replace('\\"', '"') for row in gone)
    exact = read_document_provenance(ledger, keys[0])[0]["seen"]
    erase(ledger, keys)
    (said,) = finish_pending_removals(Plant(workspace, ledger))
    assert the([said], "erasing.done").data == {"removal": 1, "rows": 3} and list_removals(ledger)[0].state == "erased"

    left = readable(workspace, ledger)
    assert not any(text_of(row) in left for row in gone)
    after = raw_lines(workspace)
    assert [n for n, (a, b) in enumerate(zip(before[name], after[name], strict=True)) if a != b] == sorted(
        int(key.partition(":")[2]) for key in keys
    )
    assert read_document_provenance(ledger, keys[0])[0]["seen"] == exact, "its steps are known as before"
    for check in ("token shards", "raw shards", "orphans"):
        assert CHECKS[check](Plant(workspace, ledger), True).faults == []
    os.utime(workspace.shards / "raw" / name)  # copied from another disk, say
    update_inbox(Plant(workspace, ledger), settle_seconds=0)
    assert list(workspace.inbox.iterdir()) == [], "the shard that was made again is not taken for a new one"
    number = plan_trunk(Plant(workspace, ledger), 5)
    run_segment(Plant(workspace, ledger), number)  # its cursors count in the shard that was replaced
    assert SegmentRow.get(ledger, number).state == "done"
    with refused("data.erased", InputError, number=1):
        undo_removal(ledger, 1, "ann")

    copy = workspace.inbox / "copy.jsonl"
    copy.write_text("".join(json.dumps(row) + "\n" for row in gone))
    ingest_and_move(Plant(workspace, ledger), copy)
    found = ledger.read("SELECT rule FROM documents d JOIN shards s ON s.sha256 = d.shard WHERE s.name = 'copy.jsonl'")
    assert [row["rule"] for row in found] == ["removed"] * 3
    whole = workspace.inbox / "whole.jsonl"
    whole.write_bytes(b"\n".join(before[name]) + b"\n")
    ingest_and_move(Plant(workspace, ledger), whole)
    assert not whole.exists() and raw_lines(workspace)[name] == after[name], "the old file does not bring the text back"


def test_the_remaining_data_can_be_put_into_a_bundle(copied: Copy) -> None:
    workspace, ledger = copied()
    names = {row["license"] for row in ledger.read("SELECT license FROM documents WHERE license IS NOT NULL")}
    rules = LicenceRules(
        known=dict.fromkeys(names, LicencePermissions(train=True, release=True)),
        missing=LicencePermissions(train=True, release=True),
    )
    newest = SegmentRow.select(ledger, "WHERE state = 'done' ORDER BY id")[-1].id
    tokenizer = Tokenizer.load(workspace.tokenizer)
    handed_on = lambda: {
        row["id"]: row for row in read_releasable_documents(workspace.root, ledger, tokenizer, newest, rules)
    }
    before = handed_on()
    erase(ledger, keys := chosen(ledger))
    finish_pending_removals(Plant(workspace, ledger))
    gone = {ledger.read("SELECT id FROM documents WHERE key = :key", key=key)[0]["id"] for key in keys}
    assert handed_on() == {name: row for name, row in before.items() if name not in gone} and gone & before.keys()


def test_a_token_shard_with_erased_documents_is_made_again(copied: Copy) -> None:
    workspace, ledger = copied()
    keys = chosen(ledger)
    erase(ledger, keys)
    finish_pending_removals(Plant(workspace, ledger))
    erase(ledger, chosen(ledger))  # of the same shard, a second time
    finish_pending_removals(Plant(workspace, ledger))
    (detail,) = read_erased_shards(ledger).values()
    assert len(detail["rows"]) == 6
    ((number, about),) = detail["token_shards"].items()
    place = workspace.shards / about["content"]
    shutil.rmtree(place)
    assert codes([find_token_shard_damage(place, True)]) == ["token_shards.missing"]
    assert rebuild_token_shard(Plant(workspace, ledger), number) == ""
    assert find_token_shard_damage(place, True) == ""


class Killed(BaseException):
    """Stands for a kill: no code catches it."""


@pytest.mark.parametrize(
    "at",
    [
        "rewrite_shard_without_rows",
        "write_token_shard",
        "rename_into_place",
        "remove_path",
        "make_backup",
        "record_event 1",
        "record_event 2",
    ],
)
def test_an_erasure_killed_anywhere_is_finished_by_the_next_pass(
    copied: Copy, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace, ledger = copied()
    keys = chosen(ledger)
    erase(ledger, keys)
    name, _, which = at.partition(" ")
    real, calls = getattr(erasing, name), []

    def killed(*values: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == int(which or 1):
            raise Killed
        return real(*values, **named)

    monkeypatch.setattr(erasing, name, killed)
    with pytest.raises(Killed):
        finish_pending_removals(Plant(workspace, ledger))
    monkeypatch.setattr(erasing, name, real)
    update_inbox(Plant(workspace, ledger), settle_seconds=0)  # the daemon's pass looks at filed shards too
    assert list(workspace.inbox.iterdir()) == []
    finish_pending_removals(Plant(workspace, ledger))
    ended = state(workspace, ledger)
    shutil.rmtree(workspace.root)
    workspace, ledger = copied()
    erase(ledger, keys)
    finish_pending_removals(Plant(workspace, ledger))
    assert ended == state(workspace, ledger)


def test_a_kill_in_a_second_erasure_leaves_no_text_of_the_first(copied: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token shard that replaced another in the first erasure has the text of the second erasure."""
    workspace, ledger = copied()
    keys = chosen(ledger)
    before, shard = raw_lines(workspace), keys[0].partition(":")[0]
    for key in keys[:2]:
        erase(ledger, [key])
        if key == keys[1]:
            for name in ("rename_into_place", "remove_path"):
                real = getattr(erasing, name)
                monkeypatch.setattr(erasing, name, _die)
                with pytest.raises(Killed):
                    finish_pending_removals(Plant(workspace, ledger))
                monkeypatch.setattr(erasing, name, real)
                update_inbox(Plant(workspace, ledger), settle_seconds=0)
                assert list(workspace.inbox.iterdir()) == []
        said = finish_pending_removals(Plant(workspace, ledger))[-1:]
        assert the(said, "erasing.done").data["rows"] == 1
    named = {Path(row["path"]).name for row in ledger.read("SELECT path FROM token_shards")}
    assert {path.parent.name for path in workspace.shards.glob("*/tokens.bin")} == named
    (name,) = (name for name in before if name.startswith(shard))
    gone = [text_of(json.loads(before[name][int(key.partition(":")[2])])) for key in keys[:2]]
    assert not any(text in readable(workspace, ledger) for text in gone)


def _die(*_: Any) -> None:
    raise Killed


def test_an_erasure_waits_for_a_planned_segment_that_reads_the_text(copied: Copy) -> None:
    workspace, ledger = copied()
    number = plan_trunk(Plant(workspace, ledger), 5)
    before = raw_lines(workspace)
    run = partial(command_here, home=workspace)
    done = run("data", "remove", "--document", chosen(ledger)[0], "--erase", "--yes")
    assert "segments 1, 2, 3, 4 can no longer" in done.stdout, done.output
    assert f"segment {number} still reads the text" in done.stdout
    assert raw_lines(workspace) == before and "still has to erase the text" in run("status").stdout
    run_segment(Plant(workspace, ledger), number)
    assert the(finish_pending_removals(Plant(workspace, ledger)), "erasing.done").data == {"removal": 1, "rows": 1}


ROWS = [{"id": str(n), "text": f"the text number {n}"} for n in range(7)]
LINES = (
    b"".join(json.dumps(row).encode() + b"\n" for row in ROWS[:3])
    + b"\n"
    + b"\n".join(json.dumps(row).encode() for row in ROWS[3:])
)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.md"])
def test_erasing_rows_of_any_kind_of_shard_keeps_the_other_rows(tmp_path: Path, name: str) -> None:
    path, target = tmp_path / name, tmp_path / f"again-{name}"
    if name.endswith(".parquet"):
        fixed = pa.schema([pa.field("id", pa.string(), nullable=False), pa.field("text", pa.string())])
        pq.write_table(pa.Table.from_pylist(ROWS, schema=fixed), path, row_group_size=3)
    elif name.endswith(".gz"):
        path.write_bytes(gzip.compress(LINES))
    elif name.endswith(".zst"):
        with pa.CompressedOutputStream(pa.OSFile(str(path), "wb"), "zstd") as out:
            out.write(LINES)
    else:
        path.write_bytes(LINES)
    rows = {0} if name.endswith(".md") else {1, 5}
    rewrite_shard_without_rows(path, name, rows, target)
    if name.endswith(".md"):
        assert target.read_bytes() == b""
        return
    before, after = list(read_rows(path, ShardLimits())), list(read_rows(target, ShardLimits()))
    assert {n for n, (a, b) in enumerate(zip(before, after, strict=True)) if a != b} == rows
    assert all(after[n] in (b'{"erased": true}', {"id": None, "text": None}) for n in rows)
    again = tmp_path / f"twice-{name}"
    rewrite_shard_without_rows(target, name, rows, again)
    assert again.read_bytes() == target.read_bytes()
