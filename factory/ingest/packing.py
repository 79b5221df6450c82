"""Files that become shards of JSON lines before they are ingested: archives, tables, pages, data sets on disk, files too large for one shard,
and many small files, which are one shard.

    docs.zip (a.csv, b.md)      ─►  docs.zip#1.jsonl.zst, docs.zip#2.jsonl.zst …  ─►  each an ingest of its own  ─►  shards/raw/

A part holds the rows as they were read, at most ``limits.max_rows`` of them and about ``limits.part_bytes`` bytes, so that what was ingested can
be read again, or written again without a row, whatever it came in. Each part is a transaction: of a file whose ingest was killed the finished
parts stay, and its next ingest reads over their rows (the reading, not the analysis, is done again). That holds while the data policy and the code
that reads are the same: with others it begins at the first row, and what is known by then is dropped as a copy.

Parts of one large file, and not a spool of analysed chunks that a next run takes up: duplicates, the held-out split and contamination are decided
over a whole shard, with the ledger as it is at that moment, and one transaction over hours is one that a kill undoes.
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
from factory.ingest.chain import ShardReport, ingest_shard, mostly_bad, quarantine, report, settled
from factory.ingest.document import Row
from factory.ingest.filing import file_away
from factory.ingest.readers import RawRow, ShardProblem, is_longer, is_shard, read_rows
from factory.ingest.reading.columns import dataset_files
from factory.ingest.reading.rows import BadRow, as_line, with_path
from factory.ingest.reading_code import reading_key
from factory.ingest.rules.policy import DataPolicy, ShardLimits
from factory.ingest.shapes.told import Told, missing_columns
from factory.ingest.worker import look_at, read_row
from factory.ledger.files import PACKED, packed
from factory.ledger.ledger import Ledger, record
from factory.ledger.plant import Plant
from factory.ledger.removals import erased_shards
from kernels.contract.files import sync_folder
from trainer.contract.data.token_shard import file_sha256

SMALL_BYTES = 256 << 10  # a file of fewer bytes is small
MANY = 32  # small files from which they are ingested as one shard
_NAMED = 4  # reasons, of what was left out, that are said


@dataclass(frozen=True)
class Pack:
    """``files``: by the path that their rows name ('': none, of a file that is ingested alone), in the order of their rows."""

    name: str
    files: list[tuple[str, Path]]
    folder: Path | None = None  # of a data set on disk

    @classmethod
    def of_file(cls, path: Path) -> Pack:
        return cls(path.name, [("", path)])

    @classmethod
    def of_dataset(cls, folder: Path) -> Pack:
        """Raises: ShardProblem."""
        return cls(folder.name, [(str(file.relative_to(folder)), file) for file in dataset_files(folder)], folder)

    def without_refused(self, policy: DataPolicy) -> tuple[Pack, list[Path]]:
        """The pack without those of its many files of which a mapping names a column that they lack, and these: each is refused for itself."""
        refused = [path for name, path in self.files if policy.fields and _lacks_columns(name, path, self.name, policy)]
        return replace(self, files=[one for one in self.files if one[1] not in refused]), refused

    def without_bad(self, policy: DataPolicy) -> tuple[Pack, dict[str, ShardProblem]]:
        """The pack without those of its many files that would be quarantined if they came alone, and why each would be, by its path."""
        bad = {name: why for name, path in self.files if (why := _unusable(name, path, self.name, policy))}
        return replace(self, files=[one for one in self.files if one[0] not in bad]), bad

    @property
    def alone(self) -> Path | None:
        """The file, where it is one."""
        return self.files[0][1] if not self.files[0][0] else None

    @property
    def origin(self) -> str:
        return str((self.folder or self.alone or _common(self.files)).resolve())

    def sha256(self) -> str:
        """Of the file; of several, of their paths and contents. Raises: InputError."""
        try:
            if self.alone:
                return file_sha256(self.alone)
            digest = hashlib.sha256()
            for name, path in self.files:
                digest.update(f"{file_sha256(path)} {name}\n".encode())
            return digest.hexdigest()
        except OSError as error:
            raise InputError(f"{error.filename or self.name} cannot be read: {error.strerror}") from error


@dataclass
class _LeftOut:
    """What was not read, by reason."""

    reasons: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)
    files: set[Path] = field(default_factory=set)

    def __call__(self, path: str, why: str) -> None:
        why = why.split(":", 1)[0] if why.startswith("not a kind of file") else why
        self.reasons[why] += 1
        self.first.setdefault(why, path)

    def words(self) -> str:
        """
        >>> left = _LeftOut()
        >>> left("a.png", "not a kind of file that can be ingested: a.png: an image"), left("b", "encrypted")
        (None, None)
        >>> left.words()
        '2 left out: 1 not a kind of file that can be ingested (a.png), 1 encrypted (b)'
        """
        named = [
            f"{count:,} {why}" + (f" ({self.first[why]}{', …' if count > 1 else ''})" if self.first[why] else "")
            for why, count in self.reasons.most_common(_NAMED)
        ]
        more = ["…"] if len(self.reasons) > _NAMED else []
        return f"{self.reasons.total():,} left out: {', '.join(named + more)}" if self.reasons else ""


def is_packed(path: Path, limits: ShardLimits) -> bool:
    """Is a file cut, or written as JSON lines, before it is ingested? Raises: OSError."""
    return path.stat().st_size > 0 and (not is_shard(path, limits) or is_longer(path, limits))


def ingest_pack(
    plant: Plant,
    pack: Pack,
    *,
    again: bool = False,
    workers: int | None = None,
    ingested: Callable[[ShardReport], object] = lambda report: None,
    other_files: Sequence[Path] = (),
    unread: set[Path] | None = None,
) -> list[ShardReport]:
    """Ingest what a pack holds, part by part; ``ingested`` is called with the report of each. What was packed stays where it is.

    A file that cannot be read to its end is quarantined, and its report is the last: the parts before stay. Of many files those that would be
    quarantined if they came alone are left out where they spoil a part. ``unread`` gets those of many files of which nothing was read.

    Raises: as ``ingest_shard``; InputError where nothing of a folder or of many files can be read, or one of them changed meanwhile.
    """
    policy = DataPolicy.load(plant.workspace.policy("data.yaml"))
    limits, together = policy.limits, pack.alone is None and pack.folder is None
    before = _stamps(pack)
    sha256 = pack.sha256()
    parts = packed(plant.ledger, sha256)
    key = reading_key(plant.workspace)
    if pack.alone and (known := settled(plant, pack.alone, sha256, again)):
        ingested(known)
        return [known]
    done = [] if again else _finished(parts, key, plant.ledger)
    if done and done[-1]["last"]:
        reports = [one for part in done if (one := report(plant.ledger, part["shard"]))]
        if not together or all(one.state == "ingested" for one in reports):
            for one in reports:
                ingested(one)
            return reports
        done = []
    reports = []
    left = _LeftOut(files=set() if unread is None else unread)
    folder = plant.workspace.shards / ".packing"
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
    try:
        folder.mkdir(parents=True)
        skip = sum(part["rows"] for part in done)
        if done:
            plant.progress.line(
                f"  {pack.name}: {len(done)} parts of it, {skip:,} rows, are ingested; it goes on from there"
            )
        for part in _parts(rows_of(pack, limits, left), folder, pack.name, limits, len(done), skip):
            _refuse_changed(pack, before)
            whole = None if part.first == 0 and part.last else lambda: rows_of(pack, limits)
            how: dict[str, Any] = {"again": again, "workers": workers, "other_files": other_files, "whole": whole}
            how["quarantines"] = not together
            one = ingest_shard(plant, part.path, **how)
            if together and one.state == "quarantined":  # in a time when such a part was
                raise ShardProblem(str(one.reason))
            ingested(one)
            _file(plant, part.path, one)
            detail = {
                "sha256": sha256, "name": pack.name, "origin": pack.origin, "files": len(pack.files), "part": part.number,
                "first": part.first, "rows": part.rows, "shard": one.sha256, "last": part.last, "read_by": key,
                "left_out": dict(left.reasons.most_common(_NAMED)) if part.last else {},
            }  # fmt: skip
            with plant.ledger.begin() as tx:
                record(tx, PACKED, f"file:{sha256[:16]}", detail)
            reports.append(one)
        if not reports and not done:
            why = next(iter(left.reasons), "it is empty")
            raise ShardProblem(f"nothing in it can be read: {why}")
    except ShardProblem as problem:
        _refuse_changed(pack, before)
        rest, bad = pack.without_bad(policy) if together else (pack, {})
        if bad and rest.files:
            spoilt = _LeftOut()
            for name, path in pack.files:
                if name in bad:
                    spoilt(name, f"unusable, {bad[name]}")
                    left.files.add(path)
            plant.progress.line(f"  {pack.name}: {spoilt.words()}")
            how = {
                "again": again,
                "workers": workers,
                "ingested": ingested,
                "other_files": other_files,
                "unread": left.files,
            }
            return [*reports, *ingest_pack(plant, rest, **how)]
        stored = [*done, *reports]
        if stored:
            rows = sum(part["rows"] for part in done) + sum(one.rows for one in reports)
            problem = ShardProblem(f"{problem}; {rows:,} rows before that are ingested, as {len(stored)} shards")
        if pack.alone is None:
            raise InputError(f"{pack.name}: {problem}") from problem
        one = quarantine(plant, pack.alone, sha256, problem)
        ingested(one)
        reports.append(one)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if words := left.words():
        plant.progress.line(f"  {pack.name}: {words}")
    return reports


def _finished(parts: Sequence[dict[str, Any]], key: str, ledger: Ledger) -> list[dict[str, Any]]:
    """The parts from the first on that need no ingest: of a whole file those of its newest run, else those that today's code read."""
    runs: list[list[dict[str, Any]]] = []
    for part in parts:
        if part["part"] == 1 or not runs:
            runs.append([])
        runs[-1].append(part)
    for run in reversed(runs):
        if run[-1]["last"] and all(report(ledger, part["shard"]) for part in run):
            return run
    same = runs[-1] if runs and all(part["read_by"] == key for part in runs[-1]) else []
    return list(itertools.takewhile(lambda part: report(ledger, part["shard"]), same))


def _file(plant: Plant, path: Path, one: ShardReport) -> None:
    if one.sha256 in erased_shards(plant.ledger):
        path.unlink()  # its text would be back
    else:
        sync_folder(path)  # what it was made of may go
        file_away(plant, path, one.sha256, one.state)


def rows_of(pack: Pack, limits: ShardLimits, left: _LeftOut | None = None) -> Iterator[RawRow]:
    """All rows of a pack, in order. ``left`` is told what is not read. Raises: ShardProblem, but for one of many small files."""
    left = left or _LeftOut()
    if pack.alone:
        yield from read_rows(pack.alone, limits, left)
        return
    if pack.folder:
        yield from read_rows(pack.folder, limits, left)
        return
    for name, path in pack.files:
        try:
            found = [with_path(row, name) for row in read_rows(path, limits, left, name)]
        except ShardProblem as problem:
            left(name, str(problem))
            left.files.add(path)
            continue
        yield from found


def _lacks_columns(name: str, path: Path, pack: str, policy: DataPolicy) -> bool:
    told = Told()
    with contextlib.suppress(ShardProblem):  # which is said when the pack is read
        for row in read_rows(path, policy.limits, lambda path, why: None, name):
            look_at(policy, with_path(row, name), pack, told)
            if told.mapped and not missing_columns(told, policy.fields):
                break
    return bool(missing_columns(told, policy.fields))


def _unusable(name: str, path: Path, pack: str, policy: DataPolicy) -> ShardProblem | None:
    rows: list[Row] = []
    try:
        for raw in read_rows(path, policy.limits, lambda path, why: None, name):
            rows.append(row := Row(len(rows), str(len(rows)), "", "unknown"))
            try:
                read_row(policy, row, with_path(raw, name), pack, Told())
            except BadRow as bad:
                row.drop(bad.rule, bad.detail)
    except ShardProblem:  # which is said when the pack is read
        return None
    return mostly_bad(rows, policy.limits.max_bad_rows)


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
    """Files of rows, one at a time: the same rows give the same bytes. ``number`` of them are done, with ``skip`` rows."""
    first = skip
    ahead = next(itertools.islice(rows, skip, None), None)
    while ahead is not None:
        number += 1
        path = folder / f"{name}#{number}.jsonl.zst"
        count = size = 0
        with pa.CompressedOutputStream(pa.OSFile(str(path), "wb"), "zstd") as out:
            while ahead is not None and count < limits.max_rows and size < limits.part_bytes:
                line = as_line(ahead) + b"\n"
                out.write(line)
                count, size, ahead = count + 1, size + len(line), next(rows, None)
        yield _Part(path, number, first, count, ahead is None)
        first += count


def _stamps(pack: Pack) -> list[tuple[int, int, int]]:
    try:
        found = [path.stat() for _, path in pack.files]
    except OSError as error:
        raise InputError(f"{error.filename} cannot be read: {error.strerror}") from error
    return [(one.st_size, one.st_mtime_ns, one.st_ino) for one in found]


def _refuse_changed(pack: Pack, before: list[tuple[int, int, int]]) -> None:
    now = _stamps(pack)
    for (_, path), was, is_now in zip(pack.files, before, now, strict=True):
        if was != is_now:
            raise InputError(f"{path} changed while it was read: ingest it again when it is complete")


def _common(files: Sequence[tuple[str, Path]]) -> Path:
    return files[0][1].parent
