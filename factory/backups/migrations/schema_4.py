"""Stores the group of each document, and the half of each held-out document. Before, both were computed from the source whenever they were needed."""

from __future__ import annotations

import hashlib

import sqlalchemy as sa
from alembic import op

from factory.ledger.ledger import metadata

revision = "4"
down_revision = "3"


def upgrade() -> None:
    tx = op.get_bind()
    if tx.dialect.name == "sqlite":
        # ``create_triggers`` makes the trigger again afterwards. With the trigger, the journal would get a useless line for each document.
        tx.exec_driver_sql('DROP TRIGGER IF EXISTS "update_documents"')
    op.add_column("documents", sa.Column("group_key", sa.Text))
    op.add_column("documents", sa.Column("facts", sa.JSON))
    op.add_column("token_shards", sa.Column("moved", sa.JSON))
    tx.exec_driver_sql("UPDATE documents SET group_key = source WHERE source <> ''")
    index = next(one for one in metadata.tables["documents"].indexes if one.name == "documents_by_group")
    index.create(tx)
    op.alter_column("held_out", "source", new_column_name="group_key")  # a source, or the key of a document without one
    op.add_column("held_out", sa.Column("sealed", sa.Boolean, nullable=False, server_default=sa.false()))
    held_out = sa.table("held_out", sa.column("group_key", sa.Text), sa.column("sealed", sa.Boolean))
    for (group,) in tx.execute(sa.select(held_out.c.group_key).distinct()).all():
        tx.execute(held_out.update().where(held_out.c.group_key == group).values(sealed=_was_sealed(group)))
    metadata.tables["relabels"].create(tx)


def _was_sealed(cluster: str) -> bool:
    """Return whether a cluster is in the sealed half, computed as before this schema."""
    return hashlib.sha256(f"half:{cluster}".encode()).digest()[0] % 2 == 0
