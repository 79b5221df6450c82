"""A fixture that ingests rows as a shard, with a small tokenizer that trains quickly."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from factory.core.workspace import Workspace
from factory.ingest.chain import ShardReport, ingest_shard
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from tests.support.factory.made_up_text import use_small_vocabulary


@pytest.fixture
def ingest(workspace: Workspace, ledger: Ledger) -> Callable[..., ShardReport]:
    use_small_vocabulary(workspace)

    def run(rows: list[dict[str, Any]], name: str = "shard.jsonl") -> ShardReport:
        path = workspace.inbox / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return ingest_shard(Plant(workspace, ledger), path, workers=0)

    return run
