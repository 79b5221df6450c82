"""What the data allows the trunk to do next: computed when something that it follows from changed, and not in every pass.

To compute it every token shard is opened. The result is noted in the ledger, where ``factory status`` reads how much is missing.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from factory.ledger.anomalies import CLOSED, FREED, QUARANTINED
from factory.ledger.plant import Plant
from factory.ledger.removals import REMOVED, RETURNED, SHARD_ERASED
from factory.ledger.writing import record_once
from factory.training.planning import Trunk, next_trunk
from factory.watching.status import AHEAD

_computed: dict[Path, tuple[Any, Trunk]] = {}


def trunk_ahead(plant: Plant) -> Trunk:
    """As ``next_trunk``. Raises: ConfigError."""
    follows_from = _follows_from(plant)
    known = _computed.get(plant.workspace.root)
    if known is None or known[0] != follows_from:
        trunk = next_trunk(plant)
        record_once(plant.ledger, AHEAD, "daemon", asdict(trunk))
        known = _computed[plant.workspace.root] = (follows_from, trunk)
    return known[1]


def _follows_from(plant: Plant) -> Any:
    """The token shards there are, the segments by state, the documents that are masked, and the recipe: each as little as tells a change."""
    with plant.ledger.snapshot() as db:
        shards = db.read("SELECT COUNT(*) AS n, MAX(created_at) AS newest FROM token_shards WHERE tokens > 0")
        segments = db.read("SELECT state, COUNT(*) AS n, MAX(id) AS newest FROM segments GROUP BY state ORDER BY state")
        kinds = ", ".join(f"'{kind}'" for kind in (QUARANTINED, FREED, CLOSED, REMOVED, RETURNED, SHARD_ERASED))
        masked = db.read(f"SELECT COUNT(*) AS n FROM events WHERE kind IN ({kinds})")
    return shards, segments, masked, hashlib.sha256(plant.workspace.recipe_path().read_bytes()).hexdigest()
