"""A run's metrics as curves: from CSV, TSV, JSON lines or a trainer_state.json that anyone wrote, or from our segments.

Columns are found as the tools export them, in any case: W&B's "run - train/loss" beside "Step", TensorBoard's "Value" beside "Wall time", the
rows of ``log_history`` in transformers' trainer_state.json. What is wrong is named with file and line.
"""

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

STEP_NAMES = [
    "step",
    "steps",
    "_step",
    "global_step",
    "iteration",
    "iter",
    "train/step",
    "train/global_step",
    "trainer/global_step",
]
TOKEN_NAMES = [
    "tokens",
    "_tokens",
    "tokens_seen",
    "total_tokens",
    "num_tokens",
    "train/tokens",
    "throughput/total_tokens",
]
MOST_BYTES = 1 << 30
X_NAMES = {"steps": STEP_NAMES, "tokens": TOKEN_NAMES}
BOUNDS = ("__min", "__max")  # what W&B adds to a smoothed metric's name
OTHER_SPLITS = ("eval", "val", "valid", "validation", "test")  # 'eval/loss' is not what 'loss' asks for


@dataclass
class RunCurves:
    """``points``: by metric, [(x, value)] with x rising; NaN and infinities are kept. ``tokens``: by step, where both are known."""

    name: str
    points: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    tokens: dict[float, float] = field(default_factory=dict)
    decimals: dict[str, int] = field(default_factory=dict)  # most digits after the point that a metric was written with
    notes: list[str] = field(default_factory=list)


def read_file(path: Path, x: str, metrics: Sequence[str], x_column: str | None = None) -> RunCurves:
    """Curves of these columns. ``x``: 'steps' or 'tokens'; ``x_column``: its column, where no usual name finds it.

    Raises: InputError that names the file and the line.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise InputError(f"{path} has more than {MOST_BYTES >> 20} MiB: take out the columns that are compared")
        with open(path, encoding="utf-8-sig", newline="") as file:
            head = file.read(1 << 16).lstrip()
            file.seek(0)
            if not head.startswith(("{", "[")):
                rows = _table_rows(path, file, head)
            elif _is_one_value(head):
                rows = _rows_of_one_value(path, file.read())
            else:
                rows = _json_rows(path, file)
            return _curves(path, rows, x, metrics, x_column)
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


def _is_one_value(head: str) -> bool:
    """Is the file one JSON value, such as a trainer_state.json, and not a line of JSON for each step?"""
    if head.startswith("["):
        return True
    first = head.split("\n", 1)[0]
    try:
        return "log_history" in json.loads(first)
    except (ValueError, RecursionError):  # indented over many lines, or longer than the head
        return "\n" not in head.strip() or first.strip() == "{"


def _rows_of_one_value(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Objects of a JSON array, or of ``log_history``; numbered from 1, as lines are."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON: {str(error)[:200]}") from None
    rows = value.get("log_history", [value]) if isinstance(value, dict) else value
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise InputError(f"{path}: expected a list of objects, in the file or under 'log_history'")
    yield from enumerate(rows, 1)


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


def column_of(metric: str, names: Sequence[str]) -> str | None:
    """Which of a table's columns a metric is; None: none. The exact name wins, then the name in another case, then W&B's "run - metric", then a
    name whose last part it is ('loss' in 'train/loss', never in 'eval/loss'), then TensorBoard's only "Value".

    Raises: ValueError with the columns, where several fit alike.

    >>> column_of("loss", ["Step", "run - train/loss", "run - train/loss__MIN"]), column_of("loss", ["Wall time", "Step", "Value"])
    ('run - train/loss', 'Value')
    """
    if metric in names:
        return metric
    asked = metric.casefold()
    plain = {name: name.casefold() for name in names if not name.casefold().endswith(BOUNDS)}
    of_run = {name: low.rpartition(" - ")[2] for name, low in plain.items()}
    split = lambda low: low.rpartition("/")
    for fits in (
        [name for name, low in plain.items() if low == asked],
        [name for name, low in of_run.items() if low == asked],
        [n for n, low in of_run.items() if split(low)[2] == asked and split(low)[0] not in OTHER_SPLITS],
        [name for name, low in plain.items() if low == "value" and "wall time" in plain.values()],
    ):
        if len(fits) > 1:
            raise ValueError(", ".join(map(repr, fits[:6])))
        if fits:
            return fits[0]
    return None


def _x_column(unit: str, row: Mapping[str, Any], named: str | None) -> str | None:
    """The column of steps or tokens in a row, in any case."""
    low = {name.casefold().strip(): name for name in reversed(list(row))}
    wanted = [named.casefold().strip()] if named else X_NAMES[unit]
    return next((low[one] for one in wanted if one in low), None)


def _curves(
    path: Path,
    rows: Iterator[tuple[int, Mapping[str, Any]]],
    x: str,
    metrics: Sequence[str],
    x_column: str | None = None,
) -> RunCurves:
    found = RunCurves(str(path))
    columns: dict[str, str] = {}  # by unit
    sources: dict[str, str] = {}  # column by metric
    known: dict[str, None] = {}
    values: dict[str, dict[float, float]] = {metric: {} for metric in metrics}
    last, again, back = -math.inf, 0, 0
    for number, row in rows:
        fresh = not known.keys() >= row.keys()
        known |= dict.fromkeys(row)
        for unit in X_NAMES:
            if unit not in columns and (name := _x_column(unit, row, x_column if unit == x else None)):
                columns[unit] = name
        if columns.get(x) not in row:
            other = next((unit for unit in columns if unit != x), None)
            hint = f"it has {columns[other]!r}: compare by --x {other}" if other else "name it with --step-column"
            named = ", ".join(map(repr, list(row)[:12]))
            wanted = repr(x_column) if x_column else f"of {x} ({', '.join(X_NAMES[x][:4])} …)"
            raise InputError(f"{path}, line {number}: no column {wanted} among {named}; {hint}")
        at = _number(path, number, columns[x], row[columns[x]])
        if at is None or not math.isfinite(at):
            raise InputError(f"{path}, line {number}: {columns[x]}: {str(row[columns[x]])[:40]!r} is no number")
        again += any(at in points for points in values.values())
        back += at < last
        last = at
        for metric in metrics:
            if fresh and metric not in sources:
                try:
                    source = column_of(metric, [name for name in row if name not in columns.values()])
                except ValueError as several:
                    raise InputError(
                        f"{path}: several columns could be {metric!r}: {several}; name one, as in --metric '{metric}=COLUMN'"
                    ) from None
                sources |= {metric: source} if source else {}
            cell = row.get(sources.get(metric, metric))
            if sources.get(metric) in row and (value := _number(path, number, metric, cell)) is not None:
                values[metric][at] = value  # of a step that is there twice the last: a run that was resumed
                written = str(cell).lower()
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
        if sources[metric] != metric:
            found.notes.append(f"{path}: {metric} is its column {sources[metric]!r}")
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
