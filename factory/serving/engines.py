"""An engine: one process that serves one export on a Unix socket of its own, so that no port is taken and nobody else can reach it."""

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
from factory.core.launching import die_with
from factory.core.left_files import read_tail
from factory.core.workspace import code_root
from factory.serving.champion import Champion

LOG_BYTES = 64 << 10  # of a log's end that are read
POLL_SECONDS = 0.1
END_SECONDS = 2.0
STOP_SECONDS = 10.0  # after which an engine that nobody uses any more is killed: nothing can be lost by it


class EngineError(FactoryError):
    """An engine could not be started, or ended."""


@dataclass(frozen=True)
class EngineKind:
    """How engines of a kind are started."""

    name: str
    command: Callable[[Path, str], list[str]]  # of an export and a socket
    environment: dict[str, str]
    tolerance: float  # nats that its log-probabilities may differ from the judge's
    adapt: Callable[[str, bytes, Path], bytes]  # (path, body, export) → the body that it gets; raises ApiError


def native() -> EngineKind:
    """The embedded engine: fp32 on the GPU that is there, else on the CPU."""

    def command(export: Path, socket: str) -> list[str]:
        return [sys.executable, "-m", "factory.serving.native.server", str(export), socket]

    environment = {"PYTHONPATH": str(code_root())}
    return EngineKind("native", command, environment, tolerance=1e-3, adapt=lambda path, body, export: body)


class Engine:
    """``start`` makes one. It is asked through ``client``; whoever asks counts himself in ``in_flight``."""

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
        self.problem = ""  # why it is of no use any more
        self.ended = asyncio.ensure_future(process.wait())

    @classmethod
    async def start(cls, kind: EngineKind, champion: Champion, logs: Path) -> Engine:
        """Its output goes to a file in ``logs``. Raises: EngineError when its program cannot be started; OSError."""
        path = logs / f"serve-{kind.name}-release-{champion.release}.log"
        folder = Path(
            tempfile.mkdtemp(prefix="factory-serve-")
        )  # for this user alone, and short: a socket's path has 107 bytes
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
                    start_new_session=True,  # an interrupt from the terminal is the router's to handle
                    preexec_fn=die_with(os.getpid()),
                )
        except (OSError, FactoryError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, OSError):
                raise EngineError(f"{command[0]} cannot be started: {error.strerror}") from error
            raise
        return cls(kind, champion, folder, path, process)

    async def ask(self, method: str, path: str, **parts: Any) -> httpx.Response:
        """Its answer, of which nothing is read yet. Raises: httpx.TransportError, also once the engine was stopped."""
        if self.client.is_closed:
            raise httpx.ConnectError("the engine was stopped")
        return await self.client.send(self.client.build_request(method, path, **parts), stream=True)

    async def wait_ready(self) -> None:
        """Until it answers. A large model takes its time: only the end of its process ends the waiting. Raises: EngineError."""
        while True:
            if self.ended.done():
                raise EngineError(self.describe_end())
            if not await self.unhealthy():
                return
            await asyncio.wait([self.ended], timeout=POLL_SECONDS)

    async def unhealthy(self) -> str:
        """Why it does not work, by its own word; empty: it does."""
        try:
            answer = await self.client.get("/health")
        except httpx.HTTPError as error:
            return f"no answer: {type(error).__name__}"
        if answer.status_code == 200:
            return ""
        with contextlib.suppress(json.JSONDecodeError, AttributeError):
            return str(answer.json().get("problem") or answer.status_code)
        return f"status {answer.status_code}"

    async def examine(self) -> bool:
        """Is it still of use? Sets ``problem`` when not."""
        if not self.problem:
            if self.ended.done():
                self.problem = self.describe_end()
            elif why := await self.unhealthy():
                self.problem = await self.end() or why
        return not self.problem

    async def end(self) -> str:
        """How it ended, if it did: a process that was killed stops answering a moment before its end is known. Else empty."""
        await asyncio.wait([self.ended], timeout=END_SECONDS)
        return self.describe_end() if self.ended.done() else ""

    def describe_end(self) -> str:
        code = self.process.returncode
        how = (
            "ended" if code is None else f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        )
        lines = read_tail(self.log, LOG_BYTES).decode(errors="replace").strip().splitlines()
        return f"the {self.kind.name} engine of release {self.champion.release} {how}" + (
            f": {lines[-1][:300]}" if lines else ""
        )

    async def stop(self) -> None:
        """End the process and all that it started. Nothing that it still works on is waited for."""
        with contextlib.suppress(ProcessLookupError):
            if self.process.returncode is None:
                self.process.terminate()
                await asyncio.wait([self.ended], timeout=STOP_SECONDS)
            os.killpg(self.process.pid, signal.SIGKILL)
        await self.ended
        await self.client.aclose()
        shutil.rmtree(self.folder, ignore_errors=True)
