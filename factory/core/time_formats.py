"""Formats moments and durations, for people and for programs."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

# The keys of JSON output whose values are moments.
MOMENTS = frozenset({"at", "created_at", "finished_at", "since", "doing_since", "ingested_at", "until", "not_before"})


def format_local_time(at: float) -> str:
    """Format a moment (seconds since 1970) in this machine's time zone, for a person."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def format_iso_time(at: float) -> str:
    """Format a moment (seconds since 1970) for a program: ISO 8601 with the offset from UTC.

    >>> datetime.fromisoformat(format_iso_time(1700000000.0)).timestamp()
    1700000000.0
    """
    return datetime.fromtimestamp(at).astimezone().isoformat(timespec="seconds")


def format_duration(seconds: float) -> str:
    """Format a duration for a person.

    >>> format_duration(4.2), format_duration(250), format_duration(7300), format_duration(400000)
    ('4 s', '4 min', '2.0 h', '4.6 days')
    """
    if seconds < 90:
        return f"{max(0.0, seconds):.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.1f} days"


def convert_times_to_iso(value: Any, key: str = "") -> Any:
    """Return JSON-ready data in which each moment (a value under one of ``MOMENTS``) is in ISO 8601.

    >>> convert_times_to_iso({"n": 1.5, "at": None, "rows": [{"at": 0.0}]})["rows"][0]["at"][:3]
    '197'
    """
    if isinstance(value, dict):
        return {name: convert_times_to_iso(part, name) for name, part in value.items()}
    if isinstance(value, list):
        return [convert_times_to_iso(part) for part in value]
    return format_iso_time(value) if key in MOMENTS and isinstance(value, int | float) else value
