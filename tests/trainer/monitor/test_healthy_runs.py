"""Real tiny runs that are healthy, at the default thresholds: no change of data or settings is reported as an anomaly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.trainer.segment_runs import result
from tests.support.trainer.segments import make_documents, plan_of, recipe_with, run_trainer, train_here, write_spec
from trainer.contract.data.token_shard import TokenizedDocument, TokenShard, write_token_shard
from trainer.contract.json_lines import read_json_lines

TRUNK, MORE = 150, 100
COUNTS = {"code": 2000, "docs": 800, "chat": 800}
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")


def kinds(folder: Path) -> list[tuple[int, str]]:
    # how fast this machine is at the moment is not what is tested
    return [
        (a["step"], a["kind"]) for a in read_json_lines(folder / "anomalies.jsonl") if a["kind"] != "throughput_drop"
    ]


def shard_of(folder: Path, documents: list[TokenizedDocument]) -> TokenShard:
    return write_token_shard(folder, documents, vocab_size=512, tokenizer_sha256="test")


def harder(documents: list[TokenizedDocument]) -> list[TokenizedDocument]:
    """Every third is a walk whose steps are one of thirty and not of three: more to learn, and as well-formed."""
    draw = np.random.default_rng(5)
    walk = lambda length: (draw.integers(3, 512) + 11 * np.arange(length) + draw.integers(0, 30, length)) % 512
    return [
        document
        if number % 3
        else TokenizedDocument(
            f"hard-{number}",
            f"hard-{number}",
            document.domain,
            "test",
            "none",
            walk(len(document.tokens)).astype(np.uint32),
            np.ones(len(document.tokens), bool),
        )
        for number, document in enumerate(documents)
    ]


@pytest.fixture(scope="module")
def trunk(tmp_path_factory: pytest.TempPathFactory) -> tuple[TokenShard, Path]:
    """A shard, and a run on it."""
    root = tmp_path_factory.mktemp("healthy")
    shard = shard_of(root / "shards", make_documents(0, COUNTS))
    folder = write_spec(root / "trunk", plan_of(shard), recipe_with(checkpoint_every=TRUNK), last_step=TRUNK)
    assert train_here(folder) == (0, "")
    assert kinds(folder) == []
    return shard, folder


def go_on(folder: Path, trunk: tuple[TokenShard, Path], new: TokenShard | None = None, **recipe: Any) -> Path:
    """A segment that goes on from the trunk's end, ready to run."""
    shard, before = trunk
    plan = plan_of(shard, new, generations=[0, 1]) if new else plan_of(shard)
    return write_spec(
        folder,
        plan,
        recipe_with(checkpoint_every=MORE, **recipe),
        first_step=TRUNK,
        last_step=TRUNK + MORE,
        initial_checkpoint=result(before)["checkpoint"],
    )


def test_a_new_generation_is_no_anomaly(trunk: tuple[TokenShard, Path], tmp_path: Path) -> None:
    new = shard_of(tmp_path / "new", make_documents(1, COUNTS))
    folder = go_on(tmp_path / "on", trunk, new)
    assert train_here(folder) == (0, "") and kinds(folder) == []


def test_hard_but_good_documents_are_no_anomaly(trunk: tuple[TokenShard, Path], tmp_path: Path) -> None:
    new = shard_of(tmp_path / "new", harder(make_documents(1, COUNTS)))
    folder = go_on(tmp_path / "on", trunk, new)
    assert train_here(folder) == (0, "") and kinds(folder) == []


def test_a_larger_batch_is_no_anomaly(trunk: tuple[TokenShard, Path], tmp_path: Path) -> None:
    folder = go_on(tmp_path / "on", trunk, batch__sequences=16)
    assert train_here(folder) == (0, "") and kinds(folder) == []


@pytest.mark.parametrize("shape", ["1-sqrt", "linear"])
def test_a_decay_is_no_anomaly(trunk: tuple[TokenShard, Path], tmp_path: Path, shape: str) -> None:
    shard, before = trunk
    folder = write_spec(
        tmp_path / "anneal",
        plan_of(shard),
        recipe_with(checkpoint_every=MORE, schedule__shape=shape, schedule__anneal_steps=MORE),
        kind="anneal",
        first_step=TRUNK,
        last_step=TRUNK + MORE,
        initial_checkpoint=result(before)["checkpoint"],
    )
    assert train_here(folder) == (0, "") and kinds(folder) == []


@pytest.mark.long("two ranks through torchrun")
def test_another_number_of_ranks_is_no_anomaly(trunk: tuple[TokenShard, Path], tmp_path: Path) -> None:
    folder = go_on(tmp_path / "on", trunk)
    code, errors = run_trainer([folder], *TORCHRUN)
    assert code == 0, errors
    assert kinds(folder) == []
