"""Who is champion: the ledger's word, which MLflow's alias and the served folder follow."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from factory.ledger.ledger import Ledger, candidates, events, releases


def champion(ledger: Ledger) -> dict[str, Any] | None:
    """The release of the newest ``promoted`` or ``rolled_back`` event, with its candidate's export; None before the first."""
    crowned = sa.select(events.c.subject).where(events.c.kind.in_(("promoted", "rolled_back")))
    newest = ledger.one(crowned.order_by(events.c.id.desc()).limit(1))
    return release_row(ledger, int(newest["subject"].removeprefix("release:"))) if newest else None


def release_row(ledger: Ledger, number: int) -> dict[str, Any] | None:
    """A release joined with its candidate (``export_path``, ``export_sha256``, ``segment``), or None."""
    joined = sa.select(releases, candidates.c.export_path, candidates.c.export_sha256, candidates.c.segment)
    return ledger.one(
        joined.join(candidates, candidates.c.id == releases.c.candidate).where(releases.c.number == number)
    )
