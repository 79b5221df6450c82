"""The memory and state of a data order do not depend on the number of planned steps. Measured in fresh processes, by the command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.training.data_order import measure, shard_in
from tests.support.paths import ROOT
from trainer.contract.recipe import Recipe


@pytest.mark.long("four fresh processes: memory is a whole process's")
def test_the_memory_and_state_of_an_order_do_not_grow_with_the_planned_steps() -> None:
    command = [sys.executable, "-m", "benchmarks.training.data_order", "--documents", "500", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [(cost["planned_steps"], cost["first_step"]) for cost in found] == [
        (10**3, 0),
        (10**3, 900),
        (10**7, 0),
        (10**7, 10**7 - 100),
    ]
    for key, most in (("memory_mib", 1.02), ("state_bytes", 1.2)):  # a byte a planned step would be 10 MiB of 350
        values = [cost[key] for cost in found]
        assert max(values) <= most * min(values), (key, values)


def test_the_state_of_an_order_does_not_grow_with_the_planned_steps(tmp_path: Path) -> None:
    recipe = Recipe.load(ROOT / "policies" / "recipes" / "tiny.yaml")
    shard = shard_in(tmp_path, recipe.model.vocab_size, 100).path
    few, many = (measure(recipe, shard, planned, resumed=True).state_bytes for planned in (10**3, 10**7))
    assert many <= 1.2 * few
