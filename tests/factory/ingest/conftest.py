"""Made-up but varied documents, and shards of them; a tokenizer, and the same tokenizer in transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from factory.core.workspace import Workspace
from factory.ingest.chain import ShardReport, ingest_shard
from factory.ingest.tokenizer import Tokenizer, train_tokenizer
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from tests.support.factory.made_up_text import use_small_vocabulary
from tests.support.text.library import library


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
        return ingest_shard(Plant(workspace, ledger), write_shard(rows, name), workers=0)

    return run


@pytest.fixture(scope="session")
def sample() -> list[str]:
    """The text that ``tokenizer`` is trained on."""
    return [library()[name].text for name in ("inspect", "ast", "json")]


@pytest.fixture(scope="session")
def tokenizer(sample: list[str], tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return train_tokenizer(iter(sample), 1000, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def hf(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory):  # noqa: ANN201
    """``tokenizer`` as transformers loads it from an export."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("export")
    tokenizer.copy_to(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}))
    return AutoTokenizer.from_pretrained(folder)
