"""Overwrites the text of removed documents: in the workspace's raw shards, in token shards, and among the held-out documents.

    held-out contents ─► each shard: new files beside the old ─► one transaction records their places ─► files renamed, old files removed ─► backup

In a token shard, each token of an erased document becomes an end token, and the loss mask stays. So cursors, the data order and the places of all
other documents stay the same. The token shard keeps its name in the ledger and in plans; the new files have another name (``content``). The raw shard
keeps the numbers of its rows. So the factory can make each of the two again from the records of the other. After a kill, the next pass repeats the
work.
"""

from __future__ import annotations

import gzip
import io
import shutil
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import sqlalchemy as sa

from factory.backups.backups import make_backup
from factory.core.path_removal import remove_path
from factory.core.workspace import Workspace
from factory.data.removing import mark_releases_trained_on_removed_documents
from factory.data.selecting import DocumentSelection
from factory.ingest.filing import remove_originals
from factory.ingest.reading.file_kinds import detect_kind
from factory.ledger.file_events import SHARD_FILED, list_sources_of_shard, read_shard_locations
from factory.ledger.journal import list_backups
from factory.ledger.ledger import Ledger, documents, held_out, record_event, shards, token_shards
from factory.ledger.plant import Plant
from factory.ledger.removals import (
    ERASED,
    REMOVABLE_FATES,
    REMOVED_FATE,
    SHARD_ERASED,
    Removal,
    list_former_file_hashes,
    list_former_token_shard_names,
    list_removals,
    read_erased_shards,
)
from factory.ledger.rows import SegmentRow, Subject
from factory.repairs.token_shards import find_raw_shard
from factory.sandbox.linked_mounts import remove_unused_links
from factory.training.planning import read_data_plan
from kernels.contract.files import rename_into_place, sync_folder
from kernels.contract.message import Message
from trainer.contract.data.token_shard import TokenizedDocument, TokenShard, hash_file, write_token_shard

c = documents.c


def list_erasure_consequences(plant: Plant, selection: DocumentSelection) -> list[str]:
    """Return lines for a person about the consequences of erasing the text of these documents."""
    held = {
        shard
        for part in selection.build_batched_sql_conditions()
        for (shard,) in _select(plant.ledger, [c.token_shard], part, c.token_shard.is_not(None))
    }
    read = [
        row.id
        for row in SegmentRow.select(plant.ledger)
        if held & {shard["id"] for shard in read_data_plan(plant.ledger, row)["token_shards"]}
    ]
    said: list[str] = [
        Message(
            "erasing.for_good",
            "the text of the documents is overwritten and cannot be restored. Their hashes stay, so that ingest recognises copies",
        )
    ]
    if read:
        said.append(
            Message(
                "erasing.segments",
                "segments {segments} can no longer be replayed, so audits, diagnoses and the repair of a lost checkpoint are not "
                "possible. The metrics, checkpoints and exports of these segments stay",
                segments=read,
            )
        )
    if any(
        _select(plant.ledger, [c.key], part, c.fate == "held_out") for part in selection.build_batched_sql_conditions()
    ):
        said.append(
            Message(
                "erasing.evaluations",
                "evaluations on the held-out documents can no longer be reproduced. Reports and MLflow may still quote answers about "
                "these documents",
            )
        )
    for sha256 in _shards_of(plant.ledger, selection):
        path, _ = find_raw_shard(plant, sha256)
        if path is not None and not path.is_relative_to(plant.workspace.root):
            said.append(_outside(path))
        for origin in sorted({one["origin"] for one in list_sources_of_shard(plant.ledger, sha256)}):
            if Path(origin).exists() and not Path(origin).is_relative_to(plant.workspace.root):
                said.append(_outside(origin))
    if made := [path.name for path in list_backups(plant.workspace.root)]:
        said.append(
            Message(
                "erasing.backups",
                "these backups keep the text of the held-out documents until you delete the backups: {backups}",
                backups=made,
            )
        )
    return said


def _outside(path: Path | str) -> Message:
    return Message(
        "erasing.outside",
        "{path} is your own file outside the workspace: remove the documents from it yourself",
        path=path,
    )


def finish_pending_removals(plant: Plant) -> list[str]:
    """Mark the releases made since each removal, and erase the text of removals that ask for it. Returns lines for a person.

    The caller holds the model loop's lock.
    """
    said = mark_releases_trained_on_removed_documents(plant.ledger)
    pending = [one for one in list_removals(plant.ledger) if one.erase and one.state == "removed"]
    for removal in pending:
        if waits := _reader(plant.ledger, removal):
            said.append(
                Message(
                    "erasing.waits",
                    "removal {removal}: segment {segment} still reads the text. The factory erases the text when the segment is done",
                    removal=removal.number,
                    segment=waits,
                )
            )
            continue
        said += _erase(plant, removal)
    for line in said:
        plant.progress.line(Message("erasing.line", "  {line}", line=line))
    return said


def _erase(plant: Plant, removal: Removal) -> list[str]:
    said = []
    for left in plant.workspace.shards.glob(".writing-*"):  # of a run that was killed
        remove_path(left)
    remove_unused_links(plant.workspace.shards)
    with plant.ledger.begin() as tx:
        rows = sa.select(c.key).where(c.rule == removal.make_removal_rule_name("held_out"))
        tx.execute(held_out.delete().where(held_out.c.key.in_(rows)))
    everything = sorted(_rows(plant.ledger, removal))
    for sha256, group in groupby(everything, key=lambda row: row[0]):
        said += _erase_in_shard(plant, sha256, {number for _, number, _ in group})
    if plant.ledger.file:
        make_backup(plant)  # a ledger restored from this backup does not have the erased rows
    with plant.ledger.begin() as tx:
        detail = {"rows": len(everything), "held_out": len(plant.ledger.select_rows(rows))}
        record_event(tx, ERASED, Subject("removal", removal.number), detail)
    done = Message(
        "erasing.done",
        "removal {removal}: the text of {rows:,|row|rows} is erased",
        removal=removal.number,
        rows=len(everything),
    )
    return [*said, done]


def _erase_in_shard(plant: Plant, sha256: str, rows: set[int]) -> list[str]:
    """Erase the text of these rows of a shard. Rows that were erased before are erased again."""
    before = read_erased_shards(plant.ledger).get(sha256)
    rows |= set(before["rows"]) if before else set()
    listed = plant.ledger.read("SELECT id, path FROM token_shards WHERE shard = :shard", shard=sha256)
    keys = {f"{sha256[:16]}:{row}" for row in rows}
    detail: dict[str, Any] = {
        "sha256": sha256,
        "rows": sorted(rows),
        "raw": before["raw"] if before else None,
        "token_shards": {},
    }
    with plant.progress.task(
        Message("erasing.task", "erase {rows:,|row|rows} of shard {shard}", rows=len(rows), shard=sha256[:16])
    ):
        made: list[tuple[str, Path, TokenShard]] = []
        for row in listed:
            old = TokenShard(row["path"])
            if keys & set(old.documents["key"].to_pylist()):
                new = _overwritten(plant.workspace, old, keys)
                made.append((row["id"], Path(row["path"]), new))
                masks = {
                    key: _runs(old, at) for key, at in _places(old, keys) if at["supervised_tokens"] != at["length"]
                }
                labels = {key: [at[name] for name in ("domain", "source", "license")] for key, at in _places(old, keys)}
                about = {"content": new.id, "fill": _fill(old), "masks": masks, "labels": labels}
                detail["token_shards"][row["id"]] = about
        raw, name = find_raw_shard(plant, sha256)
        aside, filing, said = _raw_without(plant, sha256, raw, name, rows)
        if aside is not None:
            detail["raw"] = hash_file(aside)
        with plant.ledger.begin() as tx:
            for number, _, new in made:
                tx.execute(
                    token_shards.update()
                    .where(token_shards.c.id == number)
                    .values(path=plant.ledger.to_stored_path(new.path))
                )
            record_event(tx, SHARD_ERASED, f"shard:{sha256[:16]}", detail)
            if filing:
                record_event(tx, SHARD_FILED, f"shard:{sha256[:16]}", filing)
        if aside is not None and raw is not None:
            rename_into_place(aside, raw)
        said += remove_originals(plant, sha256)
        former = list_former_token_shard_names(
            plant.ledger, sha256
        )  # also of an earlier run that was killed at this point
        for number, old_path, new in made:
            for path in {old_path, *(plant.workspace.shards / name for name in (number, *former))} - {new.path}:
                remove_path(path)
        sync_folder(plant.workspace.shards)  # before the ledger records that the text is gone
    return said


def _raw_without(
    plant: Plant,
    sha256: str,
    raw: Path | None,
    name: str,
    rows: Collection[int],
) -> tuple[Path | None, dict[str, Any] | None, list[str]]:
    """Return (the new raw shard without these rows, beside the old one; the event for ``filing``; lines for a person)."""
    if raw is None:
        return (
            None,
            None,
            [
                Message(
                    "erasing.gone",
                    "the raw shard {shard} no longer exists, so the factory erased nothing in it",
                    shard=name,
                )
            ],
        )
    if not raw.is_relative_to(plant.workspace.root):
        outside = Message(
            "erasing.not_ours",
            "the raw shard {shard} is outside the workspace, at {path}, so the factory erased nothing in this file",
            shard=name,
            path=raw,
        )
        return None, None, [outside]
    if hash_file(raw) not in {sha256, *list_former_file_hashes(plant.ledger, sha256)}:
        other = Message(
            "erasing.other_file",
            "{path} is not the file that was ingested, so the factory erased nothing in this file",
            path=raw,
        )
        return None, None, [other]
    aside = raw.with_name(f".{raw.name}.erased")
    rewrite_shard_without_rows(raw, name, rows, aside)
    shutil.copymode(raw, aside)
    known = read_shard_locations(plant.ledger).get((str(raw.parent.relative_to(plant.workspace.root)), raw.name))
    status = aside.stat()
    return aside, known and known | {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns}, []


def _overwritten(workspace: Workspace, old: TokenShard, keys: Collection[str]) -> TokenShard:
    """Write a token shard in which the documents ``keys`` consist of end tokens. Returns the same token shard if they already do."""

    def each() -> Iterator[TokenizedDocument]:
        for row in old.documents.to_pylist():
            first, last = row["start"], row["start"] + row["length"]
            tokens = np.asarray(old.tokens[first:last]).astype(np.uint32)
            if row["key"] in keys:
                tokens[:] = _fill(old)
            mask = old.read_loss_mask(first, last)
            yield TokenizedDocument(row["key"], row["id"], row["domain"], row["source"], row["license"], tokens, mask)

    manifest = old.manifest
    return write_token_shard(
        workspace.shards, each(), vocab_size=manifest["vocab_size"], tokenizer_sha256=manifest["tokenizer_sha256"]
    )


def _fill(shard: TokenShard) -> int:
    """Return the end token: the last token of every document."""
    return int(shard.tokens[-1])


def _places(shard: TokenShard, keys: Collection[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield from ((row["key"], row) for row in shard.documents.to_pylist() if row["key"] in keys)


def _runs(shard: TokenShard, row: dict[str, Any]) -> list[int]:
    """Return a document's loss mask as the lengths of its runs. The first run has no loss.

    With these lengths, a damaged token shard can be made again, although its erased text no longer determines the mask.
    """
    mask = shard.read_loss_mask(row["start"], row["start"] + row["length"])
    ends = np.flatnonzero(np.diff(np.concatenate([[False], mask, [not mask[-1]]])))
    return [int(n) for n in np.diff(np.concatenate([[0], ends]))]


def _rows(ledger: Ledger, removal: Removal) -> set[tuple[str, int, str]]:
    """Return (shard, row, key) of all rows of a removal: its documents, rows dropped as copies of them, and dropped rows of its source or licence."""
    rules = [removal.make_removal_rule_name(fate) for fate in REMOVABLE_FATES]
    mine = sa.select(c.key).where(c.fate == REMOVED_FATE, c.rule.in_(rules))
    found = [c.rule.in_(rules), sa.and_(c.fate == "dropped", c.matched.in_(mine))]
    chosen = DocumentSelection(removal.column, tuple(removal.names))
    early = sa.select(shards.c.sha256).where(shards.c.ingested_at <= removal.at)
    found += [sa.and_(c.fate == "dropped", c.shard.in_(early), part) for part in chosen.build_batched_sql_conditions()]
    return {(shard, row, key) for part in found for shard, row, key in _select(ledger, [c.shard, c.row, c.key], part)}


def _reader(ledger: Ledger, removal: Removal) -> int | None:
    """Return the planned segment that reads a token shard of the removal; None if there is none."""
    held = set(removal.token_shards)
    for row in SegmentRow.select(ledger, "WHERE state = 'planned' ORDER BY id"):
        if held & {shard["id"] for shard in read_data_plan(ledger, row)["token_shards"]}:
            return row.id
    return None


def _shards_of(ledger: Ledger, selection: DocumentSelection) -> list[str]:
    return sorted(
        {shard for part in selection.build_batched_sql_conditions() for (shard,) in _select(ledger, [c.shard], part)}
    )


def _select(ledger: Ledger, columns: list[Any], *where: Any) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in ledger.select_rows(sa.select(*columns).where(*where).distinct())]


ROW = b'{"erased": true}'  # replaces an erased line


def rewrite_shard_without_rows(path: Path, name: str, rows: Collection[int], target: Path) -> None:
    """Write the raw shard ``path``, which arrived as ``name``, to ``target`` without the content of these rows.

    Raises: OSError; pyarrow.ArrowException for a damaged file.
    """
    kind, compression = detect_kind(name)
    if kind in (".jsonl", ".ndjson", ".json"):
        _lines(path, compression, rows, target)
    elif kind == ".parquet":
        _parquet(path, rows, target)
    else:  # the file is one document
        target.write_bytes(b"" if rows else path.read_bytes())


def _lines(path: Path, compression: str, rows: Collection[int], target: Path) -> None:
    with ExitStack() as opened:
        source: IO[bytes]
        out: Any
        if compression == "gzip":
            source = cast(IO[bytes], opened.enter_context(gzip.open(path, "rb")))
            made = opened.enter_context(open(target, "wb"))
            out = opened.enter_context(gzip.GzipFile("", "wb", fileobj=made, mtime=0))  # the same bytes each time
        elif compression == "zstd":
            source = opened.enter_context(pa.CompressedInputStream(pa.OSFile(str(path)), "zstd"))
            out = opened.enter_context(pa.CompressedOutputStream(pa.OSFile(str(target), "wb"), "zstd"))
        else:
            source = opened.enter_context(open(path, "rb"))
            out = opened.enter_context(open(target, "wb"))
        for number, line in enumerate(io.BufferedReader(source) if compression == "zstd" else source):  # type: ignore[type-var]
            out.write(ROW + b"\n" * line.endswith(b"\n") if number in rows else line)


def _parquet(path: Path, rows: Collection[int], target: Path) -> None:
    with pq.ParquetFile(path) as file:
        schema = pa.schema([field.with_nullable(True) for field in file.schema_arrow])
        with pq.ParquetWriter(target, schema) as out:
            number = 0
            for group in range(file.num_row_groups):
                table = file.read_row_group(group)
                keep = pa.array([number + row not in rows for row in range(table.num_rows)])
                number += table.num_rows
                blank = [pa.nulls(table.num_rows, field.type) for field in schema]
                columns = [
                    pa.chunked_array([pc.if_else(keep, column.combine_chunks(), nothing)])
                    for column, nothing in zip(table.columns, blank, strict=True)
                ]
                out.write_table(pa.table(columns, schema=schema))
