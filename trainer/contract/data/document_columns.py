"""The numeric columns of a token shard's documents, memory-mapped: ranks share their pages, and strings are read one at a time.

``columns.arrow`` lies beside ``documents.parquet`` and follows from it alone. It is an Arrow file of one batch, with as many rows as the shard has
documents. Its columns have different orders:

    row, start, length, supervised_tokens   by domain, and by ``row`` within a domain; ``row`` is the row in documents.parquet
    key                                     as in documents.parquet
    key_hash, key_row                       by ``key_hash``, the CRC-32 of the key in row ``key_row``

The metadata says of which ``documents.parquet`` it was made (by its SHA-256), and where each domain begins. The file is not part of the shard: the
shard's id and manifest do not name it. ``write_token_shard`` makes it. For an older shard, and where the file is missing, damaged or made of
another ``documents.parquet``, the first process that opens the shard makes it, while the others wait. In a folder that cannot be written, each
process makes one for itself, in a temporary file without a name.

Opening checks what the metadata says against the manifest, and the sum of the lengths. It does not notice a flipped bit that keeps the sum:
``is_same_as_documents`` compares all of it, for new and changed files before a segment begins.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from kernels.contract.files import rename_into_place
from trainer.contract.errors import TokenShardError

FORMAT = 1
FILE = "columns.arrow"
AT_ONCE = 1 << 20  # documents whose numbers are read together
WINDOW = 32  # documents whose pieces are counted together

Integers = npt.NDArray[Any]


@dataclass(frozen=True)
class DomainTotals:
    """The documents of one domain in one shard."""

    first: int  # place of the first of them in the columns
    documents: int
    tokens: int
    supervised_tokens: int
    longest: int  # tokens of the longest document


class DocumentColumns:
    """The columns of one shard. ``totals``: by domain. The numeric columns are numpy arrays of the mapped file, [documents]."""

    def __init__(self, table: pa.Table) -> None:
        # combine_chunks() would copy
        held = {
            name: table[name].chunk(0) if table.num_rows else table[name].combine_chunks()
            for name in table.column_names
        }
        column = lambda name: np.from_dlpack(held[name])
        self.row, self.start, self.length = column("row"), column("start"), column("length")
        self.supervised_tokens = column("supervised_tokens")
        self.key_hash, self.key_row = column("key_hash"), column("key_row")
        self._key = held["key"]
        said = json.loads(table.schema.metadata[b"columns"])
        self.format: int = said["format"]
        self.documents_sha256: str = said["documents_sha256"]
        self.totals = {name: DomainTotals(*values) for name, values in said["domains"].items()}

    def read_key(self, row: int) -> str:
        """The key of the document in a row of documents.parquet."""
        return str(self._key[row].as_py())

    def find_rows_of_keys(self, keys: Sequence[str], hashes: npt.NDArray[np.uint32]) -> list[tuple[str, int]]:
        """(key, row) for those of the keys that the shard holds. ``hashes``: of the keys, from ``hash_keys``."""
        first = np.searchsorted(self.key_hash, hashes, side="left")
        last = np.searchsorted(self.key_hash, hashes, side="right")
        found = []
        for number in np.flatnonzero(last > first).tolist():
            for row in self.key_row[first[number] : last[number]].tolist():
                if self.read_key(row) == keys[number]:
                    found.append((keys[number], row))
        return found

    def find_places_of_rows(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The places of rows in the columns that are ordered by domain, [N] → [N]. Each row must exist."""
        found = np.full(len(rows), -1, np.int64)
        for total in self.totals.values():
            own = self.row[total.first : total.first + total.documents]
            at = np.searchsorted(own, rows).clip(max=total.documents - 1)
            here = own[at] == rows
            found[here] = total.first + at[here]
        assert (found >= 0).all()
        return found

    def group_by_domain(self, moved: Mapping[str, npt.NDArray[np.int64]]) -> dict[str, DomainDocuments]:
        """The documents of each domain, in the order of their rows. ``moved``: rows that belong to another domain than the shard says; of two
        domains the later counts."""
        places = {domain: self.find_places_of_rows(rows) for domain, rows in moved.items()}
        found = {}
        for domain in sorted({*self.totals, *moved}):
            total = self.totals.get(domain, DomainTotals(0, 0, 0, 0, 0))
            own = (total.first, total.first + total.documents)
            inside = lambda at, own=own: (at >= own[0]) & (at < own[1])
            gone, came = np.zeros(0, np.int64), np.zeros(0, np.int64)
            for other, at in places.items():
                gone, came = np.setdiff1d(gone, at), np.setdiff1d(came, at)
                if other == domain:
                    came = np.union1d(came, at[~inside(at)])
                else:
                    gone = np.union1d(gone, at[inside(at)])
            if not len(gone) and not len(came):
                found[domain] = DomainDocuments(self, total, None)
                continue
            kept = np.delete(np.arange(*own), gone - own[0])
            held = np.concatenate([kept, came]).astype(np.uint32)
            if len(held):
                held = held[np.argsort(self.row[held], kind="stable")]
                found[domain] = DomainDocuments(self, self._total(held), held)
        return {domain: documents for domain, documents in found.items() if documents.count}

    def _total(self, places: npt.NDArray[np.uint32]) -> DomainTotals:
        length = self.length[places]
        supervised = int(self.supervised_tokens[places].sum(dtype=np.int64))
        return DomainTotals(-1, len(places), int(length.sum(dtype=np.int64)), supervised, int(length.max(initial=0)))


class DomainDocuments:
    """The documents of one domain in one shard, numbered from 0 in the order of their rows.

    They are neighbours in the columns, unless documents changed domain (``places``, four bytes a document).
    """

    def __init__(self, columns: DocumentColumns, total: DomainTotals, places: npt.NDArray[np.uint32] | None) -> None:
        self.columns, self.total, self.places = columns, total, places
        self.count = total.documents

    @property
    def is_own(self) -> bool:
        """True if these are the documents that the shard itself says."""
        return self.places is None

    def take(self, name: str, documents: Integers) -> Integers:
        """Values of a column, for many documents; any shape."""
        column: Integers = getattr(self.columns, name)
        return column[documents + self.total.first] if self.places is None else column[self.places[documents]]

    def read_between(self, name: str, first: int, last: int) -> Integers:
        """A column's values of the documents [first, last)."""
        column: Integers = getattr(self.columns, name)
        if self.places is None:
            return column[self.total.first + first : self.total.first + min(last, self.count)]
        return column[self.places[first:last]]

    def find_documents_in_rows(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The numbers of those documents that lie in these rows."""
        if self.places is None:
            own = self.read_between("row", 0, self.count)
            at = np.searchsorted(own, rows).clip(max=self.count - 1)
        else:
            places = self.columns.find_places_of_rows(rows)
            held = self.columns.row[self.places]
            at, own = np.searchsorted(held, self.columns.row[places]).clip(max=self.count - 1), held
        found: npt.NDArray[np.int64] = np.unique(at[own[at] == rows])
        return found


class PieceIndex:
    """Finds the pieces of the documents of several shards by number. The pieces of a document follow those of the document before it.

    Only the number of pieces until the end of each window of ``WINDOW`` documents is kept, 0.25 bytes a document.
    """

    def __init__(self, parts: Sequence[DomainDocuments], context: int) -> None:
        self.context = context
        self._parts = parts
        self._first_document = np.cumsum([0, *(part.count for part in parts)])
        self._first_window = np.cumsum([0, *(-(-part.count // WINDOW) for part in parts)])
        counts = [np.zeros(0, np.int64)]
        for part in parts:
            for first in range(0, part.count, AT_ONCE):
                pieces = self._count(part.read_between("length", first, first + AT_ONCE))
                counts.append(np.add.reduceat(pieces, np.arange(0, len(pieces), WINDOW), dtype=np.int64))
        self._ends = np.cumsum(np.concatenate(counts))
        self.pieces = int(self._ends[-1]) if len(self._ends) else 0

    def _count(self, tokens: Integers) -> Integers:
        """As ``packing.count_pieces``, for documents of at least one token; in the array's own dtype, which makes it four times as fast."""
        return (tokens + (self.context - 2)) // self.context if self.context > 1 else tokens - 1

    def find_documents(
        self, numbers: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(document, number of the piece in its document, tokens of the document) of pieces, each [N]."""
        window = np.searchsorted(self._ends, numbers, side="right")
        left = numbers - np.where(window > 0, self._ends[window - 1], 0)
        lengths, document = self._read_windows(window)
        ends = np.cumsum(self._count(lengths), axis=1, dtype=np.int64)
        at = (ends <= left[:, None]).sum(axis=1)
        each = np.arange(len(numbers))
        before = np.where(at > 0, ends[each, at - 1], 0)
        return document + at, left - before, lengths[each, at].astype(np.int64)

    def find_first_pieces(self, documents: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The number of each document's first piece, [N] → [N]."""
        part = np.searchsorted(self._first_document, documents, side="right") - 1
        window = self._first_window[part] + (documents - self._first_document[part]) // WINDOW
        lengths, first = self._read_windows(window)
        earlier = np.arange(WINDOW) < (documents - first)[:, None]
        return np.where(window > 0, self._ends[window - 1], 0) + (self._count(lengths) * earlier).sum(axis=1)

    def _read_windows(self, window: npt.NDArray[np.int64]) -> tuple[Integers, npt.NDArray[np.int64]]:
        """(lengths of the documents of each window, [N, WINDOW], 1 where there is none; the first document of each, [N])."""
        part = np.searchsorted(self._first_window, window, side="right") - 1
        first = (window - self._first_window[part]) * WINDOW
        lengths = np.ones((len(window), WINDOW), np.uint32)
        for number, here in group_by_value(part):
            documents = first[here, None] + np.arange(WINDOW)
            held = documents < self._parts[number].count
            found = self._parts[number].take("length", np.minimum(documents, self._parts[number].count - 1))
            lengths[here] = np.where(held, found, 1)
        return lengths, self._first_document[part] + first


def group_by_value(values: npt.NDArray[np.int64]) -> Iterator[tuple[int, Any]]:
    """(value, index of the places that have it) for each value of an array.

    >>> [(value, index.tolist()) for value, index in group_by_value(np.array([3, 1, 3]))]
    [(1, [1]), (3, [0, 2])]
    """
    if not len(values):
        return
    if (values == values[0]).all():
        yield int(values[0]), np.arange(len(values))
        return
    order = np.argsort(values, kind="stable")
    edges = np.flatnonzero(np.diff(values[order])) + 1
    for index in np.split(order, edges):
        yield int(values[index[0]]), index


def hash_keys(keys: Iterable[str]) -> npt.NDArray[np.uint32]:
    """The CRC-32 of each key's UTF-8. Two keys may have one hash, so whoever finds a hash compares the key."""
    return np.fromiter((zlib.crc32(key.encode()) for key in keys), np.uint32)


def make_columns(documents: pa.Table, documents_sha256: str) -> pa.Table:
    """``columns.arrow`` as a table, from the columns key, start, length, supervised_tokens and domain of documents.parquet."""
    column = lambda name: np.from_dlpack(documents[name].combine_chunks())
    encoded = documents["domain"].combine_chunks().dictionary_encode()
    names = encoded.dictionary.to_pylist()
    domains = sorted(names)
    code = np.array([domains.index(name) for name in names], np.uint32)[np.from_dlpack(encoded.indices)]
    order = np.argsort(code, kind="stable")
    start, length, supervised = (column(name)[order] for name in ("start", "length", "supervised_tokens"))
    ends = np.cumsum(np.bincount(code, minlength=len(domains)))
    totals = {}
    for domain, first, last in zip(domains, [0, *ends[:-1].tolist()], ends.tolist()):
        here = np.s_[first:last]
        totals[domain] = [
            first, last - first, int(length[here].sum()), int(supervised[here].sum()), int(length[here].max())
        ]  # fmt: skip
    keys = documents["key"].combine_chunks().cast(pa.large_string())
    hashes = hash_keys(keys.to_pylist())
    by_hash = np.argsort(hashes, kind="stable")
    made = {
        "row": order.astype(np.uint32),
        "start": start.astype(np.int64),
        "length": length.astype(np.uint32),
        "supervised_tokens": supervised.astype(np.uint32),
        "key_hash": hashes[by_hash],
        "key_row": by_hash.astype(np.uint32),
        "key": keys,
    }
    said = {"format": FORMAT, "documents_sha256": documents_sha256, "domains": totals}
    return pa.table({name: pa.array(values) for name, values in made.items()}).replace_schema_metadata(
        {"columns": json.dumps(said, sort_keys=True)}
    )


def write_columns(columns: pa.Table, path: Path | str) -> None:
    with pa.OSFile(str(path), "wb") as out, pa.ipc.new_file(out, columns.schema) as file:
        file.write_table(columns.combine_chunks(), max_chunksize=max(1, columns.num_rows))


def open_columns(folder: Path, manifest: Mapping[str, Any]) -> DocumentColumns:
    """The columns of the token shard in a folder. They are made if they are missing, damaged or not of this shard.

    Raises: TokenShardError if documents.parquet is damaged; OSError.
    """
    if (found := read_columns(folder / FILE, manifest)) is not None:
        return found
    with _alone(folder):
        if (found := read_columns(folder / FILE, manifest)) is not None:
            return found  # another process made them meanwhile
        made = make_columns(_read_documents(folder, manifest), manifest["files"]["documents.parquet"])
        aside = folder / f".{FILE}.{uuid.uuid4().hex[:12]}.part"
        try:
            write_columns(made, aside)
            rename_into_place(aside, folder / FILE)
        except OSError:  # a folder that cannot be written, or a full disk
            with tempfile.NamedTemporaryFile(prefix="columns-") as file:
                write_columns(made, file.name)
                found = read_columns(Path(file.name), manifest)
        else:
            found = read_columns(folder / FILE, manifest)
        finally:
            with suppress(OSError):  # as above
                aside.unlink(missing_ok=True)
    if found is None:
        raise TokenShardError(
            "document_columns.other_documents",
            "{folder}: documents.parquet has other counts than manifest.json. Run 'factory check --repair', or make the token shard again.",
            folder=str(folder),
        )
    return found


def read_columns(path: Path, manifest: Mapping[str, Any]) -> DocumentColumns | None:
    """The columns in a file; None if it is missing, damaged, or not of the shard of this manifest."""
    try:
        with pa.memory_map(str(path)) as file:
            mapped = file.read_buffer()
        found = DocumentColumns(pa.ipc.open_file(pa.BufferReader(mapped)).read_all())
        totals = found.totals.values()
        counts = [sum(getattr(t, name) for t in totals) for name in ("documents", "tokens", "supervised_tokens")]
        same = (
            found.format == FORMAT
            and found.documents_sha256 == manifest["files"]["documents.parquet"]
            and counts == [manifest[name] for name in ("documents", "tokens", "supervised_tokens")]
            and len(found.length) == manifest["documents"]
            and int(found.length.sum(dtype=np.int64)) == manifest["tokens"]
        )
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException):
        return None
    return found if same else None


def is_same_as_documents(folder: Path, manifest: Mapping[str, Any]) -> bool:
    """True if every value of columns.arrow is what documents.parquet gives. Raises: TokenShardError if that is damaged; OSError."""
    try:
        with pa.memory_map(str(folder / FILE)) as file:
            found = pa.ipc.open_file(pa.BufferReader(file.read_buffer())).read_all()
    except (OSError, ValueError, pa.ArrowException):
        return False
    made = make_columns(_read_documents(folder, manifest), manifest["files"]["documents.parquet"])
    return bool(found.equals(made, check_metadata=True))


def _read_documents(folder: Path, manifest: Mapping[str, Any]) -> pa.Table:
    """What ``make_columns`` needs of documents.parquet, whose hash is verified."""
    path = folder / "documents.parquet"
    with open(path, "rb") as handle:
        if hashlib.file_digest(handle, "sha256").hexdigest() != manifest["files"]["documents.parquet"]:
            raise TokenShardError(
                "document_columns.damaged_documents",
                "{path} is damaged: its SHA-256 differs from the one in manifest.json. Run 'factory check --repair', or make the token shard again.",
                path=str(path),
            )
    # not pq.read_table, which imports pandas if it is installed: a fifth of a second
    with pq.ParquetFile(path, memory_map=True) as file:
        return file.read(columns=["key", "start", "length", "supervised_tokens", "domain"])


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """While the block runs, no other process makes the columns of this folder, where the file system has locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # without a lock several processes make the same file, and the last one stays
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
