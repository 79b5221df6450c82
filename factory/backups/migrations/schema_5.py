"""Adds the table ``runs``, for training runs that belong to no segment."""

from __future__ import annotations

from alembic import op

from factory.ledger.ledger import metadata

revision = "5"
down_revision = "4"


def upgrade() -> None:
    metadata.tables["runs"].create(op.get_bind())
