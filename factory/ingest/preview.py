"""``factory ingest --preview``: how the first rows of a file are read, before anything is stored.

What a mapping got wrong cannot be taken back by another ingest: the same texts are copies then.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from agents.core.untrusted import one_line
from factory.core.workspace import Workspace
from factory.ingest.document import BadRow, Content, Row
from factory.ingest.packing import Pack, rows_of
from factory.ingest.rules.policy import DataPolicy
from factory.ingest.shapes.chats import carries_loss
from factory.ingest.shapes.told import Told, refuse_missing_columns, row_lines
from factory.ingest.store import held_back, totals
from factory.ingest.tokenizer import shows_calls
from factory.ingest.worker import read_row

ROWS = 1000  # that are read
SHOWN = 3  # documents that are shown
_LONGEST = 240  # characters of a text that are shown


@dataclass(frozen=True)
class Preview:
    """``counts``: as of a shard, of the rules that look at one row. ``whole``: every row was read. ``shown``: the first documents."""

    name: str
    rows: int
    whole: bool
    counts: dict[str, Any]
    shown: list[tuple[Row, Content]]

    def to_json(self) -> dict[str, Any]:
        shown = [
            {"row": row.number, "id": row.id if row.id != row.key else None, "domain": row.domain, "source": row.source,
             "license": row.license, "group": row.group_key} | content
            for row, content in self.shown
        ]  # fmt: skip
        return {"name": self.name, "rows": self.rows, "whole": self.whole, "counts": self.counts, "shown": shown}

    def lines(self) -> Iterator[str]:
        """For a person."""
        read = f"{self.rows:,} {'row' if self.rows == 1 else 'rows'}" if self.whole else f"the first {self.rows:,} rows"
        kept, dropped = self.counts["train"], sum(self.counts["dropped"].values())
        yield f"{self.name}: {read} read: {kept:,} would be documents, {dropped:,} would be dropped"
        yield from (f"  {line}" for line in row_lines(self.counts))
        for row, content in self.shown:
            names = {"domain": row.domain, "source": row.source, "licence": row.license, "group": row.group_key}
            identity = f", id {row.id}" if row.id != row.key else ""
            named = ", ".join(f"{name} {one_line(value, 60) if value else '–'}" for name, value in names.items())
            yield f"  row {row.number}: {named}{one_line(identity, 60)}"
            yield from (f"    {line}" for line in _words(content))


def preview(workspace: Workspace, pack: Pack) -> Preview:
    """Read at most ``ROWS`` rows, by the rules that look at one row. Copies, and what shares words with held-out documents, are found at ingest.

    Raises: ShardProblem where the file cannot be read; InputError where a mapping names a column that none of these rows has.
    """
    policy = DataPolicy.load(workspace.policy("data.yaml"))
    told, rows, shown = Told(), list[Row](), list[tuple[Row, Content]]()
    plain = not shows_calls(workspace.tokenizer)
    raw_rows = rows_of(pack, policy.limits)
    for raw in islice(raw_rows, ROWS):
        key = f"preview:{len(rows)}"
        rows.append(row := Row(len(rows), key, key, "unknown"))
        try:
            content = read_row(policy, row, raw, pack.name, told, plain)
        except BadRow as bad:
            row.drop(bad.rule, bad.detail)
            continue
        if row.barred:
            row.drop("licence", row.barred)
            continue
        row.fate = "train"
        shown += [(row, content)] * (len(shown) < SHOWN)
    whole = next(raw_rows, None) is None
    refuse_missing_columns(told, policy.fields, pack.name)
    counts = totals(rows)["counts"] | told.counts()
    held = held_back(rows, policy.licences)
    return Preview(pack.name, len(rows), whole, counts | ({"not_releasable": held} if held else {}), shown)


def _words(content: Content) -> Iterator[str]:
    if "text" in content:
        yield one_line(content["text"], _LONGEST)
        return
    for turn in content["messages"]:
        loss = " (loss)" if carries_loss(turn) else ""
        yield f"{turn['role']}{loss}: {one_line(turn['content'], _LONGEST)}"
