"""The facts of ``factory status`` as numbers, in Prometheus' text format, on the loopback address: ``metrics_port`` in ``factory.yaml``."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from factory.core.errors import ConfigError, FactoryError
from factory.core.workspace import Workspace
from factory.status.status import facts

ADDRESS = "127.0.0.1"
FORMAT = "text/plain; version=0.0.4; charset=utf-8"


def text(found: dict[str, Any]) -> str:
    """One line a number, each kind with what it says."""
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
    one("daemon_running", "1 while a process holds the model loop's lock.", int(found["daemon"]["running"]))
    one("training", "1 while a segment is planned and not done.", int(bool(row)))
    for key, about in (
        ("step", "Steps done of the trunk's count."), ("last_step", "Step after which the segment ends."), ("loss", "Of the newest step."),
        ("tokens_per_s", "Median of the newest steps."), ("eta_seconds", "Until the segment ends."), ("seconds_since_step", "Since the newest step."),
        ("mfu", "Median of the newest steps: share of the data sheets' peak, of known GPUs alone."),
        ("attempts", "Deaths of the trainer since its newest checkpoint."),
    ):  # fmt: skip
        one(f"segment_{key}", f"Of the segment that trains: {about}", row.get(key))
    count = lambda rows, key: dict(Counter(str(row[key]) for row in rows))
    by("segments", "Segments by state.", "state", count(found["segments"], "state"))
    by("shards", "Shards by state.", "state", count(found["shards"], "state"))
    by("tokens", "Tokens to train on, by domain.", "domain", {d: v["tokens"] for d, v in found["domains"].items()})
    verdicts = [{"outcome": (c["verdict"] or {}).get("outcome", "none")} for c in found["candidates"]]
    by("candidates", "Candidates by verdict.", "outcome", count(verdicts, "outcome"))
    one(
        "champion_release",
        "Number of the release that is champion; 0: none.",
        (found["champion"] or {}).get("number", 0),
    )
    one("inbox_files", "Files in the inbox.", found["waiting_in_inbox"])
    one("missing_tokens", "Tokens that training waits for.", (found["data_ahead"] or {}).get("missing_tokens"))
    one("open_anomalies", "Anomalies that nothing closed.", found["open_anomalies"])
    one("open_verdicts", "Candidates and proposals that are not judged, or held.", len(found["open_verdicts"]))
    one("waiting_for_a_person", "Things that a person is to decide or mend.", len(found["waiting_for_a_person"]))
    one("failing", "Actions that failed and have not worked since.", len(found["failing"]))
    one("last_error_timestamp_seconds", "When the daemon last recorded a failure.", error.get("at"))
    one("disk_free_bytes", "On the workspace's disk.", disk["free"])
    one("disk_total_bytes", "Of the workspace's disk.", disk["total"])
    one("disk_hours_left", "Until the floor is reached, at the rate of the last hours.", disk["hours_left"])
    one("agents_usd", "Spent on language models, in all.", found["spend"]["in_all"]["usd"])
    one("agents_tokens", "Of language models, in all.", found["spend"]["in_all"]["tokens"])
    return "\n".join(lines) + "\n"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


@contextmanager
def serving(workspace: Workspace) -> Iterator[int]:
    """Answer ``GET /metrics`` while the block runs, if the configuration names a port; yields the port, 0: none is served.

    Raises: ConfigError where the port is taken.
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
                status, body = 200, text(facts(workspace))
            except (FactoryError, OSError) as error:  # a locked ledger, a full disk
                status, body = 503, f"{error}\n"
            data = body.encode("utf-8", "backslashreplace")
            self.send_response(status)
            self.send_header("Content-Type", FORMAT)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *words: object) -> None:
            """Nothing: a line for each scrape would fill the log."""

    try:
        server = ThreadingHTTPServer((ADDRESS, port), Handler)
    except OSError as error:
        where = workspace.root / "factory.yaml"
        raise ConfigError(f"{where}: metrics_port: {port} cannot be listened on: {error.strerror}") from error
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
