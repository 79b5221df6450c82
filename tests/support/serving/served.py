"""Releases to serve: tiny exports with a real tokenizer, recorded as a ledger records them, and a server of them in this process."""

from __future__ import annotations

import asyncio
import functools
import socket
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
import uvicorn

from factory.core.exports import hash_export_folder
from factory.core.workspace import Workspace
from factory.evals.reference_model import ReferenceModel
from factory.ingest.tokenizer import Tokenizer, train_tokenizer
from factory.ledger.ledger import Ledger, candidates, record_event, releases
from factory.ledger.rows import Subject
from factory.serving.champion import read_champion
from factory.serving.engines import EngineKind, make_native_engine_kind
from factory.serving.router import make_application
from factory.serving.supervisor import EngineSupervisor, StageCallback
from tests.support.factory.exports import VOCAB, corpus, save_export, tiny_model
from tests.support.plants.release_scene import add_segment, add_verdict

CONTEXT = 256
PROMPT = "def add(a, b):"


@functools.cache
def tokenizer() -> Tokenizer:
    folder = Path(tempfile.mkdtemp(prefix="factory-tests-tokenizer-"))
    return train_tokenizer((d.content.get("text", "") for d in corpus()), VOCAB, folder)


def make_export(folder: Path, seed: int = 0, family: str = "qwen3", **changes: Any) -> Path:
    model = tiny_model(seed, family, max_position_embeddings=CONTEXT, **changes)
    return save_export(model, folder, tokenizer())


def add_release(workspace: Workspace, ledger: Ledger, export: Path) -> int:
    """The rows that a finished release leaves, and its event: the ledger's champion is this one from now on."""
    segment = add_segment(workspace, ledger)
    with ledger.begin() as tx:
        values = {
            "segment": segment.id,
            "checkpoint": "k" * 64,
            "export_path": ledger.to_stored_path(export),
            "created_at": 1.7e9,
        }
        key = tx.execute(
            candidates.insert().values(**values, export_sha256=hash_export_folder(export))
        ).inserted_primary_key
    assert key
    verdict = add_verdict(ledger, int(key[0]))
    with ledger.begin() as tx:
        number = len(tx.execute(releases.select()).all()) + 1
        tx.execute(
            releases.insert().values(
                number=number,
                candidate=key[0],
                verdict=verdict,
                state="published",
                approved_by="policy",
                created_at=1.7e9,
            )
        )
        record_event(tx, "promoted", Subject("release", number))
    return number


def roll_back(ledger: Ledger, number: int) -> None:
    with ledger.begin() as tx:
        record_event(tx, "rolled_back", Subject("release", number))


@functools.cache
def continuation(export: Path, text: str, count: int) -> str:
    """What the judge's model writes after ``text``."""
    ids = tokenizer().encode_text(text)[0][:-1].tolist()
    return tokenizer().decode(ReferenceModel.load(export).generate([ids], count, stop={0, 2})[0].tokens)


@dataclass
class Serving:
    supervisor: EngineSupervisor
    client: httpx.AsyncClient
    said: list[str] = field(default_factory=list)

    async def until(self, release: int, patience: float = 600.0) -> None:
        """``release`` is current and no engine but its own is left. ``patience``: a bug's, not a machine's."""
        deadline = time.monotonic() + patience
        while True:
            engines = [engine.champion.release for engine in self.supervisor.engines]
            if self.supervisor.current and engines == [release] == [self.supervisor.current.champion.release]:
                return
            assert time.monotonic() < deadline, (engines, self.said)
            await asyncio.sleep(0.05)

    async def until_said(self, words: str, patience: float = 600.0) -> None:
        deadline = time.monotonic() + patience
        while not any(words in line for line in self.said):
            assert time.monotonic() < deadline, self.said
            await asyncio.sleep(0.05)


@asynccontextmanager
async def serving(
    workspace: Workspace,
    ledger: Ledger,
    kind: EngineKind | None = None,
    on_stage: StageCallback | None = None,
    key: str = "",
) -> AsyncIterator[Serving]:
    """The router and the supervisor on a free port, engines in processes of their own."""
    said: list[str] = []

    def note(event: str, release: int, detail: dict[str, Any]) -> None:
        with ledger.begin() as tx:
            record_event(tx, event, Subject("release", release), detail)

    supervisor = EngineSupervisor(
        kind or make_native_engine_kind(), lambda: read_champion(workspace), said.append, workspace.logs, note, on_stage
    )
    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
    config = uvicorn.Config(make_application(supervisor, key), log_level="warning", access_log=False, lifespan="off")
    server = uvicorn.Server(config)
    server.capture_signals = _no_signals  # type: ignore[method-assign]  # pytest's stay pytest's
    tasks = [asyncio.ensure_future(supervisor.run()), asyncio.ensure_future(server.serve([listening]))]
    headers = {"Authorization": f"Bearer {key}".encode()} if key else {}
    address = f"http://127.0.0.1:{listening.getsockname()[1]}"
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    try:
        async with httpx.AsyncClient(base_url=address, timeout=None, limits=limits, headers=headers) as client:
            yield Serving(supervisor, client, said)
            assert not tasks[0].done(), tasks[0].result()
    finally:
        server.should_exit = True
        tasks[0].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await supervisor.close()


class _no_signals:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


torch.set_num_threads(1)
