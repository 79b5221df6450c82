"""Adds the column ``computing`` to the table of segments. It is null for segments that were planned before this schema."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "2"
down_revision = None


def upgrade() -> None:
    op.add_column("segments", sa.Column("computing", sa.JSON(none_as_null=True)))
