"""Starts MLflow's own tracking server for a test, on loopback, with its own store and artifacts."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from factory.show.mlflow.store import ENVIRONMENT
from tests.support.patience import PATIENCE_S

EXPERIMENTS = "/api/2.0/mlflow/experiments/search?max_results=1"


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def answering(command: Sequence[str], environment: Mapping[str, str], address: str, folder: Path) -> Iterator[None]:
    """Run ``command`` during the block. The block starts when the server answers at ``address`` (a refusal is an answer)."""
    log = folder / "mlflow-server.log"
    with open(log, "wb") as output:
        server = subprocess.Popen(
            command, env=os.environ | ENVIRONMENT | environment, stdout=output, stderr=output, cwd=folder,
            start_new_session=True,
        )  # fmt: skip
        try:
            deadline = time.monotonic() + PATIENCE_S
            while True:
                try:
                    httpx.get(address + EXPERIMENTS, timeout=10)
                    break
                except httpx.HTTPError:
                    assert time.monotonic() < deadline and server.poll() is None, log.read_text()
                    time.sleep(0.5)
            yield
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


@contextmanager
def mlflow_server(folder: Path) -> Iterator[str]:
    """Run a server; yields its address. Clients send and fetch artifacts over HTTP, as with a team's server."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    command = [
        sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
        "--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}", "--artifacts-destination", str(folder / "artifacts"),
    ]  # fmt: skip
    address = f"http://127.0.0.1:{port}"
    with answering(command, {}, address, folder):
        yield address
