"""Makes stored paths relative to the workspace, and gives the ledger an identity. From now on, SQLite records changed rows for the journal."""

from __future__ import annotations

import uuid
from pathlib import Path

import sqlalchemy as sa
from alembic import op

from factory.ledger.ledger import metadata
from factory.ledger.stored_paths import JSON_PATH_COLUMNS, PLACES, to_stored_path, to_stored_paths

revision = "3"
down_revision = "2"


def upgrade() -> None:
    tx = op.get_bind()
    roots = [Path(root) for root in op.get_context().opts["roots"]]
    there = set(sa.inspect(tx).get_table_names())
    for table in (table for table in metadata.sorted_tables if table.name in there):
        key = next(iter(table.primary_key.columns), None)
        for column in table.columns:
            if key is None or column.name not in PLACES | JSON_PATH_COLUMNS:
                continue
            for value, held in tx.execute(sa.select(key, column)).all():
                new = held
                for root in roots if held else ():
                    new = to_stored_paths(root, new) if column.name in JSON_PATH_COLUMNS else to_stored_path(root, new)
                if new != held:
                    tx.execute(table.update().where(key == value).values({column: new}))
    _averages(tx, roots)
    meta = metadata.tables["meta"]
    tx.execute(meta.insert().values(key="identity", value=uuid.uuid4().hex))


def _averages(tx: sa.Connection, roots: list[Path]) -> None:
    """Make the paths of averaged checkpoints relative. They are in the event that planned the average."""
    events = metadata.tables["events"]
    for number, detail in tx.execute(
        sa.select(events.c.id, events.c.detail).where(events.c.kind == "segment_planned")
    ).all():
        if "average" in (detail or {}):
            for root in roots:
                detail = to_stored_paths(root, detail)
            tx.execute(events.update().where(events.c.id == number).values(detail=detail))
