"""A run's metrics as curves: from CSV, TSV or JSON lines that anyone wrote, or from our segments. What is wrong is named with file and line."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from factory.core.errors import InputError, nearest
from factory.data.metrics import metrics_of
from factory.ledger.rows import SegmentRow

STEP_NAMES = (
    "step",
    "steps",
    "_step",
    "global_step",
    "iteration",
    "iter",
    "train/step",
    "train/global_step",
    "trainer/global_step",
)
TOKEN_NAMES = (
    "tokens",
    "_tokens",
    "tokens_seen",
    "total_tokens",
    "num_tokens",
    "train/tokens",
    "throughput/total_tokens",
)
MOST_BYTES = 1 << 30
X_NAMES = {"steps": STEP_NAMES, "tokens": TOKEN_NAMES}


@dataclass
class RunCurves:
    """``points``: by metric, [(x, value)] with x rising; NaN and infinities are kept. ``tokens``: by step, where both are known."""

    name: str
    points: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    tokens: dict[float, float] = field(default_factory=dict)
    decimals: dict[str, int] = field(default_factory=dict)  # most digits after the point that a metric was written with
    notes: list[str] = field(default_factory=list)


def read_file(path: Path, x: str, metrics: Sequence[str]) -> RunCurves:
    """Curves of these columns. ``x``: 'steps' or 'tokens'. Raises: InputError that names the file and the line."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise InputError(f"{path} has more than {MOST_BYTES >> 20} MiB: take out the columns that are compared")
        with open(path, encoding="utf-8-sig", newline="") as file:
            head = file.read(1 << 16).lstrip()
            file.seek(0)
            rows = _json_rows(path, file) if head.startswith("{") else _table_rows(path, file, head)
            return _curves(path, rows, x, metrics)
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 at byte {error.start}: expected CSV or JSON lines") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error


def read_lineage(rows: Sequence[SegmentRow], name: str, x: str, metrics: Sequence[str]) -> RunCurves:
    """Curves of segments that go on from one another. Raises: InputError for a metric that none has."""
    lines: list[dict[str, Any]] = []
    for row, child in zip(rows, [*rows[1:], None]):
        lines += [line for line in metrics_of(row) if child is None or line["step"] < child.first_step]
    if not lines:
        raise InputError(f"{name} has no metrics yet: {Path(rows[-1].folder) / 'metrics.jsonl'}")
    return _curves(Path(name), iter(enumerate(lines, 1)), x, metrics)


def _json_rows(path: Path, file: Iterator[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}, line {number}: not JSON: {str(error)[:200]}") from None
        if not isinstance(row, dict):
            raise InputError(f"{path}, line {number}: expected an object, got {type(row).__name__}")
        yield number, row


def _table_rows(path: Path, file: Iterator[str], head: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    first = head.split("\n", 1)[0]
    delimiter = "\t" if "\t" in first else ";" if first.count(";") > first.count(",") else ","
    reader = csv.reader(file, delimiter=delimiter, strict=True)
    try:
        names = [name.strip() for name in next(reader, [])]
        if len(set(names)) < len(names):
            raise InputError(f"{path}, line 1: a column is there twice: {max(names, key=names.count)!r}")
        for row in reader:
            if row and len(row) != len(names):
                raise InputError(
                    f"{path}, line {reader.line_num}: {len(row)} values, and not {len(names)} as in line 1"
                )
            if row:
                yield reader.line_num, dict(zip(names, row))
    except csv.Error as error:
        raise InputError(f"{path}, line {reader.line_num}: {error}") from None


def _curves(path: Path, rows: Iterator[tuple[int, Mapping[str, Any]]], x: str, metrics: Sequence[str]) -> RunCurves:
    found = RunCurves(str(path))
    columns: dict[str, str] = {}
    known: dict[str, None] = {}
    values: dict[str, dict[float, float]] = {metric: {} for metric in metrics}
    last, again, back = -math.inf, 0, 0
    for number, row in rows:
        known |= dict.fromkeys(row)
        for unit, names in X_NAMES.items():
            if unit not in columns and (name := next((one for one in names if one in row), None)):
                columns[unit] = name
        if columns.get(x) not in row:
            other = next((unit for unit in columns if unit != x), None)
            hint = f"; it has {columns[other]!r}: compare by --x {other}" if other else ""
            named = ", ".join(map(repr, list(row)[:12]))
            raise InputError(
                f"{path}, line {number}: no column of {x} ({', '.join(X_NAMES[x][:4])} …) among {named}{hint}"
            )
        at = _number(path, number, columns[x], row[columns[x]])
        if at is None or not math.isfinite(at):
            raise InputError(f"{path}, line {number}: {columns[x]}: {str(row[columns[x]])[:40]!r} is no number")
        again += any(at in points for points in values.values())
        back += at < last
        last = at
        for metric in metrics:
            if metric in row and (value := _number(path, number, metric, row[metric])) is not None:
                values[metric][at] = value  # of a step that is there twice the last: a run that was resumed
                written = str(row[metric]).lower()
                if math.isfinite(value) and "e" not in written:
                    found.decimals[metric] = max(found.decimals.get(metric, 0), len(written.partition(".")[2]))
        if {"steps", "tokens"} <= columns.keys():
            pair = [_number(path, number, columns[unit], row.get(columns[unit])) for unit in ("steps", "tokens")]
            if pair[0] is not None and pair[1] is not None:
                found.tokens[pair[0]] = pair[1]
    if not known:
        raise InputError(f"{path} holds no rows")
    for metric in metrics:
        if not values[metric]:
            raise InputError(f"{path}: no column {metric!r}{nearest(metric, list(known)[:200])[:400]}")
        found.points[metric] = sorted(values[metric].items())
    if back:
        found.notes.append(
            f"{path}: {x} go back {back} times, as of a run that was resumed; of each the last line counts"
        )
    return found


def _number(path: Path, line: int, name: str, value: Any) -> float | None:
    """None: an empty cell. JSON has no NaN: null is one of a metric that was not finite. Raises: InputError."""
    if isinstance(value, str):
        if not value.strip():
            return None
        try:
            return float(value)
        except ValueError:
            raise InputError(f"{path}, line {line}: {name}: {value[:40]!r} is no number") from None
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{path}, line {line}: {name}: {str(value)[:40]!r} is no number")
    try:
        return float(value)
    except OverflowError:
        return math.inf
