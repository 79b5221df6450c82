"""Converts some files into shards of JSON lines before they are ingested: archives, tables, pages, data sets on disk, and files too large for
one shard. Many small files become one shard.

    docs.zip (a.csv, b.md)      ─►  docs.zip#1.jsonl.zst, docs.zip#2.jsonl.zst …  ─►  each an ingest of its own  ─►  shards/raw/

A part holds the rows as they were read: at most ``limits.max_rows`` rows and about ``limits.part_bytes`` bytes. Whatever format the rows came
in, they can therefore be read again, or be written again without one of them. Each part is one transaction. After a kill the finished parts
stay, and the next ingest reads their rows again but does not analyse them. If the data policy or the reading code has changed, the next ingest
begins at the first row and drops known rows as copies.

A large file is cut into parts because one transaction over hours would be lost to a kill. Each part must be a whole shard: ingest decides
duplicates, the held-out split and contamination over a whole shard, with the ledger as it is at that moment.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from factory.core.errors import InputError
from factory.ingest.chain import (
    ShardReport,
    find_finished_report,
    find_unreadable_rows_problem,
    ingest_shard,
    quarantine_shard,
    read_shard_report,
)
from factory.ingest.document import Row, parse_json
from factory.ingest.filing import move_ingested_file
from factory.ingest.policy_and_code_hash import compute_policy_and_code_hash
from factory.ingest.readers import RawRow, ShardProblem, exceeds_one_shard, is_ingested_without_conversion, read_rows
from factory.ingest.reading.columns import list_dataset_files
from factory.ingest.reading.rows import BadRow, add_path, format_row_as_line
from factory.ingest.reading.streams import make_unreadable_file_error
from factory.ingest.rules.policy import DataPolicy, ShardLimits
from factory.ingest.shapes.row_counts import RowCounts, find_missing_columns
from factory.ingest.worker import count_row_columns, read_row
from factory.ledger.file_events import PACKED, list_shards_made_from
from factory.ledger.ledger import Ledger, record_event
from factory.ledger.plant import Plant
from factory.ledger.removals import read_erased_shards
from kernels.contract.files import sync_folder
from kernels.contract.message import Message
from trainer.contract.data.token_shard import hash_file

SMALL_BYTES = 256 << 10  # a file of fewer bytes is small
MANY = 32  # at least this many small files are ingested as one shard
_NAMED = 4  # a message names at most this many reasons for leaving files out


@dataclass(frozen=True)
class FileGroup:
    """Files that are converted together into shards of JSON lines. ``files`` are pairs (path that the rows name, file), in the order of the rows.
    The path is '' for a file that is ingested alone."""

    name: str
    files: list[tuple[str, Path]]
    folder: Path | None = None  # the folder of a data set on disk
    domain: str = ""  # of every row, in place of its own; '': the row's own

    @classmethod
    def of_file(cls, path: Path) -> FileGroup:
        return cls(path.name, [("", path)])

    @classmethod
    def of_dataset(cls, folder: Path) -> FileGroup:
        """Return the file group of a data set on disk. Raises: ShardProblem."""
        return cls(folder.name, [(str(file.relative_to(folder)), file) for file in list_dataset_files(folder)], folder)

    def split_off_refused_files(self, policy: DataPolicy) -> tuple[FileGroup, list[Path]]:
        """Return (the group without the files that lack a mapped column, those files). Each of those files is then refused alone."""
        refused = [path for name, path in self.files if policy.fields and _lacks_columns(name, path, self.name, policy)]
        return replace(self, files=[one for one in self.files if one[1] not in refused]), refused

    def split_off_bad_files(self, policy: DataPolicy) -> tuple[FileGroup, dict[str, ShardProblem]]:
        """Return (the group without the files that would be quarantined if each came alone, the reason for each such file by path)."""
        bad = {name: why for name, path in self.files if (why := _unusable(name, path, self.name, policy))}
        return replace(self, files=[one for one in self.files if one[0] not in bad]), bad

    @property
    def single_file(self) -> Path | None:
        """The file if the group is one file, else None."""
        return self.files[0][1] if not self.files[0][0] else None

    @property
    def origin(self) -> str:
        return str((self.folder or self.single_file or _common(self.files)).resolve())

    def compute_sha256(self) -> str:
        """Return the hash of the one file, or of the paths and contents of several files. Raises: InputError."""
        try:
            if self.single_file and not self.domain:
                return hash_file(self.single_file)
            digest = hashlib.sha256(f"domain {self.domain}\n".encode() if self.domain else b"")
            for name, path in self.files:
                digest.update(f"{hash_file(path)} {name}\n".encode())
            return digest.hexdigest()
        except OSError as error:
            raise make_unreadable_file_error(error.filename or self.name, error) from error


@dataclass
class _LeftOut:
    """Counts the files and archive members that are not read. ``reasons`` counts them by reason. ``first`` has, by reason, the path of the first one.
    ``files`` are the files of a group of which nothing is read."""

    reasons: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)
    files: set[Path] = field(default_factory=set)

    def __call__(self, path: str, why: Message) -> None:
        if why.code == "ingest.unknown_kind":  # this message names the file, so each file would count as another reason
            why = Message("ingest.kinds_not_read", "files of this type are not supported")
        self.reasons[why] += 1
        self.first.setdefault(why, path)

    def describe(self, pack: str) -> Message | None:
        """Return a line about what was left out of the group with this name, or None if everything was read.

        >>> left = _LeftOut()
        >>> left("a.png", Message("ingest.unknown_kind", "files of …")), left("b", Message("reading.encrypted", "it is encrypted"))
        (None, None)
        >>> left.describe("x.zip")
        '  x.zip: 2 parts were not ingested: 1 because files of this type are not supported (a.png), 1 because it is encrypted (b)'
        """
        if not self.reasons:
            return None
        named = [
            f"{count:,} because {why}"
            + (f" ({self.first[why]}{', …' if count > 1 else ''})" if self.first[why] else "")
            for why, count in self.reasons.most_common(_NAMED)
        ]
        more = ["…"] if len(self.reasons) > _NAMED else []
        return Message(
            "ingest.left_out",
            "  {pack}: {count:,|part was|parts were} not ingested: {reasons}",
            pack=pack,
            count=self.reasons.total(),
            reasons=named + more,
        )


def is_cut_into_parts(path: Path, limits: ShardLimits) -> bool:
    """Return whether a file is cut into parts, or converted to JSON lines, before it is ingested. Raises: OSError."""
    return path.stat().st_size > 0 and (
        not is_ingested_without_conversion(path, limits) or exceeds_one_shard(path, limits)
    )


def ingest_file_group(
    plant: Plant,
    group: FileGroup,
    *,
    again: bool = False,
    workers: int | None = None,
    ingested: Callable[[ShardReport], object] = lambda report: None,
    other_files: Sequence[Path] = (),
    unread: set[Path] | None = None,
) -> list[ShardReport]:
    """Ingest the rows of a file group, part by part. ``ingested`` is called with the report of each part. The files stay where they are.

    A file that cannot be read to its end is quarantined. Its parts before the error stay, and the last report is about the file. If some files of
    a group spoil a part, the files that would be quarantined if they came alone are left out. The files of which nothing was read are added to
    ``unread``.

    Raises: the errors of ``ingest_shard``; InputError if nothing of a folder or of many files can be read, or if a file changed during the ingest.
    """
    policy = DataPolicy.load(plant.workspace.policy_path("data.yaml"))
    limits, together = policy.limits, group.single_file is None and group.folder is None
    before = _stamps(group)
    sha256 = group.compute_sha256()
    parts = list_shards_made_from(plant.ledger, sha256)
    key = compute_policy_and_code_hash(plant.workspace)
    if group.single_file and (known := find_finished_report(plant, group.single_file, sha256, again)):
        ingested(known)
        return [known]
    done = [] if again else _finished(parts, key, plant.ledger)
    if done and done[-1]["last"]:
        reports = [one for part in done if (one := read_shard_report(plant.ledger, part["shard"]))]
        if not together or all(one.state == "ingested" for one in reports):
            for one in reports:
                ingested(one)
            return reports
        done = []
    reports = []
    left = _LeftOut(files=set() if unread is None else unread)
    folder = plant.workspace.shards / ".packing"
    shutil.rmtree(folder, ignore_errors=True)  # files of a run that was killed
    try:
        folder.mkdir(parents=True)
        skip = sum(part["rows"] for part in done)
        if done:
            plant.progress.line(
                Message(
                    "ingest.continues",
                    "  {pack}: {parts:,|part is|parts are} ingested already, with {rows:,|row|rows}. Ingest continues after "
                    "these rows",
                    pack=group.name,
                    parts=len(done),
                    rows=skip,
                )
            )
        for part in _parts(read_file_group_rows(group, limits, left), folder, group.name, limits, len(done), skip):
            _refuse_changed(group, before)
            whole = None if part.first == 0 and part.last else lambda: read_file_group_rows(group, limits)
            how: dict[str, Any] = {"again": again, "workers": workers, "other_files": other_files, "whole": whole}
            how["quarantines"] = not together
            one = ingest_shard(plant, part.path, **how)
            if together and one.state == "quarantined":  # an older version of the factory quarantined it
                raise ShardProblem(str(one.reason))
            ingested(one)
            _file(plant, part.path, one)
            detail = {
                "sha256": sha256, "name": group.name, "origin": group.origin, "files": len(group.files), "part": part.number,
                "first": part.first, "rows": part.rows, "shard": one.sha256, "last": part.last, "read_by": key,
                "left_out": dict(left.reasons.most_common(_NAMED)) if part.last else {},
            }  # fmt: skip
            with plant.ledger.begin() as tx:
                record_event(tx, PACKED, f"file:{sha256[:16]}", detail)
            reports.append(one)
        if not reports and not done:
            why = next(iter(left.reasons), Message("ingest.pack_empty", "the file is empty"))
            raise ShardProblem("ingest.pack_unread", "no part of the file can be read: {why}", why=why)
    except ShardProblem as problem:
        _refuse_changed(group, before)
        rest, bad = group.split_off_bad_files(policy) if together else (group, {})
        if bad and rest.files:
            spoilt = _LeftOut()
            for name, path in group.files:
                if name in bad:
                    spoilt(
                        name, Message("ingest.unusable_file", "the file cannot be used: {why}", why=bad[name].message)
                    )
                    left.files.add(path)
            if line := spoilt.describe(group.name):
                plant.progress.line(line)
            how = {
                "again": again,
                "workers": workers,
                "ingested": ingested,
                "other_files": other_files,
                "unread": left.files,
            }
            return [*reports, *ingest_file_group(plant, rest, **how)]
        stored = [*done, *reports]
        if stored:
            rows = sum(part["rows"] for part in done) + sum(one.rows for one in reports)
            problem = ShardProblem(
                "ingest.partly",
                "{why}. {before:,|row|rows} before the error became {parts:,|shard|shards}",
                why=problem.message,
                before=rows,
                parts=len(stored),
            )
        if group.single_file is None:
            raise InputError("ingest.pack", "{pack}: {why}", pack=group.name, why=problem.message) from problem
        one = quarantine_shard(plant, group.single_file, sha256, problem)
        ingested(one)
        reports.append(one)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if line := left.describe(group.name):
        plant.progress.line(line)
    return reports


def _finished(parts: Sequence[dict[str, Any]], key: str, ledger: Ledger) -> list[dict[str, Any]]:
    """Return the parts that need no further ingest, from the first part on. If a run read the whole file, these are all parts of the newest such
    run, else the parts that were read with the current policy and code."""
    runs: list[list[dict[str, Any]]] = []
    for part in parts:
        if part["part"] == 1 or not runs:
            runs.append([])
        runs[-1].append(part)
    for run in reversed(runs):
        if run[-1]["last"] and all(read_shard_report(ledger, part["shard"]) for part in run):
            return run
    same = runs[-1] if runs and all(part["read_by"] == key for part in runs[-1]) else []
    return list(itertools.takewhile(lambda part: read_shard_report(ledger, part["shard"]), same))


def _file(plant: Plant, path: Path, one: ShardReport) -> None:
    if one.sha256 in read_erased_shards(plant.ledger):
        path.unlink()  # keeping it would restore erased text
    else:
        sync_folder(path)  # the file that was converted may be deleted next
        move_ingested_file(plant, path, one.sha256, one.state)


def read_file_group_rows(group: FileGroup, limits: ShardLimits, left_out: _LeftOut | None = None) -> Iterator[RawRow]:
    """Yield all rows of a file group, in order. ``left_out`` counts what is not read. Raises: ShardProblem, except for one of many small files."""
    left_out = left_out or _LeftOut()
    rows = _read_rows_as_they_are(group, limits, left_out)
    yield from (_set_domain(row, group.domain) for row in rows) if group.domain else rows


def _set_domain(row: RawRow, domain: str) -> RawRow:
    """Return the row with this domain. A row that is no JSON object stays as it is, and a later check drops it."""
    if isinstance(row, bytes):
        try:
            row = parse_json(row)
        except BadRow as bad:
            return bad
    return {**row, "domain": domain} if isinstance(row, dict) else row


def _read_rows_as_they_are(group: FileGroup, limits: ShardLimits, left_out: _LeftOut) -> Iterator[RawRow]:
    if group.single_file:
        yield from read_rows(group.single_file, limits, left_out)
        return
    if group.folder:
        yield from read_rows(group.folder, limits, left_out)
        return
    for name, path in group.files:
        try:
            found = [add_path(row, name) for row in read_rows(path, limits, left_out, name)]
        except ShardProblem as problem:
            left_out(name, Message.from_json(problem.message))
            left_out.files.add(path)
            continue
        yield from found


def _lacks_columns(name: str, path: Path, pack: str, policy: DataPolicy) -> bool:
    told = RowCounts()
    with contextlib.suppress(ShardProblem):  # reported when the pack is read
        for row in read_rows(path, policy.limits, lambda path, why: None, name):
            count_row_columns(policy, add_path(row, name), pack, told)
            if told.mapped and not find_missing_columns(told, policy.fields):
                break
    return bool(find_missing_columns(told, policy.fields))


def _unusable(name: str, path: Path, pack: str, policy: DataPolicy) -> ShardProblem | None:
    rows: list[Row] = []
    try:
        for raw in read_rows(path, policy.limits, lambda path, why: None, name):
            rows.append(row := Row(len(rows), str(len(rows)), "", "unknown"))
            try:
                read_row(policy, row, add_path(raw, name), pack, RowCounts())
            except BadRow as bad:
                row.drop(bad.rule, bad.detail)
    except ShardProblem:  # reported when the pack is read
        return None
    return find_unreadable_rows_problem(rows, policy.limits.max_bad_rows)


@dataclass(frozen=True)
class _Part:
    path: Path
    number: int
    first: int
    rows: int
    last: bool


def _parts(
    rows: Iterator[RawRow], folder: Path, name: str, limits: ShardLimits, number: int, skip: int
) -> Iterator[_Part]:
    """Write the rows into files, one part at a time. The same rows give the same bytes. ``number`` parts with ``skip`` rows are already done."""
    first = skip
    ahead = next(itertools.islice(rows, skip, None), None)
    while ahead is not None:
        number += 1
        path = folder / f"{name}#{number}.jsonl.zst"
        count = size = 0
        with pa.CompressedOutputStream(pa.OSFile(str(path), "wb"), "zstd") as out:
            while ahead is not None and count < limits.max_rows and size < limits.part_bytes:
                line = format_row_as_line(ahead) + b"\n"
                out.write(line)
                count, size, ahead = count + 1, size + len(line), next(rows, None)
        yield _Part(path, number, first, count, ahead is None)
        first += count


def _stamps(pack: FileGroup) -> list[tuple[int, int, int]]:
    try:
        found = [path.stat() for _, path in pack.files]
    except OSError as error:
        raise make_unreadable_file_error(error.filename, error) from error
    return [(one.st_size, one.st_mtime_ns, one.st_ino) for one in found]


def _refuse_changed(pack: FileGroup, before: list[tuple[int, int, int]]) -> None:
    now = _stamps(pack)
    for (_, path), was, is_now in zip(pack.files, before, now, strict=True):
        if was != is_now:
            raise InputError(
                "ingest.packed_file_changed",
                "{path} changed during the ingest. Ingest the file again when it is complete",
                path=path,
            )


def _common(files: Sequence[tuple[str, Path]]) -> Path:
    return files[0][1].parent
