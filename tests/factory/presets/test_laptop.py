"""The preset for a laptop, from init over a first shard to trained steps, with nothing edited."""

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
from factory.presets.making import InitOptions, make
from factory.training.planning import plan_of, plan_trunk
from factory.training.training import run_segment
from tests.support.factory.made_up_text import prose
from trainer.contract.json_lines import read_lines


@pytest.mark.slow("two steps of 8,192 tokens and 12.6 million weights, compiled first")
def test_the_laptop_preset_trains_what_it_is_given(tmp_path: Path, code_repository: Path) -> None:
    workspace = make(tmp_path / "w", InitOptions("laptop"), code_repository)
    ledger = Ledger.open(workspace.ledger_url)
    rows = [{"id": str(i), "text": prose(i, 400), "domain": "notes", "license": "MIT"} for i in range(700)]
    shard = workspace.inbox / "notes.jsonl"
    shard.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = ingest_shard(Plant(workspace, ledger), shard, workers=0)
    assert report.state == "ingested"
    assert Tokenizer.load(workspace.tokenizer).vocab_size <= 8192
    number = plan_trunk(Plant(workspace, ledger), 2)
    (row,) = ledger.rows(sa.select(segments))
    assert row["recipe"] == "laptop" and row["computing"]["precision"]["asked"] == "auto"
    run_segment(Plant(workspace, ledger), number)
    (row,) = ledger.rows(sa.select(segments))
    assert row["state"] == "done" and plan_of(ledger, SegmentRow.get(ledger, number))["targets_in_every_batch"]
    lines = read_lines(workspace.segments / "00001-trunk" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1]
    assert 8.5 < lines[0]["loss"] < 9.5  # ln 8192 is 9.01
    assert lines[1]["tokens"] > 0.95 * 2 * 16 * 512
