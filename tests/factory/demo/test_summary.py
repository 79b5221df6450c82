"""The demo's numbers come from a real ledger, and each line says what its number means."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from factory.demo.summary import JudgedShardTime, list_judged_shard_times, summarise_demo
from factory.ledger.ledger import data_plans, segments, shards, token_shards, verdicts
from factory.ledger.reader import LedgerReader
from factory.ledger.status import read_status
from tests.support.factory.exports import FilledPlant
from tests.support.paths import ROOT
from tests.support.plants.released_plant import released_plant
from trainer.contract.recipe import Recipe

FIRST, SECOND = "a" * 64, "b" * 64
CAME = {FIRST: 1000.0, SECOND: 2000.0}  # seconds since 1970, as are the verdicts'
JUDGED = {1: 1150.5, 2: 2064.0}
PRODUCTS = 1e9  # FLOP/s of one thread


@pytest.fixture(scope="module")
def plant(tmp_path_factory: pytest.TempPathFactory) -> FilledPlant:
    """Candidate 1 was trained on one shard, candidate 2 on that one and another."""
    plant = released_plant(tmp_path_factory.mktemp("numbers"))
    recipe = Recipe.load(ROOT / "policies" / "recipes" / "tiny.yaml").model_copy(update={"precision": "fp32"})
    planned = {1: [FIRST], 2: [FIRST, SECOND]}
    with plant.ledger.begin() as tx:
        for sha256, at in CAME.items():
            row = {
                "sha256": sha256,
                "name": f"{sha256[0]}.jsonl",
                "path": "",
                "bytes": 1,
                "state": "ingested",
                "ingested_at": at,
            }
            tx.execute(shards.insert().values(row))
            row = {"id": sha256[:8], "shard": sha256, "path": "", "tokenizer": "", "documents": 1, "tokens": 1}
            tx.execute(token_shards.insert().values(**row, domains={}, created_at=at))
        for number, names in planned.items():
            listed = [{"id": name[:8], "path": "", "generation": 1} for name in names]
            tx.execute(data_plans.insert().values(id=f"plan{number}", plan={"token_shards": listed}, created_at=0.0))
            computing = {
                "precision": {"probe": {"rates": {"fp32": {"products": PRODUCTS}}}},
                "machine": {"threads": 2},
            }
            values: dict[str, Any] = {"data_plan": f"plan{number}", "recipe_json": json.loads(recipe.model_dump_json())}
            values |= {"computing": computing, "result": {"speed": {"tokens_per_s": 1000.0 * number}, "loss": 2.0}}
            tx.execute(sa.update(segments).where(segments.c.id == _segment(plant, number)).values(values))
            mine = verdicts.c.subject == f"candidate:{number}"
            tx.execute(sa.update(verdicts).where(mine).values(created_at=JUDGED[number]))
    return plant


def _segment(plant: FilledPlant, candidate: int) -> int:
    return int(plant.ledger.read("SELECT segment FROM candidates WHERE id = :id", id=candidate)[0]["segment"])


def numbers(plant: FilledPlant) -> list[str]:
    lines = summarise_demo(plant.workspace, read_status(plant.workspace), 90.0)
    start = lines.index("  IN NUMBERS")
    return lines[start + 1 : lines.index("", start)]


def test_the_time_of_a_shard_ends_at_the_first_verdict_on_a_candidate_trained_on_it(plant: FilledPlant) -> None:
    assert list_judged_shard_times(LedgerReader(plant.workspace)) == [
        JudgedShardTime("a.jsonl", 1, "promote", 150.5),
        JudgedShardTime("b.jsonl", 2, "promote", 64.0),
    ]


def test_the_last_screen_shows_speed_quality_delay_and_cost(plant: FilledPlant) -> None:
    speed, quality, delay, cost = numbers(plant)
    share = (
        2000.0 * Recipe.load(ROOT / "policies" / "recipes" / "tiny.yaml").model.count_flops_per_token() / (2 * PRODUCTS)
    )
    assert "2,000 tokens/s in fp32" in speed and f"({share:.0%} of the speed" in speed
    own = read_status(plant.workspace)["candidates"][1]["summary"]["bpb"]
    for domain, bits in own.items():
        assert f"{domain} {bits:.3f} (3.500)" in quality
    assert "64 s from the ingest" in delay and "candidate 2 (b.jsonl)" in delay
    cores = len(os.sched_getaffinity(0))
    assert "1.5 minutes on " in cost and f"at most {90 * cores / 3600:.2f} core-hours" in cost


def test_the_numbers_of_an_empty_workspace_are_only_the_cost(tmp_path: Path) -> None:
    from factory.core.workspace import Workspace
    from factory.ledger.ledger import Ledger

    workspace = Workspace.create(tmp_path / "empty")
    Ledger.create(workspace.ledger_url)
    assert list_judged_shard_times(LedgerReader(workspace)) == []
    lines = summarise_demo(workspace, read_status(workspace), 60.0)
    start = lines.index("  IN NUMBERS")
    assert [line.split()[0] for line in lines[start + 1 : lines.index("", start)]] == ["cost"]
