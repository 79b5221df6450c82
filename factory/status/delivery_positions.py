"""Reads ``notified.json``: the last event delivered to each receiver of notifications. ``factory.show.notifications`` writes the file."""

from __future__ import annotations

import json
from typing import Any

from factory.core.workspace import Workspace

FILE = "notified.json"


def read_delivery_positions(workspace: Workspace) -> dict[str, dict[str, Any]] | None:
    """By receiver: ``event`` and ``at`` of the newest delivered event, and ``failing``, the error of the next delivery. None: unreadable file."""
    path = workspace.root / FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    return found if all(_whole(one) for one in found.values()) else None


def _whole(position: Any) -> bool:
    return (
        isinstance(position, dict)
        and type(position.get("event")) is int
        and 0 <= position["event"] < 1 << 62
        and isinstance(position.get("at"), int | float)
    )
