"""Counts the server's events, and formats the counters for Prometheus (text format 0.0.4).

A separate file, because its texts describe metrics and are not messages.
"""

from __future__ import annotations

from collections import Counter

HELP = {  # name of the metric: (type, description)
    "factory_serve_requests_total": ("counter", "Requests answered, by status."),
    "factory_serve_request_seconds_sum": (
        "counter",
        "Sum of the seconds from a request to the last byte of its answer.",
    ),
    "factory_serve_request_seconds_count": ("counter", "Requests counted in factory_serve_request_seconds_sum."),
    "factory_serve_retries_total": (
        "counter",
        "Requests sent to another engine because the first engine ended before it sent a byte.",
    ),
    "factory_serve_broken_streams_total": ("counter", "Streams that ended with an error because their engine ended."),
    "factory_serve_engine_ends_total": ("counter", "Current engines that ended or became unhealthy."),
    "factory_serve_swaps_total": ("counter", "Engines that became current, by release."),
    "factory_serve_failures_total": ("counter", "Engines that failed before they became current, by stage."),
    "factory_serve_in_flight": ("gauge", "Requests in flight, by release."),
    "factory_serve_release": ("gauge", "The release that answers new requests; 0 if none."),
    "factory_serve_export_changed": (
        "gauge",
        "1 if the files of the served export differ from the released export, else 0.",
    ),
    "factory_serve_champion": ("gauge", "The champion of the ledger; 0 if none."),
}


class ServerMetrics:
    """Counts events for each metric and set of labels."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()

    def add_to_counter(self, name: str, amount: float = 1, **labels: object) -> None:
        """Add ``amount`` to a counter that ``HELP`` lists."""
        assert name in HELP, name
        self._counts[name, _labels(labels)] += amount  # type: ignore[assignment]

    def format_metrics_page(self, gauges: list[tuple[str, dict[str, object], float]]) -> str:
        """Return the metrics page: all counters and ``gauges``, each as (name, labels, value)."""
        values = {**self._counts, **{(name, _labels(labels)): value for name, labels, value in gauges}}
        lines = []
        for name, (kind, description) in HELP.items():
            lines += [f"# HELP {name} {description}", f"# TYPE {name} {kind}"]
            found = [f"{name}{labels} {value:g}" for (other, labels), value in sorted(values.items()) if other == name]
            lines += found or ([f"{name} 0"] if kind == "counter" else [])
        return "\n".join(lines) + "\n"


def _labels(labels: dict[str, object]) -> str:
    inner = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
    return f"{{{inner}}}" if inner else ""
