"""Planning a segment refuses a recipe whose model or vocabulary does not fit, before anything is recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import sqlalchemy as sa
import yaml

from factory.core.errors import ConfigError, InputError
from factory.core.workspace import Workspace
from factory.data.exposure import DocumentExposure
from factory.diagnosis import remedies
from factory.ingest.chain import ingest_shard
from factory.ingest.tokenizer import Tokenizer
from factory.ledger.ledger import Ledger, segments, tokenizers
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow
from factory.training.planning import forecast_trunk, plan_anneal, plan_trunk
from factory.training.training import run_segment
from tests.support.factory.made_up_text import prose
from tests.support.factory.planned import STEP, change_recipe, ingested, last_event
from tests.support.messages import refused
from tests.support.said import Said
from trainer.contract.data.token_shard import TokenShard
from trainer.tools.documents import list_step_documents

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


def test_a_recipe_that_changes_the_shape_of_a_live_trunk_is_refused_with_instructions(
    trained: tuple[Workspace, Ledger],
) -> None:
    workspace, ledger = trained
    own = workspace.own_recipe_path()
    before = own.read_text()
    changes = {
        "model.d_model 32 → 64": {"d_model": 64},
        "model.layers 2 → 3": {"layers": 3},
        "model.experts.count None → 4": {"experts": {"count": 4, "per_token": 2, "d_ff": 16}},
    }
    plans = (plan_trunk, plan_anneal, forecast_trunk)
    for said, model in changes.items():
        own.write_text(before)
        change_recipe(workspace, model=model)
        for plan in plans:
            with pytest.raises(ConfigError) as refused:
                plan(Plant(workspace, ledger))
            line, data = str(refused.value), refused.value.data
            assert refused.value.code == "training.model_changed" and "\n" not in line
            assert said in data["changes"] and data["recipe_file"] == own and data["accept"] == ""
            assert (data["segment"], data["root"], data["tokenizer"]) == (1, 1, workspace.tokenizer)
            assert (
                f"'factory rewind 1 -w {workspace.root}'" in line
                and f"--tokenizer {workspace.tokenizer} -w FOLDER'" in line
            )
    assert len(ledger.select_rows(sa.select(segments))) == 1
    own.write_text(before)  # the second way trains anew on the same data
    change_recipe(workspace, model={"d_model": 64})
    remedies.rewind_segment(ledger, 1, "ann")
    number = plan_trunk(Plant(workspace, ledger), 2)
    run_segment(Plant(workspace, ledger), number)
    row = SegmentRow.get(ledger, number)
    assert row.state == "done" and row.parent is None and row.recipe_json["model"]["d_model"] == 64


def test_a_trunk_continues_with_another_context_after_what_it_read(trained: tuple[Workspace, Ledger]) -> None:
    """The exposure of documents follows the change, and agrees with the documents of each step."""
    workspace, ledger = trained
    change_recipe(workspace, model=PLAIN | {"context": 64})
    said = Said()
    number = plan_trunk(Plant(workspace, ledger, said), 2)
    key = "context"
    assert any(f"model.{key} " in line for line in said.lines)
    assert any(f"model.{key} " in note for note in last_event(ledger)["notes"])
    run_segment(Plant(workspace, ledger), number)
    first, second = SegmentRow.get(ledger, 1), SegmentRow.get(ledger, number)
    assert second.state == "done" and second.parent == 1 and second.recipe_json["model"]["context"] == 64
    (shard,) = ledger.read("SELECT id, path FROM token_shards")
    keys = TokenShard(shard["path"]).documents["key"].to_pylist()
    exposure = DocumentExposure(ledger, dict.fromkeys(keys, shard["id"]))
    for row in (first, second):
        seen: dict[int, list[str]] = {}
        for key, steps in exposure.list_steps_by_document(row).items():
            for step in steps:
                seen.setdefault(step.step, []).append(key)
        for step in range(row.first_step, row.last_step):
            assert sorted(seen[step]) == list_step_documents(Path(row.folder), step)


@pytest.mark.parametrize(
    "model",
    [{"rope_theta": 5e5, "norm_eps": 0.1}, {"heads": 8, "kv_heads": 8, "head_dim": 8}],
    ids=["numbers", "heads"],
)
def test_a_model_with_equal_shapes_but_another_function_trains_only_if_the_recipe_accepts_it(
    trained: tuple[Workspace, Ledger], model: dict
) -> None:
    """The old values come from the ledger's row of the segment, because an old checkpoint may lack them."""
    workspace, ledger = trained
    (row_of_trunk,) = ledger.select_rows(sa.select(segments))
    change_recipe(workspace, model=model)
    with pytest.raises(ConfigError) as refused:
        plan_trunk(Plant(workspace, ledger))
    assert refused.value.code == "training.model_changed"
    assert all(f"model.{key} " in str(refused.value) for key in model)
    named = list(refused.value.data["accept"].data["keys"])
    assert sorted(named) == sorted(model) and f"accept_changes: [{', '.join(named)}]" in str(refused.value)
    accept(workspace, named)
    said = Said()
    number = plan_trunk(Plant(workspace, ledger, said), 2)
    for key in model:
        assert any(f"model.{key} " in line for line in said.lines)
        assert any(f"model.{key} " in note for note in last_event(ledger)["notes"])
    row = SegmentRow.get(ledger, number)
    assert sorted(row.recipe_json["accept_changes"]) == sorted(model)
    with ledger.begin() as tx:
        tx.execute(segments.delete().where(segments.c.id == number))
    change_recipe(workspace, model={key: row_of_trunk["recipe_json"]["model"][key] for key in model})
    accept(workspace, named)
    again = Said()
    plan_trunk(Plant(workspace, ledger, again), 2)
    assert any("accept_changes" in line and all(name in line for name in named) for line in again.lines), (
        "an unused name would also accept a later mistake"
    )


def test_a_change_that_the_command_names_trains_and_a_name_that_changes_nothing_is_refused(
    trained: tuple[Workspace, Ledger],
) -> None:
    workspace, ledger = trained
    change_recipe(workspace, model={"rope_theta": 5e5})
    with refused("training.not_acceptable", InputError, key="d_ff"):
        plan_trunk(Plant(workspace, ledger), 2, ["d_ff"])
    with refused("training.no_such_change", InputError, key="norm_eps"):
        plan_trunk(Plant(workspace, ledger), 2, ["rope_theta", "norm_eps"])
    with refused("training.model_changed", ConfigError) as found:
        plan_trunk(Plant(workspace, ledger), 2)
    assert found.value.data["accept"].data["command"] == "factory train --change rope_theta"
    number = plan_trunk(Plant(workspace, ledger), 2, ["rope_theta"])
    run_segment(Plant(workspace, ledger), number)
    row = SegmentRow.get(ledger, number)
    assert row.state == "done" and row.recipe_json["accept_changes"] == ["rope_theta"]
    assert "accept_changes" not in workspace.own_recipe_path().read_text()
    following = SegmentRow.get(ledger, plan_trunk(Plant(workspace, ledger), 2))
    assert "accept_changes" not in following.recipe_json, "the next segment needs no name"


def accept(workspace: Workspace, names: list[str]) -> None:
    path = workspace.own_recipe_path()
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"accept_changes": names}))


@pytest.mark.parametrize(("size", "fits"), [(500, True), (384, False), (640, False)])
def test_the_first_segments_vocabulary_is_that_of_the_data_policy_or_its_padded_size(
    plant: Workspace, size: int, fits: bool
) -> None:
    """The recipe's vocabulary of 512 may exceed the policy's only by padding to a multiple of 128."""
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
    assert ledger.select_rows(sa.select(segments)) == []


def test_a_recipe_with_fewer_embeddings_than_the_frozen_tokenizer_is_refused(plant: Workspace) -> None:
    ledger = Ledger.open(plant.ledger_url)
    ingested(plant, ledger, code=40 * STEP)
    with ledger.begin() as tx:
        tx.execute(tokenizers.insert().values(sha256="t", path="tokenizer", vocab_size=700, created_at=1.0))
    with pytest.raises(ConfigError) as found:
        plan_trunk(Plant(plant, ledger))
    assert found.value.code == "ingest.embedding_too_small"
    assert [found.value.data[name] for name in ("size", "entries", "padded")] == [512, 700, 768]


def test_a_tokenizer_too_large_for_the_recipe_is_not_frozen(plant: Workspace) -> None:
    ledger = Ledger.open(plant.ledger_url)
    use_vocabulary(plant, 4096)
    lines = [json.dumps({"id": str(i), "text": prose(i), "domain": "docs", "license": "MIT"}) for i in range(30)]
    shard = plant.inbox / "shard.jsonl"
    shard.write_text("\n".join(lines) + "\n")
    with pytest.raises(ConfigError) as found:
        ingest_shard(Plant(plant, ledger), shard, workers=0)
    assert found.value.code == "ingest.vocabularies_differ"
    assert (found.value.data["size"], found.value.data["wanted"]) == (512, 4096)
    assert ledger.select_rows(sa.select(tokenizers)) == [] and not (plant.tokenizer / "tokenizer.json").exists()
    use_vocabulary(plant, 512)
    assert ingest_shard(Plant(plant, ledger), shard, workers=0).state == "ingested"
    assert Tokenizer.load(plant.tokenizer).vocab_size <= 512
