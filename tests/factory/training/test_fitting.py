"""What does not fit is refused when a segment is planned, before anything is written down: the recipe's model, its vocabulary."""

from __future__ import annotations

import json

import pytest
import sqlalchemy as sa
import yaml

from factory.core.errors import ConfigError
from factory.core.workspace import Workspace
from factory.diagnosis import acting
from factory.ingest.chain import ingest_shard
from factory.ingest.tokenizer import Tokenizer
from factory.ledger.ledger import Ledger, segments, tokenizers
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow
from factory.training.planning import next_trunk, plan_anneal, plan_trunk
from factory.training.training import run_segment
from tests.support.factory.made_up_text import prose
from tests.support.factory.planned import STEP, change_recipe, ingested, last_event
from tests.support.said import Said

PLAIN = {"qk_norm": False, "kv_heads": 4}


def use_vocabulary(workspace: Workspace, size: int) -> None:
    path = workspace.root / "policies" / "data.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"tokenizer": {"vocab_size": size}}))


@pytest.fixture
def trained(plant: Workspace) -> tuple[Workspace, Ledger]:
    """A trunk of two steps of the tiny recipe without QK-norm."""
    ledger = Ledger.open(plant.ledger_url)
    change_recipe(plant, model=PLAIN)
    ingested(plant, ledger, code=40 * STEP)
    run_segment(Plant(plant, ledger), plan_trunk(Plant(plant, ledger), 2))
    return plant, ledger


def test_a_changed_shape_on_a_live_trunk_is_refused_with_the_ways_on(trained: tuple[Workspace, Ledger]) -> None:
    workspace, ledger = trained
    own = workspace.own_recipe()
    before = own.read_text()
    changes = {
        "model.d_model 32 → 64": {"d_model": 64},
        "model.layers 2 → 3": {"layers": 3},
        "model.context 32 → 64": {"context": 64},
        "model.experts.count None → 4": {"experts": {"count": 4, "per_token": 2, "d_ff": 16}},
    }
    plans = (plan_trunk, plan_anneal, next_trunk)
    for said, model in changes.items():
        own.write_text(before)
        change_recipe(workspace, model=model)
        for plan in plans:
            with pytest.raises(ConfigError) as refused:
                plan(Plant(workspace, ledger))
            line = str(refused.value)
            assert line.startswith(str(own)) and said in line and "\n" not in line and "accept_changes" not in line
            assert "Take the change back" in line and f"'factory rewind 1 -w {workspace.root}'" in line
            assert f"--tokenizer {workspace.tokenizer} -w FOLDER'" in line
    assert len(ledger.rows(sa.select(segments))) == 1
    own.write_text(before)  # the second way trains anew on the same data
    change_recipe(workspace, model={"d_model": 64})
    acting.rewind(ledger, 1, "ann")
    number = plan_trunk(Plant(workspace, ledger), 2)
    run_segment(Plant(workspace, ledger), number)
    row = SegmentRow.get(ledger, number)
    assert row.state == "done" and row.parent is None and row.recipe_json["model"]["d_model"] == 64


@pytest.mark.parametrize(
    "model",
    [{"rope_theta": 5e5, "norm_eps": 0.1}, {"heads": 8, "kv_heads": 8, "head_dim": 8}],
    ids=["numbers", "heads"],
)
def test_another_function_of_the_same_shape_goes_on_only_by_its_name(
    trained: tuple[Workspace, Ledger], model: dict
) -> None:
    """By what the ledger says of the segment: its checkpoint may be silent."""
    workspace, ledger = trained
    (row_of_trunk,) = ledger.rows(sa.select(segments))
    change_recipe(workspace, model=model)
    with pytest.raises(ConfigError) as refused:
        plan_trunk(Plant(workspace, ledger))
    assert all(f"model.{key} " in str(refused.value) for key in model)
    named = str(refused.value).partition("accept_changes: [")[2].partition("]")[0].split(", ")
    assert sorted(named) == sorted(model)
    accept(workspace, named)
    said = Said()
    number = plan_trunk(Plant(workspace, ledger, said), 2)
    for key in model:
        assert any(line.startswith(f"  accepted by the recipe: model.{key} ") for line in said.lines)
    assert any("accepted by the recipe" in note for note in last_event(ledger)["notes"])
    row = SegmentRow.get(ledger, number)
    assert sorted(row.recipe_json["accept_changes"]) == sorted(model)
    with ledger.begin() as tx:
        tx.execute(segments.delete().where(segments.c.id == number))
    change_recipe(workspace, model={key: row_of_trunk["recipe_json"]["model"][key] for key in model})
    accept(workspace, named)
    again = Said()
    plan_trunk(Plant(workspace, ledger, again), 2)
    assert any("which did not change: take it out of" in line for line in again.lines), (
        "it would accept a later slip too"
    )


def accept(workspace: Workspace, names: list[str]) -> None:
    path = workspace.own_recipe()
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"accept_changes": names}))


@pytest.mark.parametrize(("size", "fits"), [(500, True), (384, False), (640, False)])
def test_the_first_segment_needs_the_vocabulary_of_the_data_policy(plant: Workspace, size: int, fits: bool) -> None:
    """The recipe's 512 are at most padding to a multiple of 128 above it."""
    ledger = Ledger.open(plant.ledger_url)
    ingested(plant, ledger, code=40 * STEP)
    use_vocabulary(plant, size)
    if fits:
        plan_trunk(Plant(plant, ledger))
        return
    with pytest.raises(ConfigError) as found:
        plan_trunk(Plant(plant, ledger))
    said = found.value.data
    assert found.value.code == "ingest.vocabularies_differ" and said["recipe"].name == "tiny.yaml"
    assert (said["size"], said["wanted"]) == (512, size) and said["policy"] == plant.root / "policies" / "data.yaml"
    assert (
        said["do"].code == "ingest.change_policy" and said["do"].data["copy"] == plant.root / "policies" / "data.yaml"
    )
    assert ledger.rows(sa.select(segments)) == []


def test_a_tokenizer_that_is_frozen_counts(plant: Workspace) -> None:
    ledger = Ledger.open(plant.ledger_url)
    ingested(plant, ledger, code=40 * STEP)
    with ledger.begin() as tx:
        tx.execute(tokenizers.insert().values(sha256="t", path="tokenizer", vocab_size=700, created_at=1.0))
    with pytest.raises(ConfigError) as found:
        plan_trunk(Plant(plant, ledger))
    assert found.value.code == "ingest.embedding_too_small"
    assert [found.value.data[name] for name in ("size", "entries", "padded")] == [512, 700, 768]


def test_no_tokenizer_is_frozen_that_the_recipe_has_no_room_for(plant: Workspace) -> None:
    ledger = Ledger.open(plant.ledger_url)
    use_vocabulary(plant, 4096)
    lines = [json.dumps({"id": str(i), "text": prose(i), "domain": "docs", "license": "MIT"}) for i in range(30)]
    shard = plant.inbox / "shard.jsonl"
    shard.write_text("\n".join(lines) + "\n")
    with pytest.raises(ConfigError) as found:
        ingest_shard(Plant(plant, ledger), shard, workers=0)
    assert found.value.code == "ingest.vocabularies_differ"
    assert (found.value.data["size"], found.value.data["wanted"]) == (512, 4096)
    assert ledger.rows(sa.select(tokenizers)) == [] and not (plant.tokenizer / "tokenizer.json").exists()
    use_vocabulary(plant, 512)
    assert ingest_shard(Plant(plant, ledger), shard, workers=0).state == "ingested"
    assert Tokenizer.load(plant.tokenizer).vocab_size <= 512
