"""A plant with two ingested shards and a release that reads 256 tokens, made once; each test gets a copy in a folder of another name."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from factory.core.workspace import Workspace
from factory.ingest.inbox import ingest_and_move
from factory.ingest.tokenizer import Tokenizer
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from tests.support.factory.exports import save_export, tiny_model, trained
from tests.support.factory.made_up_text import use_small_vocabulary
from tests.support.plants.kept import kept
from tests.support.plants.trained_plant import write_shards
from tests.support.serving.served import add_release
from trainer.contract.data.token_shard import TokenShard


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def make(folder: Path) -> None:
        workspace = Workspace.create(folder)
        use_small_vocabulary(workspace)
        ledger = Ledger.create(workspace.ledger_url)
        before = random.getstate()
        write_shards(workspace.inbox)
        random.setstate(before)
        for path in sorted(workspace.inbox.iterdir()):
            ingest_and_move(Plant(workspace, ledger), path)
        tokenizer = Tokenizer.load(workspace.tokenizer)
        (shard,) = ledger.read("SELECT path FROM token_shards ORDER BY id LIMIT 1")
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        model = tiny_model(1, vocab_size=tokenizer.vocab_size, max_position_embeddings=256)
        trained(model, TokenShard(shard["path"]), steps=120)  # so that it writes words, which ingest keeps
        torch.set_num_threads(threads)
        add_release(workspace, ledger, save_export(model, workspace.exports / "1", tokenizer))
        ledger.engine.dispose()

    folder = tmp_path_factory.mktemp("saved") / "plant"
    kept("writes words", folder, make, {})
    return folder
