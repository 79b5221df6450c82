"""The laptop preset works unchanged from ``factory init`` to a first trained step. (In CI, compilation is switched off.)"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import sqlalchemy as sa

from factory.ingest.chain import ingest_shard
from factory.ingest.tokenizer import Tokenizer
from factory.ledger.ledger import Ledger, segments
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow
from factory.presets.new_workspace import InitOptions, make_workspace
from factory.training.planning import plan_trunk, read_data_plan
from factory.training.training import run_segment
from tests.support.factory.made_up_text import prose
from trainer.contract.json_lines import read_json_lines


@pytest.mark.sample("eager")  # g++ takes half a minute
@pytest.mark.slow("a step of 8,192 tokens and 12.6 million weights")
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "as it is"])
def test_the_laptop_preset_trains_a_step_on_a_first_shard(tmp_path: Path, code_repository: Path, eager: bool) -> None:
    workspace = make_workspace(tmp_path / "w", InitOptions("laptop"), code_repository)
    if eager:
        recipe = workspace.recipe_path().read_text()
        assert "\ncompile: true\n" in recipe
        workspace.own_recipe_path().parent.mkdir(parents=True, exist_ok=True)
        workspace.own_recipe_path().write_text(recipe.replace("compile: true", "compile: false"))
    ledger = Ledger.open(workspace.ledger_url)
    rows = [{"id": str(i), "text": prose(i, 400), "domain": "notes", "license": "MIT"} for i in range(700)]
    shard = workspace.inbox / "notes.jsonl"
    shard.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = ingest_shard(Plant(workspace, ledger), shard, workers=0)
    assert report.state == "ingested"
    assert Tokenizer.load(workspace.tokenizer).vocab_size <= 8192
    number = plan_trunk(Plant(workspace, ledger), 1)
    (row,) = ledger.select_rows(sa.select(segments))
    assert row["recipe"] == "laptop" and row["computing"]["precision"]["asked"] == "auto"
    run_segment(Plant(workspace, ledger), number)
    (row,) = ledger.select_rows(sa.select(segments))
    assert row["state"] == "done" and read_data_plan(ledger, SegmentRow.get(ledger, number))["targets_in_every_batch"]
    lines = read_json_lines(workspace.segments / "00001-trunk" / "metrics.jsonl")
    (line,) = lines
    assert 8.5 < line["loss"] < 9.5  # ln 8192 is 9.01
    assert line["tokens"] > 0.95 * 16 * 512
