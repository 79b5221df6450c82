"""Reads the items of evaluation tasks: every string in every data file of ``policies/tasks/``.

Items need no schema. Ingest therefore keeps the items of any task file out of training data as soon as the file is in the folder, even if no task
uses it yet. The tasks read their items with this module too, so that both see the same records. ``task_folder.list_unreadable_files`` names the files
that cannot be read.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from factory.core.errors import InputError
from factory.ingest.rules.contamination import hash_ngrams
from factory.ingest.rules.task_folder import get_data_suffix, is_numbered_folder
from factory.ingest.rules.word_hashes import Hashes, hash_words
from kernels.contract.message import CodedError
from trainer.contract.data.token_shard import hash_file

LARGEST = 256 << 20  # largest size of a file, in bytes after decompression
MMLU_COLUMNS = (
    "question",
    "A",
    "B",
    "C",
    "D",
    "answer",
)  # the columns of MMLU's files (Hendrycks et al. 2021), which have no header
DEPTH = 32  # the deepest nesting of lists that is searched for strings


@dataclass(frozen=True)
class ItemFile:
    """One data file: its path, the hash of its decompressed content, and its records."""

    path: Path
    sha256: str
    records: list[dict[str, Any]]


def read_items(path: Path) -> ItemFile:
    """Read the records of a data file. Raises: InputError, which names the file and the line, if the file is not a table of records."""
    if path.is_dir():
        return _numbered(path)
    try:
        if path.stat().st_size > LARGEST:
            raise InputError(
                "task_items.too_large", "{path}: the file has more than {limit} MiB", path=path, limit=LARGEST >> 20
            )
        data = _unpacked(path) if path.suffix == ".gz" else path.read_bytes()
        suffix = get_data_suffix(path).removesuffix(".gz")
        records = (
            _parquet(data)
            if suffix == ".parquet"
            else {".jsonl": _lines, ".json": _json, ".csv": _csv}[suffix](_decoded(data))
        )
    except OSError as error:
        raise _unreadable(path, error) from error
    except _BadItems as error:
        raise InputError("task_items.bad_file", "{path}: {why}", path=path, why=error.message) from None
    except (ValueError, RecursionError) as error:
        raise _not_of_kind(path, get_data_suffix(path)[1:], error) from error
    for number, record in enumerate(records, 1):
        if not isinstance(record, dict) or not all(isinstance(key, str) for key in record):
            raise InputError(
                "task_items.record",
                "{path}: record {number} is {kind}; an object of keys and values is expected",
                path=path,
                number=number,
                kind=type(record).__name__,
            )
    return ItemFile(path, hashlib.sha256(data).hexdigest(), records)


def _unreadable(path: Path, error: OSError) -> InputError:
    return InputError("task_items.unreadable", "{path} cannot be read: {error}", path=path, error=error.strerror)


def _not_of_kind(path: Path, kind: str, error: Exception) -> InputError:
    return InputError(
        "task_items.not_of_kind",
        "{path} cannot be read as {kind}: {error}",
        path=path,
        kind=kind,
        error=str(error)[:200],
    )


def _numbered(folder: Path) -> ItemFile:
    """Read the records of a folder of numbered files (``task_folder.is_numbered_folder``), in the order of the numbers."""
    if not is_numbered_folder(folder) or not any(folder.iterdir()):
        below = next(
            (path for path in sorted(folder.rglob("*")) if is_numbered_folder(path) and any(path.iterdir())), None
        )
        if below:
            raise InputError(
                "task_items.folder_below",
                "{folder} must contain only numbered files (0.json, 1.json …). Use the folder {below} instead: it contains "
                "only such files",
                folder=folder,
                below=below,
            )
        raise InputError(
            "task_items.folder",
            "{folder} must contain only numbered files (0.json, 1.json …, one record each). Give the path of one file in the "
            "folder instead",
            folder=folder,
        )
    records: list[dict[str, Any]] = []
    files = sorted(folder.iterdir(), key=lambda path: int(path.stem))
    for path in files:
        try:
            record = json.loads(_decoded(path.read_bytes()), object_pairs_hook=_once)
        except OSError as error:
            raise _unreadable(path, error) from error
        except (_BadItems, ValueError, RecursionError) as error:
            raise _not_of_kind(path, "json", error) from error
        if not isinstance(record, dict):
            raise InputError(
                "task_items.numbered_record",
                "{path} contains {kind}; an object of keys and values is expected",
                path=path,
                kind=type(record).__name__,
            )
        records.append(record)
    return ItemFile(folder, hash_item_file(folder), records)


def hash_item_file(path: Path) -> str:
    """Return the hash of a data file as it is on disk, compressed or not, or of a folder of numbered files. Raises: OSError."""
    if not path.is_dir():
        return hash_file(path)
    named = [(one.name, hash_file(one)) for one in sorted(path.iterdir())]
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()


def hash_item_ngrams(record: Any, n: int) -> Hashes:
    """Return the n-grams of each string of a record and of all its strings joined, because most copies contain question and answer together."""
    texts = list(_strings(record, 0))
    every = [hash_ngrams(hash_words(text), n) for text in [*texts, "\n".join(texts)]]
    return np.unique(np.concatenate(every))


class _BadItems(CodedError):
    """The error of a fault inside a data file. It does not name the file."""


def _unpacked(path: Path) -> bytes:
    try:
        with gzip.open(path) as file:
            data = file.read(LARGEST + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _BadItems("task_items.unpacking", "the file cannot be unpacked: {error}", error=error) from None
    if len(data) > LARGEST:
        raise _BadItems(
            "task_items.too_large_unpacked", "the unpacked file has more than {limit} MiB", limit=LARGEST >> 20
        )
    return data


def _strings(value: Any, depth: int) -> Iterator[str]:
    if depth > DEPTH:
        return
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _strings(part, depth + 1)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _strings(part, depth + 1)


def _decoded(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line, byte = data[: error.start].count(b"\n") + 1, data[error.start]
        raise _BadItems(
            "task_items.not_utf8",
            "line {line}: byte 0x{byte:02x} is not UTF-8. Save the file as UTF-8",
            line=line,
            byte=byte,
        ) from None


def _lines(text: str) -> list[Any]:
    records = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                records.append(json.loads(line, object_pairs_hook=_once))
            except (ValueError, RecursionError) as error:
                raise _BadItems(
                    "task_items.line", "line {line}: {error}", line=number, error=str(error)[:200]
                ) from None
    return records


def _json(text: str) -> list[Any]:
    found = json.loads(text, object_pairs_hook=_once)
    if not isinstance(found, list):
        raise _BadItems("task_items.no_list", "the file must contain a list of records")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key appears twice")
    return found


def _csv(text: str) -> list[Any]:
    try:
        found = [row for row in csv.reader(io.StringIO(text), strict=True) if row]
        names = MMLU_COLUMNS if found and all(_headless(row) for row in found) else None
        rows = list(csv.DictReader(io.StringIO(text), names, strict=True))
    except csv.Error as error:
        raise _BadItems("task_items.csv", "the file is not CSV: {error}", error=error) from None
    for number, row in enumerate(rows, 2):
        if None in row or None in row.values():
            raise _BadItems(
                "task_items.fields", "row {row} and the first line have different numbers of fields", row=number
            )
    return rows


def _headless(row: list[str]) -> bool:
    """Return whether the row is an item of MMLU, and so not a header. The letter of an answer cannot be the name of a column."""
    return len(row) == len(MMLU_COLUMNS) and row[-1] in MMLU_COLUMNS[1:-1]


def _parquet(data: bytes) -> list[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return list(pq.read_table(pa.BufferReader(data)).to_pylist())
    except pa.ArrowException as error:
        raise _BadItems(
            "task_items.parquet", "the file cannot be read as Parquet: {error}", error=str(error)[:200]
        ) from None
