"""The parent of the next segment, planned in a real ledger and run by real trainers on the tiny recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from factory.core.workspace import Workspace
from factory.ledger.ledger import Ledger, checkpoints, data_plans, sa, segments, shards, token_shards
from factory.ledger.plant import Plant
from factory.training.planning import find_trunk_parent, load_recipe, plan_anneal, plan_trunk
from factory.training.training import run_segment
from tests.support.trainer.segments import TINY, make_documents
from trainer.contract.data.token_shard import write_token_shard


def with_schedule(workspace: Workspace, **schedule: Any) -> None:
    """Change the schedule of the workspace's recipe."""
    raw = yaml.safe_load(TINY.read_text())
    raw["schedule"] |= schedule
    path = workspace.root / "policies" / "recipes" / "tiny.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(raw))


def put_shard(ledger: Ledger, folder: Path, seed: int) -> str:
    """An ingested shard of random documents; returns its token shard's id."""
    documents = make_documents(seed, {"code": 400, "docs": 150, "chat": 150})
    made = write_token_shard(folder, documents, vocab_size=512, tokenizer_sha256="test")
    with ledger.begin() as tx:
        tx.execute(
            shards.insert().values(
                sha256=f"s{seed}", name="s", path="s", bytes=1, state="ingested", ingested_at=float(seed)
            )
        )
        tx.execute(
            token_shards.insert().values(
                id=made.id, shard=f"s{seed}", path=str(made.path), tokenizer="test", documents=700, tokens=made.manifest["tokens"],
                domains={n: {"documents": 1, "tokens": 1, "supervised_tokens": 1} for n in ("code", "docs", "chat")}, created_at=float(seed),
            )
        )  # fmt: skip
    return made.id


def segment(ledger: Ledger, number: int) -> dict[str, Any]:
    row = ledger.select_first(sa.select(segments).where(segments.c.id == number))
    assert row is not None
    return row


def records(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(row["folder"]) / "metrics.jsonl").read_text().splitlines()]


def put_segment(ledger: Ledger, number: int, kind: str, parent: int | None, state: str = "done") -> None:
    with ledger.begin() as tx:
        tx.execute(
            segments.insert().values(
                id=number, kind=kind, parent=parent, generation=1, recipe="r", recipe_json={}, recipe_sha256="r", data_plan="p",
                code_commit="c", first_step=0, last_step=5, state=state, folder="f", created_at=float(number),
            )
        )  # fmt: skip
        tx.execute(checkpoints.insert().values(id=f"c{number}", segment=number, step=5, path="c", created_at=1.0))


@pytest.mark.parametrize(
    ("continue_from", "history", "parent"),
    [
        ("anneal", [], None),
        ("anneal", [("trunk", None, "done")], 1),  # no anneal yet: the trunk itself
        ("anneal", [("trunk", None, "done"), ("anneal", 1, "done")], 2),
        ("anneal", [("trunk", None, "done"), ("anneal", 1, "planned")], 1),
        ("anneal", [("trunk", None, "done"), ("anneal", 1, "done"), ("trunk", 2, "done")], 3),
        ("anneal", [("trunk", None, "done"), ("anneal", 1, "done"), ("anneal", 1, "done")], 3),
        ("trunk", [("trunk", None, "done"), ("anneal", 1, "done")], 1),
    ],
)
def test_the_next_trunk_segments_parent_follows_from_continue_from_and_the_history(
    plant: Workspace, continue_from: str, history: list[tuple[str, int | None, str]], parent: int | None
) -> None:
    ledger = Ledger.open(plant.ledger_url)
    with_schedule(plant, continue_from=continue_from)
    with ledger.begin() as tx:
        tx.execute(data_plans.insert().values(id="p", plan={"token_shards": []}, created_at=1.0))
    for number, (kind, of, state) in enumerate(history, start=1):
        put_segment(ledger, number, kind, of, state)
    found = find_trunk_parent(ledger, load_recipe(plant))
    assert (found and found.id) == parent


@pytest.mark.slow("three segments, each by its own trainer")
def test_with_wsd_s_the_trunk_continues_from_the_annealed_weights(plant: Workspace, tmp_path: Path) -> None:
    """Trunk, anneal, trunk, anneal: the step count continues, no piece is drawn twice, and the rate rises again."""
    ledger = Ledger.open(plant.ledger_url)
    steps = {"first": 8, "later": 6}
    with_schedule(plant, continue_from="anneal", rewarmup_steps=3, anneal_steps=4, shape="linear", trunk_steps=steps)
    first = put_shard(ledger, tmp_path / "tokens", 1)
    planned = [plan_trunk(Plant(plant, ledger))]
    run_segment(Plant(plant, ledger), planned[0])
    planned.append(plan_anneal(Plant(plant, ledger)))
    run_segment(Plant(plant, ledger), planned[1])
    second = put_shard(ledger, tmp_path / "tokens", 2)
    planned.append(plan_trunk(Plant(plant, ledger)))
    run_segment(Plant(plant, ledger), planned[2])
    planned.append(plan_anneal(Plant(plant, ledger)))

    rows = [segment(ledger, number) for number in planned]
    assert [(r["kind"], r["parent"], r["first_step"], r["last_step"]) for r in rows] == [
        ("trunk", None, 0, 8),
        ("anneal", 1, 8, 12),
        ("trunk", 2, 12, 18),
        ("anneal", 3, 18, 22),
    ]
    plan = ledger.select_first(sa.select(data_plans.c.plan).where(data_plans.c.id == rows[2]["data_plan"]))
    assert plan is not None
    assert {s["id"]: s["generation"] for s in plan["plan"]["token_shards"]} == {first: 1, second: 2}

    specs = [json.loads((Path(row["folder"]) / "segment.json").read_text()) for row in rows[:3]]
    assert [spec.get("rewarm", False) for spec in specs] == [False, False, True]
    assert specs[2]["initial_checkpoint"] == segment(ledger, 2)["result"]["checkpoint"]

    peak = load_recipe(plant).optimizer.lr
    shares = [[record["lr"] / peak for record in records(row)] for row in rows[:3]]
    assert shares[0] == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1, 1])
    assert shares[1] == pytest.approx([0.8, 0.6, 0.4, 0.2])
    assert shares[2] == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, 1])
    state = json.loads((Path(segment(ledger, 2)["result"]["checkpoint"]) / "state.json").read_text())
    after = json.loads((Path(segment(ledger, 3)["result"]["checkpoint"]) / "state.json").read_text())
    seen, later = ({n: c[2:4] for n, c in s["sampler"]["streams"].items()} for s in (state, after))
    assert all(later[name] >= seen[name] for name in seen), "every cursor continues from its place after the anneal"
    assert records(rows[2])[0]["tokens"] > records(rows[1])[-1]["tokens"]
