"""Runs engines. An engine is one process that serves one export on its own Unix socket, which other users cannot access."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from factory.core.errors import FactoryError
from factory.core.launching import make_parent_death_hook
from factory.core.untrusted_trainer_files import read_tail
from factory.core.workspace import find_checkout_root
from factory.serving.champion import Champion
from kernels.contract.message import Message

LOG_BYTES = 64 << 10  # how much of the end of a log is read
POLL_SECONDS = 0.1
END_SECONDS = 2.0
STOP_SECONDS = 10.0  # an engine that takes longer to end is killed; it has no requests that could be lost


class EngineError(FactoryError):
    """An engine could not be started, or ended."""


@dataclass(frozen=True)
class EngineKind:
    """Describes how to start the engines of one kind."""

    name: str
    command: Callable[[Path, str], list[str]]  # (export, socket) → command line
    environment: dict[str, str]
    tolerance: float  # the most nats by which its log-probabilities may differ from those of the judge
    adapt: Callable[[str, bytes, Path], bytes]  # (path, body, export) → the body for the engine; raises ApiError


def make_native_engine_kind() -> EngineKind:
    """Return the embedded engine. It computes in fp32, on a GPU if the machine has one, else on the CPU."""

    def command(export: Path, socket: str) -> list[str]:
        return [sys.executable, "-m", "factory.serving.native.server", str(export), socket]

    environment = {"PYTHONPATH": str(find_checkout_root())}
    return EngineKind("native", command, environment, tolerance=1e-3, adapt=lambda path, body, export: body)


class Engine:
    """A running engine. ``start`` makes it. Requests go through ``client``. The caller counts requests in progress in ``in_flight``."""

    def __init__(
        self, kind: EngineKind, champion: Champion, folder: Path, log: Path, process: asyncio.subprocess.Process
    ) -> None:
        self.kind, self.champion, self.process = kind, champion, process
        self.folder, self.log = folder, log
        transport = httpx.AsyncHTTPTransport(
            uds=str(folder / "socket"), limits=httpx.Limits(max_connections=None, max_keepalive_connections=0)
        )
        self.client = httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=None, trust_env=False)
        self.in_flight = 0
        self.problem = ""  # why the engine can no longer be used
        self.ended = asyncio.ensure_future(process.wait())

    @classmethod
    async def start(cls, kind: EngineKind, champion: Champion, logs: Path) -> Engine:
        """Start an engine whose output goes to a file in ``logs``. Raises: EngineError when its program cannot start; OSError."""
        path = logs / f"serve-{kind.name}-release-{champion.release}.log"
        # The folder is readable for this user only. Its path is short, because the path of a socket has at most 107 bytes.
        folder = Path(tempfile.mkdtemp(prefix="factory-serve-"))
        try:
            command = kind.command(champion.export, str(folder / "socket"))
            with open(path, "wb") as log:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=folder,
                    env=os.environ | kind.environment,
                    start_new_session=True,  # the router handles an interrupt from the terminal
                    preexec_fn=make_parent_death_hook(os.getpid()),
                )
        except (OSError, FactoryError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, OSError):
                raise EngineError(
                    "serving.engine_not_started",
                    "{program} cannot be started: {error}.",
                    program=command[0],
                    error=error.strerror,
                ) from error
            raise
        return cls(kind, champion, folder, path, process)

    async def send_request(self, method: str, path: str, **parts: Any) -> httpx.Response:
        """Send a request. Returns the response before its body is read. Raises: httpx.TransportError, also if the engine was stopped."""
        if self.client.is_closed:
            raise httpx.ConnectError("the engine was stopped")
        return await self.client.send(self.client.build_request(method, path, **parts), stream=True)

    async def wait_until_ready(self) -> None:
        """Wait until the engine is healthy. There is no time limit, because a large model loads slowly. Raises: EngineError if it ends."""
        while True:
            if self.ended.done():
                raise EngineError(self.describe_end())
            if not await self.find_health_problem():
                return
            await asyncio.wait([self.ended], timeout=POLL_SECONDS)

    async def find_health_problem(self) -> str:
        """Return the problem that the engine itself reports; '' if it is healthy."""
        try:
            answer = await self.client.get("/health")
        except httpx.HTTPError as error:
            return Message(
                "serving.engine_no_answer", "the engine does not answer ({error})", error=type(error).__name__
            )
        if answer.status_code == 200:
            return ""
        with contextlib.suppress(json.JSONDecodeError, AttributeError):
            return str(answer.json().get("problem") or answer.status_code)
        return f"status {answer.status_code}"

    async def is_usable(self) -> bool:
        """Return whether the engine can still be used. If not, ``problem`` says why."""
        if not self.problem:
            if self.ended.done():
                self.problem = self.describe_end()
            elif why := await self.find_health_problem():
                self.problem = await self.wait_for_end() or why
        return not self.problem

    async def wait_for_end(self) -> str:
        """Return how the engine ended; '' if it runs. Waits a moment, because a killed process stops answering before its end is known."""
        await asyncio.wait([self.ended], timeout=END_SECONDS)
        return self.describe_end() if self.ended.done() else ""

    def describe_end(self) -> Message:
        """Return how the process ended, with the last line of its log."""
        code = self.process.returncode
        how = (
            "ended" if code is None else f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        )
        lines = read_tail(self.log, LOG_BYTES).decode(errors="replace").strip().splitlines()
        return Message(
            "serving.engine_ended", "the {engine} engine of release {release} {how}{line}", engine=self.kind.name, release=self.champion.release,
            how=how, code=code, line=f": {lines[-1][:300]}" if lines else "",
        )  # fmt: skip

    async def stop(self) -> None:
        """End the process and its descendants, without waiting for their work."""
        with contextlib.suppress(ProcessLookupError):
            if self.process.returncode is None:
                self.process.terminate()
                await asyncio.wait([self.ended], timeout=STOP_SECONDS)
            os.killpg(self.process.pid, signal.SIGKILL)
        await self.ended
        await self.client.aclose()
        shutil.rmtree(self.folder, ignore_errors=True)
