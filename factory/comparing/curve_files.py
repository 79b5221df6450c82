"""Reads a run's metrics as curves, from CSV, TSV, JSON lines or a trainer_state.json of any origin, or from our segments.

Columns are recognised by the names that tools use, in upper or lower case: W&B's "run - train/loss" and "Step", TensorBoard's "Value" and
"Wall time", the rows of ``log_history`` in transformers' trainer_state.json. An error names the file and the line.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from factory.core.errors import InputError, suggest_name
from factory.data.metrics import read_metrics
from factory.ledger.rows import SegmentRow
from kernels.contract.message import Message

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
BOUNDS = ("__min", "__max")  # endings that W&B adds to a smoothed metric's name
OTHER_SPLITS = ("eval", "val", "valid", "validation", "test")  # the metric 'loss' does not mean a column 'eval/loss'


@dataclass
class RunCurves:
    """A run's curves. ``points``: by metric, [(x, value)] with rising x; NaN and infinities are kept. ``tokens``: by step, where known."""

    name: str
    points: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    tokens: dict[float, float] = field(default_factory=dict)
    decimals: dict[str, int] = field(default_factory=dict)  # by metric, the most digits after the point in the file
    notes: list[str] = field(default_factory=list)


def read_curve_file(path: Path, x: str, metrics: Sequence[str], x_column: str | None = None) -> RunCurves:
    """Return the curves of ``metrics`` in a file. ``x``: 'steps' or 'tokens'. ``x_column``: the column of x, if its name is unusual.

    Raises: InputError with the file and the line.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise InputError(
                "curve_files.large_file",
                "{file} has more than {most} MiB. Write the compared columns to a smaller file.",
                file=path,
                most=MOST_BYTES >> 20,
            )
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
        raise InputError(
            "curve_files.file_not_utf8",
            "{file} is not UTF-8 at byte {byte}. Give CSV or JSON lines in UTF-8.",
            file=path,
            byte=error.start,
        ) from error
    except OSError as error:
        raise InputError(
            "curve_files.unreadable", "{file} cannot be read: {reason}", file=path, reason=error.strerror
        ) from error


def read_segment_curves(rows: Sequence[SegmentRow], name: str, x: str, metrics: Sequence[str]) -> RunCurves:
    """Return the curves of consecutive segments. Raises: InputError for a metric that no segment has."""
    lines: list[dict[str, Any]] = []
    for row, child in zip(rows, [*rows[1:], None]):
        lines += [line for line in read_metrics(row) if child is None or line["step"] < child.first_step]
    if not lines:
        raise InputError(
            "curve_files.no_metrics",
            "{segment} has no metrics yet in {file}.",
            segment=name,
            file=Path(rows[-1].folder) / "metrics.jsonl",
        )
    return _curves(Path(name), iter(enumerate(lines, 1)), x, metrics)


def _is_one_value(head: str) -> bool:
    """Return whether a file is one JSON value, such as a trainer_state.json, and not one line of JSON for each step."""
    if head.startswith("["):
        return True
    first = head.split("\n", 1)[0]
    try:
        return "log_history" in json.loads(first)
    except (ValueError, RecursionError):  # indented over many lines, or longer than the head
        return "\n" not in head.strip() or first.strip() == "{"


def _rows_of_one_value(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the objects of a JSON array or of ``log_history``, numbered from 1."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(
            "curve_files.not_json", "{file} is not JSON: {reason}", file=path, reason=str(error)[:200]
        ) from None
    rows = value.get("log_history", [value]) if isinstance(value, dict) else value
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise InputError(
            "curve_files.no_list",
            "{file} does not have a list of objects, neither at the top nor under 'log_history'.",
            file=path,
        )
    yield from enumerate(rows, 1)


def _json_rows(path: Path, file: Iterator[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(
                "curve_files.line_not_json",
                "{file}, line {line} is not JSON: {reason}",
                file=path,
                line=number,
                reason=str(error)[:200],
            ) from None
        if not isinstance(row, dict):
            raise InputError(
                "curve_files.line_not_object",
                "{file}, line {line} is not a JSON object but a {type}.",
                file=path,
                line=number,
                type=type(row).__name__,
            )
        yield number, row


def _table_rows(path: Path, file: Iterator[str], head: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    first = head.split("\n", 1)[0]
    delimiter = "\t" if "\t" in first else ";" if first.count(";") > first.count(",") else ","
    reader = csv.reader(file, delimiter=delimiter, strict=True)
    try:
        names = [name.strip() for name in next(reader, [])]
        if len(set(names)) < len(names):
            raise InputError(
                "curve_files.column_twice",
                "{file}, line 1: column {column!r} occurs more than once.",
                file=path,
                column=max(names, key=names.count),
            )
        for row in reader:
            if row and len(row) != len(names):
                raise InputError(
                    "curve_files.other_width",
                    "{file}, line {line} has {values:,|value|values}, but line 1 has {columns:,|column|columns}.",
                    file=path,
                    line=reader.line_num,
                    values=len(row),
                    columns=len(names),
                )
            if row:
                yield reader.line_num, dict(zip(names, row))
    except csv.Error as error:
        raise InputError(
            "curve_files.bad_csv", "{file}, line {line}: {reason}", file=path, line=reader.line_num, reason=error
        ) from None


def find_column(metric: str, names: Sequence[str]) -> str | None:
    """Return the column of a metric; None if no column fits. The rules, in this order: the same name; the name in another case; W&B's "run -
    metric"; a name with the metric as its last part ('train/loss' for 'loss', but never 'eval/loss'); TensorBoard's only "Value".

    Raises: ValueError with the columns, if several columns fit one rule.

    >>> find_column("loss", ["Step", "run - train/loss", "run - train/loss__MIN"]), find_column("loss", ["Wall time", "Step", "Value"])
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
    """Return the column of steps or tokens in a row, ignoring case; None without such a column."""
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
            hint = (
                Message(
                    "curve_files.other_unit",
                    "The file has column {column!r} instead. To compare by that column, add '--x {unit}'.",
                    column=columns[other],
                    unit=other,
                )
                if other
                else Message("curve_files.name_column", "Give the column's name: '--step-column NAME'")
            )
            raise InputError(
                "curve_files.no_x_column",
                "{file}, line {line} has no column {wanted}. The columns are: {columns}. {hint}",
                file=path,
                line=number,
                wanted=repr(x_column) if x_column else f"of {x} ({', '.join(X_NAMES[x][:4])} …)",
                columns=[repr(one) for one in list(row)[:12]],
                hint=hint,
            )
        at = _number(path, number, columns[x], row[columns[x]])
        if at is None or not math.isfinite(at):
            raise _not_a_number(path, number, columns[x], row[columns[x]])
        again += any(at in points for points in values.values())
        back += at < last
        last = at
        for metric in metrics:
            if fresh and metric not in sources:
                try:
                    source = find_column(metric, [name for name in row if name not in columns.values()])
                except ValueError as several:
                    raise InputError(
                        "curve_files.several_columns",
                        "{file}: several columns fit {metric!r}: {columns}. Choose one of them: --metric '{metric}=COLUMN'",
                        file=path,
                        metric=metric,
                        columns=str(several),
                    ) from None
                sources |= {metric: source} if source else {}
            cell = row.get(sources.get(metric, metric))
            if sources.get(metric) in row and (value := _number(path, number, metric, cell)) is not None:
                values[metric][at] = value  # the last line of a step counts, because a resumed run may log a step twice
                written = str(cell).lower()
                if math.isfinite(value) and "e" not in written:
                    found.decimals[metric] = max(found.decimals.get(metric, 0), len(written.partition(".")[2]))
        if {"steps", "tokens"} <= columns.keys():
            pair = [_number(path, number, columns[unit], row.get(columns[unit])) for unit in ("steps", "tokens")]
            if pair[0] is not None and pair[1] is not None:
                found.tokens[pair[0]] = pair[1]
    if not known:
        raise InputError("curve_files.no_rows", "{file} has no rows.", file=path)
    for metric in metrics:
        if not values[metric]:
            raise InputError(
                "curve_files.no_column",
                "{file} has no column {column!r}{nearest}",
                file=path,
                column=metric,
                nearest=suggest_name(metric, list(known)[:200])[:400],
            )
        found.points[metric] = sorted(values[metric].items())
        if sources[metric] != metric:
            found.notes.append(
                Message(
                    "curve_files.column",
                    "{file}: {metric} is read from column {column!r}",
                    file=path,
                    metric=metric,
                    column=sources[metric],
                )
            )
    if back:
        found.notes.append(
            Message(
                "curve_files.goes_back",
                "{file}: the {x} go back {times:,|time|times}, as in a resumed run. For {x} that occur more than once, "
                "the factory uses the last line.",
                file=path,
                x=x,
                times=back,
            )
        )
    return found


def _number(path: Path, line: int, name: str, value: Any) -> float | None:
    """Return a cell as a number; None for an empty cell. JSON's null becomes NaN, because JSON has no NaN. Raises: InputError."""
    if isinstance(value, str):
        if not value.strip():
            return None
        try:
            return float(value)
        except ValueError:
            raise _not_a_number(path, line, name, value) from None
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _not_a_number(path, line, name, value)
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _not_a_number(path: Path, line: int, column: str, value: Any) -> InputError:
    return InputError(
        "curve_files.not_a_number",
        "{file}, line {line}, column {column}: {value!r} is not a number.",
        file=path,
        line=line,
        column=column,
        value=str(value)[:40],
    )
