"""Opening a data order takes as long for ten million planned steps as for a thousand: both alternate in one process."""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks.support.best_here import ROOT
from benchmarks.training.data_order import PLANNED, measure, shard_in
from trainer.contract.recipe import Recipe

ROUNDS = 15


def test_start_up_does_not_grow_with_the_planned_steps(tmp_path: Path) -> None:
    recipe = Recipe.load(ROOT / "policies" / "recipes" / "demo.yaml")
    shard = shard_in(tmp_path, recipe.model.vocab_size, 3000).path
    few, many = zip(
        *(tuple(measure(recipe, shard, planned, False).opened_s for planned in PLANNED) for _ in range(ROUNDS))
    )
    ratio = statistics.median(many) / statistics.median(few)
    print(f"\nopened for {PLANNED[1]:,} planned steps against {PLANNED[0]:,}: ×{ratio:.2f}")
    assert ratio < 1.5
