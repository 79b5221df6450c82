"""Reads rows of columnar files: Parquet, Arrow IPC (files and streams; a Feather file is an Arrow file), and Hugging Face data sets on disk.

A value may be unreadable, for example a timestamp beyond Python's years, or bytes that are not UTF-8 in a text column. The reader leaves the value
out of its row and names its key there (``rows.UNREADABLE``). Columns of floating-point vectors and of nested bytes (images) are not read, because
they are neither text nor metadata.

``datasets.Dataset.save_to_disk`` writes a folder with ``state.json``, ``dataset_info.json`` and ``data-*.arrow``. A ``DatasetDict`` is a folder
with ``dataset_dict.json`` and one such folder for each split. All splits are read. To read one split, name its folder.
"""

from __future__ import annotations

import datetime
import functools
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from factory.ingest.reading.rows import (
    UNREADABLE,
    BadRow,
    LeftOutCallback,
    RawRow,
    ShardProblem,
    add_path,
    make_duplicate_column_error,
    make_row_too_long_error,
)
from factory.ingest.reading.streams import (
    DecompressionBudget,
    ReadableFile,
    open_file,
    open_seekable,
    raise_if_machine_fault,
)
from factory.ingest.rules.policy import ShardLimits
from kernels.contract.message import Message

_AT_ONCE = 64  # rows


def read_parquet(source: ReadableFile) -> Iterator[RawRow]:
    try:
        with open_seekable(source) as mapped, pq.ParquetFile(mapped) as file:
            columns = _readable(file.schema_arrow)
            total = sum(file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups))
            DecompressionBudget(mapped.size(), source.limits).spend(total)
            for batch in file.iter_batches(batch_size=_AT_ONCE, columns=columns):
                yield from _rows(batch, source.limits)
    except (OSError, pa.ArrowException, OverflowError) as error:
        raise_if_machine_fault(source.name, error)
        raise ShardProblem(
            "reading.parquet", "the file cannot be read as Parquet: {error}", error=str(error)[:200]
        ) from error


def read_arrow(source: ReadableFile) -> Iterator[RawRow]:
    """Read an Arrow IPC file or stream. The first bytes tell which of the two it is."""
    try:
        with open_seekable(source) as mapped:
            head = mapped.read(6)
            mapped.seek(0)
            if head.startswith(b"FEA1"):
                raise ShardProblem(
                    "reading.feather_1",
                    "the file is in Feather version 1, which is not supported. Write the table again with pyarrow.feather.write_feather",
                )
            if head == b"ARROW1":
                with pa.ipc.open_file(mapped) as file:
                    batches = (file.get_batch(number) for number in range(file.num_record_batches))
                    yield from _checked(
                        batches, file.schema, DecompressionBudget(mapped.size(), source.limits), source.limits
                    )
            else:
                with pa.ipc.open_stream(mapped) as stream:
                    yield from _checked(
                        stream, stream.schema, DecompressionBudget(mapped.size(), source.limits), source.limits
                    )
    except (OSError, pa.ArrowException, OverflowError) as error:
        raise_if_machine_fault(source.name, error)
        raise ShardProblem(
            "reading.arrow", "the file cannot be read as Arrow: {error}", error=str(error)[:200]
        ) from error


def _checked(
    batches: Iterable[pa.RecordBatch], schema: pa.Schema, budget: DecompressionBudget, limits: ShardLimits
) -> Iterator[RawRow]:
    """Yield the rows of Arrow batches. Arrow does not check the lengths and offsets in a file's buffers, so they are checked here before a value is
    read."""
    columns = _readable(schema)
    for batch in batches:
        budget.spend(batch.nbytes)
        batch = batch.select(columns)
        for column in batch.columns:
            try:
                column.validate(full=True)
            except pa.ArrowInvalid as error:
                if not (_is_text(column.type) and "UTF8" in str(error)):  # text is checked value by value
                    raise
        for at in range(0, batch.num_rows, _AT_ONCE):
            yield from _rows(batch.slice(at, _AT_ONCE), limits)


def is_dataset(folder: Path) -> bool:
    """Return whether ``save_to_disk`` of Hugging Face's ``datasets`` wrote this folder."""
    if (folder / "dataset_dict.json").is_file():
        return True
    try:
        return b'"_data_files"' in (folder / "state.json").read_bytes()  # other programs write a state.json too
    except OSError:
        return False


def list_dataset_files(folder: Path) -> list[Path]:
    """Return the Arrow files of a data set on disk, in the order of their rows. Raises: ShardProblem."""
    try:
        if (folder / "dataset_dict.json").is_file():
            splits = json.loads((folder / "dataset_dict.json").read_bytes())["splits"]
            return [file for split in splits for file in list_dataset_files(_inside(folder, split))]
        listed = json.loads((folder / "state.json").read_bytes())["_data_files"]
        files = [_inside(folder, one["filename"]) for one in listed]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise_if_machine_fault(folder.name, error)
        raise ShardProblem(
            "reading.dataset",
            "the folder cannot be read as a data set that Hugging Face's save_to_disk wrote ({kind}: {error})",
            kind=type(error).__name__,
            error=error,
        ) from error
    if gone := [file.name for file in files if not file.is_file()]:
        raise ShardProblem("reading.dataset_file", "the file {file} of the data set is missing", file=gone[0])
    return files


def _inside(folder: Path, name: str) -> Path:
    if Path(name).name != name or name in (".", ".."):
        raise ValueError(f"{name!r} does not name a file in the same folder")
    return folder / name


def read_dataset(folder: Path, limits: ShardLimits, on_left_out: LeftOutCallback) -> Iterator[RawRow]:
    """Yield the rows of a data set on disk. Each row names its file."""
    for file in list_dataset_files(folder):
        name = str(file.relative_to(folder))
        opens = functools.partial(open_file, file, "", limits)
        source = ReadableFile(name, opens, limits, file.stat().st_size, on_left_out, file)
        for row in read_arrow(source):
            yield add_path(row, name)


def _readable(schema: pa.Schema) -> list[str]:
    """Return the names of the columns that are read. Raises: ShardProblem for two columns with one name, or without a column of text."""
    names = [one.name for one in schema if not _is_useless(one.type)]
    if twice := [name for name in names if names.count(name) > 1]:
        raise make_duplicate_column_error(twice[0])
    if not names:
        raise ShardProblem(
            "reading.no_text_column",
            "the file has no column of text. Its columns: {columns}",
            columns=schema.names[:10],
        )
    return names


def _is_useless(kind: pa.DataType, nested: bool = False) -> bool:
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return pa.types.is_floating(kind.value_type) or _is_useless(kind.value_type, True)
    if pa.types.is_struct(kind):
        return any(_is_useless(kind.field(i).type, True) for i in range(kind.num_fields))
    return nested and _is_bytes(kind)


def _is_bytes(kind: pa.DataType) -> bool:
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind)


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _rows(batch: pa.RecordBatch, limits: ShardLimits) -> Iterator[RawRow]:
    columns = {name: _values(batch.column(place)) for place, name in enumerate(batch.schema.names)}
    for number in range(batch.num_rows):
        row: dict[str, Any] = {}
        wrong: dict[str, str] = {}
        for name, column in columns.items():
            value = column[number]
            if isinstance(value, Exception):
                wrong[name] = str(value)[:200]
            else:
                row[name] = value
        size = sum(len(value) for value in row.values() if isinstance(value, str))
        if size > limits.max_row_bytes:
            yield make_row_too_long_error(size, limits.max_row_bytes)
        elif isinstance(encoding := columns.get("text", [None] * batch.num_rows)[number], UnicodeDecodeError):
            said = Message("reading.text_not_utf8", "the text is not UTF-8: {why}", why=encoding.reason)
            yield BadRow("bad_encoding", said)
        else:
            yield {**row, UNREADABLE: wrong} if wrong else row


def _values(column: pa.Array) -> list[Any]:
    """Return the values of a column as JSON values. An exception stands in place of each value that cannot be read."""
    try:
        return [to_json_value(value) for value in column.to_pylist()]
    except Exception:  # at least one value cannot be read; the next line finds which  # noqa: BLE001
        return [_value(one) for one in column]


def _value(one: pa.Scalar) -> Any:
    try:
        return to_json_value(one.as_py())
    except (
        ValueError,
        OverflowError,
        TypeError,
        LookupError,
        ArithmeticError,
        ImportError,
        pa.ArrowException,
    ) as error:
        return error


def to_json_value(value: Any) -> Any:
    """Convert a value of a column to a JSON value. Raises: UnicodeDecodeError for bytes that are not text; ValueError for infinities and NaN.

    >>> import decimal
    >>> to_json_value({"at": datetime.datetime(2026, 1, 2), "n": decimal.Decimal("1.5"), "b": b"x"})
    {'at': '2026-01-02T00:00:00', 'n': '1.5', 'b': 'x'}
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value} is not JSON")
        return value
    if isinstance(value, dict):
        return {str(key): to_json_value(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set):
        return [to_json_value(one) for one in value]
    if isinstance(value, bytes):
        return value.decode("utf-8")
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    return str(value)
