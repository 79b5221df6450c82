"""Ingest of real text compared with the least that it could do: read the shard's lines and tokenise them, in one process.

``python -m pytest benchmarks/pipeline/test_ingest.py -s``. The corpus is the standard library of this Python, as in the demo. Ingest also
normalises, filters, looks for personal data, duplicates and contamination, splits off held-out documents and writes a
ledger row for each document; its first shard also trains the tokenizer, so that it is the second that counts.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import pytest

from factory.core.progress import SILENT
from factory.core.workspace import Workspace, WorkspaceConfig
from factory.corpus import write_corpus
from factory.ingest.chain import ingest_shard
from factory.ingest.tokenizer import Tokenizer
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant

MOST = 5.0  # times the bare tokenising of the same shard that ingest may take: 3.5 to 3.8 were measured
ROUNDS = 3


def bare(path: Path, tokenizer: Tokenizer) -> int:
    """Tokens of a shard's texts, read and tokenised and nothing else."""
    documents = [json.loads(line) for line in path.open(encoding="utf-8")]
    return sum(len(tokenizer.encode_text(document["text"])[0]) for document in documents)


def test_ingest_compared_with_bare_tokenising(tmp_path: Path, benchmark: Any) -> None:
    corpus = tmp_path / "corpus"
    write_corpus(corpus, SILENT)
    first, second = sorted(corpus.glob("code-*.jsonl"))[:2]
    ratios, rates = [], []
    for number in range(ROUNDS):
        workspace = Workspace.create(tmp_path / f"plant-{number}", WorkspaceConfig(recipe="demo"))
        ledger = Ledger.create(workspace.ledger_url)
        ingest_shard(Plant(workspace, ledger), first)
        start = time.perf_counter()
        ingest_shard(Plant(workspace, ledger), second)
        seconds = time.perf_counter() - start
        tokenizer = Tokenizer.load(workspace.tokenizer)
        start = time.perf_counter()
        tokens = bare(second, tokenizer)
        ratios.append(seconds / (time.perf_counter() - start))
        rates.append(second.stat().st_size / seconds / 1e6)
    assert tokens > 100_000
    median = statistics.median(ratios)
    benchmark.extra_info["times_bare_tokenising"] = median
    benchmark.pedantic(bare, (second, tokenizer), rounds=1)
    print(
        f"\ningest of {second.stat().st_size / 1e6:.1f} MB, {tokens:,} tokens: {statistics.median(rates):.2f} MB/s, "
        f"{median:.1f} times as long as reading and tokenising alone ({min(ratios):.1f} to {max(ratios):.1f})"
    )
    assert median < MOST


pytestmark = pytest.mark.slow
