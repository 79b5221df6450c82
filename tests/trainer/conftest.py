from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.trainer.segments import MakeShard, make_documents
from trainer.contract.data.token_shard import TokenShard, write_token_shard


@pytest.fixture
def make_shard(tmp_path: Path) -> MakeShard:
    def make(seed: int = 0, counts: dict[str, int] | None = None, **keywords: Any) -> TokenShard:
        documents = make_documents(seed, counts or {"code": 120, "docs": 60, "chat": 60}, **keywords)
        return write_token_shard(tmp_path / "shards", documents, vocab_size=512, tokenizer_sha256="test")

    return make
