"""The items of evaluation tasks, as far as ingest must know them: every string in every data file of ``policies/tasks/``.

No schema is asked for, so that a task file of any kind is kept out of training data from the moment it lies in the folder, also one that no
task reads yet. Items are read here for the tasks too, so that both see the same records. What cannot be read so is named (``task_folder.not_read``).
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
from factory.ingest.rules.decontaminate import ngrams
from factory.ingest.rules.task_folder import is_numbered, suffix_of
from factory.ingest.rules.words import Hashes, word_hashes
from trainer.contract.data.token_shard import file_sha256

LARGEST = 256 << 20  # bytes of a file, unpacked
HEADLESS = (
    "question",
    "A",
    "B",
    "C",
    "D",
    "answer",
)  # the columns of MMLU's files, which have no header (Hendrycks et al. 2021)
DEPTH = 32  # of lists in lists


@dataclass(frozen=True)
class ItemFile:
    """One data file: its path, the hash of its content (unpacked), its records."""

    path: Path
    sha256: str
    records: list[dict[str, Any]]


def read_items(path: Path) -> ItemFile:
    """Raises: InputError naming the file, and the line where there is one, for what cannot be read as a table of records."""
    if path.is_dir():
        return _numbered(path)
    try:
        if path.stat().st_size > LARGEST:
            raise InputError(f"{path}: more than {LARGEST >> 20} MiB")
        data = _unpacked(path) if path.suffix == ".gz" else path.read_bytes()
        suffix = suffix_of(path).removesuffix(".gz")
        records = (
            _parquet(data)
            if suffix == ".parquet"
            else {".jsonl": _lines, ".json": _json, ".csv": _csv}[suffix](_decoded(data))
        )
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    except _BadItems as error:
        raise InputError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read as {suffix_of(path)[1:]}: {str(error)[:200]}") from error
    for number, record in enumerate(records, 1):
        if not isinstance(record, dict) or not all(isinstance(key, str) for key in record):
            raise InputError(f"{path}: record {number} is {type(record).__name__}, expected keys with values")
    return ItemFile(path, hashlib.sha256(data).hexdigest(), records)


def _numbered(folder: Path) -> ItemFile:
    """Of a folder of numbered files (``task_folder.is_numbered``), in their order."""
    if not is_numbered(folder) or not any(folder.iterdir()):
        below = next((path for path in sorted(folder.rglob("*")) if is_numbered(path) and any(path.iterdir())), None)
        raise InputError(
            f"{folder}: a folder is a task where it has numbered files alone (0.json, 1.json …), a record each"
            + (f", as {below} has: name that one" if below else ": name a file in it")
        )
    records: list[dict[str, Any]] = []
    files = sorted(folder.iterdir(), key=lambda path: int(path.stem))
    for path in files:
        try:
            record = json.loads(_decoded(path.read_bytes()), object_pairs_hook=_once)
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from error
        except (_BadItems, ValueError, RecursionError) as error:
            raise InputError(f"{path} cannot be read as json: {str(error)[:200]}") from error
        if not isinstance(record, dict):
            raise InputError(f"{path}: it is {type(record).__name__}, expected keys with values")
        records.append(record)
    return ItemFile(folder, items_sha256(folder), records)


def items_sha256(path: Path) -> str:
    """Of a data file as it lies there, packed or not, or of a folder of numbered ones. Raises: OSError."""
    if not path.is_dir():
        return file_sha256(path)
    named = [(one.name, file_sha256(one)) for one in sorted(path.iterdir())]
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()


def item_ngrams(record: Any, n: int) -> Hashes:
    """The n-grams of each string of a record, and of all of them joined: question and answer stand together in most copies."""
    texts = list(_strings(record, 0))
    every = [ngrams(word_hashes(text), n) for text in [*texts, "\n".join(texts)]]
    return np.unique(np.concatenate(every))


class _BadItems(Exception):
    """What is wrong inside a file."""


def _unpacked(path: Path) -> bytes:
    try:
        with gzip.open(path) as file:
            data = file.read(LARGEST + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _BadItems(f"cannot be unpacked: {error}") from None
    if len(data) > LARGEST:
        raise _BadItems(f"more than {LARGEST >> 20} MiB, unpacked")
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
        raise _BadItems(f"line {line}: byte 0x{byte:02x} is not UTF-8: save it in that encoding") from None


def _lines(text: str) -> list[Any]:
    records = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                records.append(json.loads(line, object_pairs_hook=_once))
            except (ValueError, RecursionError) as error:
                raise _BadItems(f"line {number}: {str(error)[:200]}") from None
    return records


def _json(text: str) -> list[Any]:
    found = json.loads(text, object_pairs_hook=_once)
    if not isinstance(found, list):
        raise _BadItems("expected a list of records")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key appears twice")
    return found


def _csv(text: str) -> list[Any]:
    try:
        found = [row for row in csv.reader(io.StringIO(text), strict=True) if row]
        names = HEADLESS if found and all(_headless(row) for row in found) else None
        rows = list(csv.DictReader(io.StringIO(text), names, strict=True))
    except csv.Error as error:
        raise _BadItems(str(error)) from None
    for number, row in enumerate(rows, 2):
        if None in row or None in row.values():
            raise _BadItems(f"row {number} has another number of fields than the first line")
    return rows


def _headless(row: list[str]) -> bool:
    """Is the row an item of MMLU, so that as a first line it is no header? The letter of an answer names no column."""
    return len(row) == len(HEADLESS) and row[-1] in HEADLESS[1:-1]


def _parquet(data: bytes) -> list[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return list(pq.read_table(pa.BufferReader(data)).to_pylist())
    except pa.ArrowException as error:
        raise _BadItems(f"cannot be read as parquet: {str(error)[:200]}") from None
