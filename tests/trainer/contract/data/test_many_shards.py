"""More token shards than a process may have open files."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import numpy as np
import pytest

from tests.support.messages import refused
from tests.support.trainer.segments import plan_of, recipe_with, run_trainer, write_spec
from trainer.contract.data.token_shard import (
    TokenizedDocument,
    TokenShard,
    format_row_ranges,
    parse_row_ranges,
    write_token_shard,
)
from trainer.contract.errors import TokenShardError
from trainer.contract.json_lines import read_json_lines

SHARDS, OPEN_FILES = 400, 256


def small_shards(folder: Path, count: int) -> list[TokenShard]:
    rng = np.random.default_rng(0)
    made = []
    for number in range(count):
        ids = rng.integers(3, 512, 24).astype(np.uint32)
        mask = np.arange(24) >= 12 * (number % 2)
        document = TokenizedDocument(f"d{number}", str(number), "text", "test", "MIT", ids, mask)
        made.append(write_token_shard(folder, [document], vocab_size=512, tokenizer_sha256="test"))
    return made


def test_a_segment_of_more_shards_than_open_files_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # of the shards made here
    plan = plan_of(*small_shards(tmp_path / "shards", SHARDS), weights={"text": 1.0}, max_epochs=2)
    recipe = recipe_with(batch__sequences=32, batch__packing="document")
    folder = write_spec(tmp_path / "run", plan, recipe, last_step=2 * SHARDS // 32)  # every document twice
    limit = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))
    assert run_trainer(folder, preexec_fn=limit) == (0, "")
    assert read_json_lines(folder / "metrics.jsonl")[-1]["supervised_tokens"] == SHARDS * (23 + 12)


def test_a_mapped_shard_holds_no_descriptor_and_cannot_be_written(tmp_path: Path) -> None:
    (shard,) = small_shards(tmp_path, 1)
    before = sorted(os.listdir("/proc/self/fd"))
    tokens = shard.tokens
    assert len(tokens) == 24 and len(shard.documents) == 1 and shard.read_loss_mask(0, 24).all()
    assert sorted(os.listdir("/proc/self/fd")) == before
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1


def test_a_tokens_file_that_is_too_short_is_named(tmp_path: Path) -> None:
    (shard,) = small_shards(tmp_path, 1)
    with open(shard.path / "tokens.bin", "r+b") as file:
        file.truncate(46)
    with refused("token_shard.too_short", TokenShardError, found=46, tokens=24):
        _ = TokenShard(shard.path).tokens


def test_row_ranges_are_formatted_and_parsed() -> None:
    rows = [0, 3, 4, 5, 9, 11, 12]
    assert format_row_ranges(reversed(rows)) == "0,3-5,9,11-12" and parse_row_ranges("0,3-5,9,11-12") == rows
    assert format_row_ranges([]) == "" and parse_row_ranges("") == []
