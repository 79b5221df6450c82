"""Reads the metrics of a segment's steps that its trainer wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from factory.core.untrusted_trainer_files import LinesMemory, iterate_lines, open_regular_file, parse_json
from factory.ledger.rows import SegmentRow


def read_metrics(row: SegmentRow) -> list[dict[str, Any]]:
    """Return the readable lines of a segment's metrics, in the order of the steps. If a step has several lines, only the newest is returned.

    Lines after those that need too much memory are not read.
    """
    found: dict[int, dict[str, Any]] = {}
    memory = LinesMemory()
    try:
        with open_regular_file(Path(row.folder) / "metrics.jsonl") as file:
            for line in iterate_lines(file):
                try:
                    memory.add(line)
                except ValueError:
                    break
                try:
                    one = parse_json(line)
                    if (
                        row.first_step <= one["step"] < row.last_step
                        and one["supervised_tokens"] >= 0
                        and one["time"] > 0
                    ):
                        found[one["step"]] = one
                except (ValueError, KeyError, TypeError):
                    continue
    except OSError:
        return []
    return [found[step] for step in sorted(found)]
