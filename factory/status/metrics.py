"""Serves the facts of ``factory status`` as numbers in Prometheus' text format, on the loopback address and ``metrics_port``."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from factory.core.errors import ConfigError, FactoryError
from factory.core.workspace import Workspace
from factory.status.status import read_status_facts

ADDRESS = "127.0.0.1"
FORMAT = "text/plain; version=0.0.4; charset=utf-8"


def format_prometheus_text(found: dict[str, Any]) -> str:
    """The facts in Prometheus' text format: one line for each number, and a HELP line for each metric."""
    lines: list[str] = []

    def add(name: str, about: str, values: dict[str, float | int | None]) -> None:
        shown = {labels: value for labels, value in values.items() if value is not None}
        if shown:
            lines.extend((f"# HELP factory_{name} {about}", f"# TYPE factory_{name} gauge"))
            lines.extend(f"factory_{name}{labels} {float(value):.15g}" for labels, value in sorted(shown.items()))

    def one(name: str, about: str, value: float | int | None) -> None:
        add(name, about, {"": value})

    def by(name: str, about: str, label: str, values: Mapping[str, float | int | None]) -> None:
        add(name, about, {f'{{{label}="{_escaped(key)}"}}': value for key, value in values.items()})

    row, disk, error = found["training"] or {}, found["disk"], found["last_error"] or {}
    one(
        "daemon_running",
        "1 while the daemon or another process holds the lock of the model loop.",
        int(found["daemon"]["running"]),
    )
    one("training", "1 while a planned segment is not done.", int(bool(row)))
    for key, about in (
        ("step", "number of its newest step."), ("last_step", "step after which it ends."), ("loss", "loss of its newest step."),
        ("tokens_per_s", "tokens per second, median of its newest steps."), ("eta_seconds", "seconds until it ends."),
        ("seconds_since_step", "seconds since its newest step."),
        ("mfu", "share of the GPU's peak rate (MFU), median of its newest steps; known GPUs only."),
        ("attempts", "deaths of its trainer since its newest checkpoint."),
    ):  # fmt: skip
        one(f"segment_{key}", f"Segment in training: {about}", row.get(key))
    count = lambda rows, key: dict(Counter(str(row[key]) for row in rows))
    by("segments", "Segments by state.", "state", count(found["segments"], "state"))
    by("shards", "Shards by state.", "state", count(found["shards"], "state"))
    by("tokens", "Tokens to train on, by domain.", "domain", {d: v["tokens"] for d, v in found["domains"].items()})
    verdicts = [{"outcome": (c["verdict"] or {}).get("outcome", "none")} for c in found["candidates"]]
    by("candidates", "Candidates by verdict.", "outcome", count(verdicts, "outcome"))
    one(
        "champion_release",
        "Number of the release that is champion; 0: no champion.",
        (found["champion"] or {}).get("number", 0),
    )
    one("inbox_files", "Files in the inbox.", found["waiting_in_inbox"])
    one(
        "missing_tokens",
        "Number of tokens that are missing before training can go on.",
        (found["data_ahead"] or {}).get("missing_tokens"),
    )
    one("open_anomalies", "Anomalies that are not closed.", found["open_anomalies"])
    one("open_verdicts", "Candidates and proposals that are not judged yet, or held.", len(found["open_verdicts"]))
    one(
        "waiting_for_a_person",
        "Number of things that wait for a person's decision or repair.",
        len(found["waiting_for_a_person"]),
    )
    one("failing", "Actions that failed and have not succeeded since.", len(found["failing"]))
    one(
        "last_error_timestamp_seconds",
        "Time of the last failure that the daemon recorded, in seconds since 1970.",
        error.get("at"),
    )
    one("disk_free_bytes", "Free bytes on the workspace's disk.", disk["free"])
    one("disk_total_bytes", "Size of the workspace's disk in bytes.", disk["total"])
    one(
        "disk_hours_left",
        "Hours until the free space reaches the floor, at the rate of the last hours.",
        disk["hours_left"],
    )
    one("agents_usd", "Total money spent on language models, in USD.", found["spend"]["in_all"]["usd"])
    one("agents_tokens", "Total tokens of language models.", found["spend"]["in_all"]["tokens"])
    return "\n".join(lines) + "\n"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


@contextmanager
def serve_metrics(workspace: Workspace) -> Iterator[int]:
    """Answer ``GET /metrics`` while the block runs, if ``metrics_port`` is set. Yields the port, or 0 if nothing is served.

    Raises: ConfigError where the port is in use.
    """
    port = workspace.config.metrics_port
    if not port:
        yield 0
        return

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.split("?")[0] not in ("/metrics", "/"):
                self.send_error(404)
                return
            try:
                status, body = 200, format_prometheus_text(read_status_facts(workspace))
            except (FactoryError, OSError) as error:  # a locked ledger, a full disk
                status, body = 503, f"{error}\n"
            data = body.encode("utf-8", "backslashreplace")
            self.send_response(status)
            self.send_header("Content-Type", FORMAT)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *words: object) -> None:
            """Print nothing, because a line for each scrape would fill the log."""

    try:
        server = ThreadingHTTPServer((ADDRESS, port), Handler)
    except OSError as error:
        where = workspace.root / "factory.yaml"
        raise ConfigError(
            "metrics.port_in_use",
            "The factory cannot listen on port {port} (metrics_port in {file}): {reason}",
            file=where,
            port=port,
            reason=error.strerror,
        ) from error
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
