"""Made-up but varied documents, and shards of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from factory.core.progress import SILENT
from factory.core.workspace import Workspace
from factory.ingest.chain import ShardReport, ingest_shard
from factory.ledger.ledger import Ledger
from tests.support.factory.made_up_text import use_small_vocabulary


@pytest.fixture
def write_shard(workspace: Workspace) -> Callable[..., Path]:
    def write(rows: Iterable[dict[str, Any] | bytes], name: str = "shard.jsonl") -> Path:
        path = workspace.inbox / name
        path.write_bytes(
            b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows)
        )
        return path

    return write


@pytest.fixture
def ingest(workspace: Workspace, ledger: Ledger, write_shard: Callable[..., Path]) -> Callable[..., ShardReport]:
    """Write rows as a shard and ingest it, without worker processes."""
    use_small_vocabulary(workspace)

    def run(rows: Iterable[dict[str, Any] | bytes], name: str = "shard.jsonl") -> ShardReport:
        return ingest_shard(workspace, ledger, write_shard(rows, name), SILENT, workers=0)

    return run
