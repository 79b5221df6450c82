"""``factory ingest --preview`` shows how ingest would read the first rows of a file, and stores nothing.

A second ingest cannot correct a wrong mapping, because it drops the same texts as copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from agents.core.untrusted import fold_to_one_line
from factory.core.workspace import Workspace
from factory.ingest.document import BadRow, Content, Row, join_parts
from factory.ingest.file_groups import FileGroup, read_file_group_rows
from factory.ingest.ledger_rows import count_release_blockers, summarise_shard_rows
from factory.ingest.rules.policy import DataPolicy
from factory.ingest.shapes.chats import has_loss
from factory.ingest.shapes.row_counts import RowCounts, describe_rows, refuse_missing_columns
from factory.ingest.tokenizer import find_structure, has_template_with_tool_calls
from factory.ingest.worker import read_row
from kernels.contract.message import Message

ROWS = 1000  # a preview reads at most this many rows
SHOWN = 3  # documents that a preview shows
_LONGEST = 240  # characters of a text that a preview shows


@dataclass(frozen=True)
class Preview:
    """How ingest would read a file. ``counts`` has the keys of a shard's counts, for the rules that look at one row. ``is_complete`` says whether
    every row was read. ``shown`` are the first documents."""

    name: str
    rows: int
    is_complete: bool
    counts: dict[str, Any]
    shown: list[tuple[Row, Content]]

    def to_json(self) -> dict[str, Any]:
        shown = [
            {"row": row.number, "id": row.id if row.id != row.key else None, "domain": row.domain, "source": row.source,
             "license": row.license, "group": row.group_key} | content
            for row, content in self.shown
        ]  # fmt: skip
        return {"name": self.name, "rows": self.rows, "whole": self.is_complete, "counts": self.counts, "shown": shown}

    def format_lines(self) -> Iterator[str]:
        """Yield the lines that a person reads."""
        counts = {"train": self.counts["train"], "dropped": sum(self.counts["dropped"].values())}
        known = {"file": self.name, "rows": self.rows, **counts}
        if self.is_complete:
            yield Message(
                "ingest.preview",
                "{file}: {rows:,|row was|rows were} read; {train:,} would become documents, and {dropped:,} would be dropped",
                **known,
            )
        else:
            yield Message(
                "ingest.preview_of_part",
                "{file}: only a first part ({rows:,|row|rows}) was read; {train:,} would become documents, and {dropped:,} "
                "would be dropped",
                **known,
            )
        yield from (f"  {line}" for line in describe_rows(self.counts))
        for row, content in self.shown:
            names = {"domain": row.domain, "source": row.source, "licence": row.license, "group": row.group_key}
            identity = f", id {row.id}" if row.id != row.key else ""
            named = ", ".join(
                f"{name} {fold_to_one_line(value, 60) if value else '–'}" for name, value in names.items()
            )
            yield f"  row {row.number}: {named}{fold_to_one_line(identity, 60)}"
            yield from (f"    {line}" for line in _words(content))


def preview_file_group(workspace: Workspace, group: FileGroup) -> Preview:
    """Read at most ``ROWS`` rows and apply the rules that look at one row. A preview does not find copies, nor documents that share words with
    held-out documents.

    Raises: ShardProblem when the file cannot be read; InputError when a mapping names a column that none of these rows has.
    """
    policy = DataPolicy.load(workspace.policy_path("data.yaml"))
    told, rows, shown = RowCounts(), list[Row](), list[tuple[Row, Content]]()
    plain, structure = not has_template_with_tool_calls(workspace.tokenizer), find_structure(workspace.tokenizer)
    raw_rows = read_file_group_rows(group, policy.limits)
    for raw in islice(raw_rows, ROWS):
        key = f"preview:{len(rows)}"
        rows.append(row := Row(len(rows), key, key, "unknown"))
        try:
            content = read_row(policy, row, raw, group.name, told, plain, structure=structure)
        except BadRow as bad:
            row.drop(bad.rule, bad.detail)
            continue
        if row.licence_refusal:
            row.drop("licence", row.licence_refusal)
            continue
        row.fate = "train"
        shown += [(row, content)] * (len(shown) < SHOWN)
    whole = next(raw_rows, None) is None
    refuse_missing_columns(told, policy.fields, group.name)
    counts = summarise_shard_rows(rows)["counts"] | told.to_shard_counts()
    held = count_release_blockers(rows, policy.licences)
    return Preview(group.name, len(rows), whole, counts | ({"not_releasable": held} if held else {}), shown)


def _words(content: Content) -> Iterator[str]:
    if "text" in content:
        yield fold_to_one_line(content["text"], _LONGEST)
        return
    for turn in content["messages"]:
        loss = " (loss)" if has_loss(turn) else ""
        yield f"{turn['role']}{loss}: {fold_to_one_line(join_parts(turn), _LONGEST)}"
