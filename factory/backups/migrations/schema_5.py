"""A new table ``runs``, for training runs outside the segments."""

from __future__ import annotations

from alembic import op

from factory.ledger.ledger import metadata

revision = "5"
down_revision = "4"


def upgrade() -> None:
    metadata.tables["runs"].create(op.get_bind())
