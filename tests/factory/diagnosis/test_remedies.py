"""The remedies of a diagnosis in real training: the learning rate is lowered for a while, and a merged patch is undone."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import yaml

from factory.code_loop.approvals import merge_promoted_proposal
from factory.code_loop.reverting import propose_reverts_of_blamed_patches
from factory.diagnosis.diagnosing import diagnose_and_act
from factory.duties.runner import run_duty_pass
from factory.gates.release.anomaly_policy import AnomalyPolicy
from factory.git.repository import get_live_commit
from factory.ledger.anomalies import find_next_undiagnosed_anomaly, list_anomalies, list_open_anomalies
from factory.ledger.plant import Plant
from factory.ledger.rows import ProposalRow, SegmentRow
from factory.training.training import run_segment
from tests.support.factory.code_loop import make_target
from tests.support.factory.merged_patch import edited, merge_patch, plan_certified
from tests.support.paths import ROOT
from tests.support.plants.trained_plant import WORDS, make_plant

KINDS = AnomalyPolicy().kinds
SETTINGS = {
    "optimizer": {"lr": 5e-3},
    "stability": {"window": 16, "noise_scale_every": 5},
    "schedule": {"warmup_steps": 4, "trunk_steps": {"first": 24, "later": 16}, "anneal_steps": 6},
}


def write_more(path: Path) -> None:
    """A shard like those before, so that the trunk goes on."""
    rng = random.Random(3)
    call = lambda: f"    {rng.choice(WORDS)}_{rng.randint(0, 999)} = {rng.choice(WORDS)}({rng.randint(0, 9999)})"
    rows = [
        {
            "id": f"more/{i}",
            "text": "def more(value):\n" + "\n".join(call() for _ in range(10)),
            "domain": "code",
            "source": f"more/{i}",
        }
        for i in range(80)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.long("a daemon's passes: six segments, of which two are trained again with another rate")
def test_a_learning_rate_that_is_too_high_is_lowered_for_the_spoiled_steps(tmp_path: Path) -> None:
    workspace, ledger = make_plant(tmp_path, make_target(tmp_path / "target"), **SETTINGS)
    usual = SegmentRow.get(ledger, 1).recipe_json["optimizer"]["lr"]
    policy = (ROOT / "policies" / "anomalies.yaml").read_text()
    policy = policy.replace("rate: ask ", "rate: automatic ").replace("rate_steps: 100", "rate_steps: 6")
    (workspace.root / "policies" / "anomalies.yaml").write_text(policy)
    run_duty_pass(Plant(workspace, ledger), settle=0.0)

    path = workspace.root / "policies" / "recipes" / "tiny.yaml"  # a person raises the rate, and takes clipping away
    recipe = yaml.safe_load(path.read_text())
    recipe["optimizer"]["lr"], recipe["stability"]["grad_clip"] = 100 * usual, 1e6
    path.write_text(yaml.safe_dump(recipe))
    write_more(workspace.inbox / "more.jsonl")
    run_duty_pass(Plant(workspace, ledger), settle=0.0)

    rows = SegmentRow.select(ledger, "WHERE id > 2 ORDER BY id")
    spoiled, again = rows[:2]
    assert (spoiled.kind, spoiled.state) == ("trunk", "rewound"), rows
    assert spoiled.recipe_json["optimizer"]["lr"] == 100 * usual
    assert (again.state, again.parent, again.first_step) == ("done", spoiled.parent, spoiled.first_step)
    assert again.recipe_json["optimizer"]["lr"] == usual  # what it was before is what cleared it
    assert again.last_step < spoiled.last_step
    named = [row for row in list_anomalies(ledger) if row["segment"] == spoiled.id and row["state"] == "closed"]
    assert named and all((row["causes"], row["how"]) == (["rate"], "trained again") for row in named)
    assert not [row for row in list_open_anomalies(ledger, KINDS) if row.segment == again.id]


@pytest.mark.slow("a segment under a faulty patch, and half a dozen sandboxed replays")
def test_a_merged_patch_that_spoils_later_steps_is_named_and_undone(tmp_path: Path) -> None:
    """The certificate cannot see the fault, which acts six steps after the segment's first step."""
    workspace, ledger = make_plant(tmp_path, make_target(tmp_path / "target"), **SETTINGS)
    old = "        self.optimizer.step(lr, divide_by, skip)\n"
    new = "        self.optimizer.step(lr * (300 if batch.step >= 30 else 1), divide_by, skip)\n"
    merge_patch(workspace, ledger, 1, edited(workspace.repository, "trainer/run.py", old, new))
    number = plan_certified(workspace, ledger, 12)
    run_segment(Plant(workspace, ledger), number)
    anomaly = find_next_undiagnosed_anomaly(ledger, KINDS)
    assert anomaly is not None
    found = diagnose_and_act(Plant(workspace, ledger), anomaly)
    assert found["causes"] == ["code change"] and found["undo"] == [1], found
    assert any(arm["arm"] == "previous commit" and arm["fires"] is False for arm in found["arms"]), found["arms"]
    assert found["done"].data["reverts"].data == {"proposals": [1]}

    (opened,) = propose_reverts_of_blamed_patches(Plant(workspace, ledger))
    assert ProposalRow.get(ledger, opened).target == "undo:1"
    assert merge_promoted_proposal(Plant(workspace, ledger), opened, "ada") == get_live_commit(workspace.repository)
    assert old in (workspace.repository / "trainer/run.py").read_text()
