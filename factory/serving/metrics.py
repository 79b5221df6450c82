"""Counters as Prometheus reads them (text format 0.0.4)."""

from __future__ import annotations

from collections import Counter

HELP = {
    "factory_serve_requests_total": ("counter", "Requests answered, by status."),
    "factory_serve_request_seconds_sum": ("counter", "Seconds from a request to the last byte of its answer, summed."),
    "factory_serve_request_seconds_count": ("counter", "Requests in that sum."),
    "factory_serve_retries_total": (
        "counter",
        "Requests given to another engine because theirs ended before a byte was sent.",
    ),
    "factory_serve_broken_streams_total": ("counter", "Streams that ended with an error because their engine ended."),
    "factory_serve_engine_ends_total": ("counter", "Engines that ended or became unhealthy while they served."),
    "factory_serve_swaps_total": ("counter", "Engines made current, by release."),
    "factory_serve_failures_total": ("counter", "Engines that could not be made current, by stage."),
    "factory_serve_in_flight": ("gauge", "Requests that are being answered, by release."),
    "factory_serve_release": ("gauge", "The release that new requests go to; 0: none."),
    "factory_serve_export_changed": ("gauge", "1: the files of what is served are not what was released."),
    "factory_serve_champion": ("gauge", "The release that the ledger wants served; 0: none."),
}


class Metrics:
    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()

    def add(self, name: str, amount: float = 1, **labels: object) -> None:
        """Add to a counter of ``HELP``."""
        assert name in HELP, name
        self._counts[name, _labels(labels)] += amount  # type: ignore[assignment]

    def text(self, gauges: list[tuple[str, dict[str, object], float]]) -> str:
        """All counters, and ``gauges`` (name, labels, value) as they are now."""
        values = {**self._counts, **{(name, _labels(labels)): value for name, labels, value in gauges}}
        lines = []
        for name, (kind, words) in HELP.items():
            lines += [f"# HELP {name} {words}", f"# TYPE {name} {kind}"]
            found = [f"{name}{labels} {value:g}" for (other, labels), value in sorted(values.items()) if other == name]
            lines += found or ([f"{name} 0"] if kind == "counter" else [])
        return "\n".join(lines) + "\n"


def _labels(labels: dict[str, object]) -> str:
    inner = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
    return f"{{{inner}}}" if inner else ""
