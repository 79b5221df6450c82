"""How many positions an imported model allows: a shorter context leaves the number in every export, and a longer one is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import yaml

from factory.core.errors import ConfigError, InputError
from factory.core.progress import SILENT
from factory.diagnosis.remedies import rewind_segment
from factory.ingest.chain import ingest_shard
from factory.ledger.ledger import segments
from factory.ledger.plant import Plant
from factory.ledger.rows import CandidateRow, SegmentRow
from factory.presets.imported_workspace import ImportOptions, make_imported_workspace
from factory.training.exporting import export_candidate
from factory.training.planning import find_trunk_parent, load_recipe, plan_trunk, refuse_changed_model
from factory.training.training import run_segment
from tests.support.factory.code_loop import make_target
from tests.support.factory.made_up_text import prose
from tests.support.lent_libraries import lend
from tests.support.messages import refused
from tests.support.plants.trained_plant import close, opened, write_shards
from tests.support.trainer.public_model import save_public_model

ALLOWED = 80


@pytest.fixture
def plant(tmp_path: Path) -> Iterator[Plant]:
    """A workspace that begins with a model of ``ALLOWED`` positions, and rows of as many."""
    source, data = tmp_path / "public", tmp_path / "data"
    source.mkdir()
    data.mkdir()
    save_public_model(source, [prose(i) for i in range(60)], max_position_embeddings=ALLOWED)
    make_imported_workspace(tmp_path / "plant", ImportOptions(source), make_target(tmp_path / "code"), SILENT)
    workspace, ledger = opened(tmp_path / "plant")
    lend(workspace)
    write_shards(data)
    for path in sorted(data.iterdir()):
        ingest_shard(Plant(workspace, ledger), path)
    yield Plant(workspace, ledger)
    close(workspace, ledger)


def change_recipe(plant: Plant, without: str = "", **model: Any) -> None:
    """Change keys of ``model`` in the recipe, for two short steps; ``without``: a key of ``model`` that is removed."""
    path = plant.workspace.recipe_path()
    recipe = yaml.safe_load(path.read_text())
    recipe |= {"precision": "fp32", "compile": False, "batch": {"sequences": 4}}
    recipe["mixture"]["max_epochs"] = 20
    recipe["schedule"] = {"warmup_steps": 1, "trunk_steps": {"first": 2, "later": 2}, "anneal_steps": 2}
    recipe["model"] = {key: value for key, value in (recipe["model"] | model).items() if key != without}
    path.write_text(yaml.safe_dump(recipe))


def compare(plant: Plant, *named: str) -> list[Any]:
    recipe = load_recipe(plant.workspace)
    return [note.code for note in refuse_changed_model(plant, recipe, find_trunk_parent(plant.ledger, recipe), named)]


def train(plant: Plant, *named: str) -> SegmentRow:
    number = plan_trunk(plant, 2, named)
    run_segment(plant, number)
    return SegmentRow.get(plant.ledger, number)


def exported_positions(plant: Plant, segment: int) -> int:
    folder = CandidateRow.get(plant.ledger, export_candidate(plant, segment)).export_path
    return int(json.loads((Path(folder) / "config.json").read_text())["max_position_embeddings"])


def forget_allowed_positions(plant: Plant) -> None:
    """Make the import one of an older factory, which wrote ``max_positions`` only for a shorter context."""
    row = SegmentRow.get(plant.ledger, 1)
    model = {key: value for key, value in row.recipe_json["model"].items() if key != "max_positions"}
    with plant.ledger.begin() as tx:
        tx.execute(sa.update(segments).where(segments.c.id == 1).values(recipe_json=row.recipe_json | {"model": model}))
    change_recipe(plant, without="max_positions")


@pytest.mark.parametrize("older", [False, True])
def test_a_shorter_context_leaves_the_positions_of_an_export_and_a_longer_one_is_refused(
    plant: Plant, older: bool
) -> None:
    assert yaml.safe_load(plant.workspace.recipe_path().read_text())["model"]["max_positions"] == ALLOWED
    if older:
        forget_allowed_positions(plant)
        recipe = load_recipe(plant.workspace)
        assert compare(plant) == [] and recipe.model.max_positions is None
    change_recipe(plant, context=200)
    with refused("recipe.context_beyond_model", ConfigError, context=200, allowed=ALLOWED):
        plan_trunk(plant)
    change_recipe(plant, context=40)
    assert compare(plant) == ["training.context_changed"]
    first = train(plant)
    assert first.recipe_json["model"] | {"context": 40, "max_positions": ALLOWED} == first.recipe_json["model"]
    assert exported_positions(plant, first.id) == ALLOWED
    change_recipe(plant, without="max_positions", context=24)
    assert train(plant).recipe_json["model"]["max_positions"] == ALLOWED, "a missing key is no wish"


def test_an_older_import_with_an_unchanged_context_keeps_its_recipe_and_its_hash(plant: Plant) -> None:
    forget_allowed_positions(plant)
    recipe = load_recipe(plant.workspace)
    row = SegmentRow.get(plant.ledger, plan_trunk(plant, 2))
    assert "max_positions" not in row.recipe_json["model"]
    assert row.recipe_sha256 == recipe.model_copy(update={"precision": row.recipe_json["precision"]}).sha256


def test_an_older_import_that_was_trained_beyond_its_model_goes_on(plant: Plant) -> None:
    """Older factories took a longer context without a word, and their exports said it."""
    forget_allowed_positions(plant)
    first = train(plant)
    longer = first.recipe_json["model"] | {"context": 2 * ALLOWED}
    with plant.ledger.begin() as tx:
        recipe = first.recipe_json | {"model": longer}
        tx.execute(sa.update(segments).where(segments.c.id == first.id).values(recipe_json=recipe))
    change_recipe(plant, context=2 * ALLOWED)
    assert compare(plant) == []
    change_recipe(plant, context=ALLOWED)
    assert SegmentRow.get(plant.ledger, plan_trunk(plant, 2)).recipe_json["model"]["max_positions"] == 2 * ALLOWED


def test_what_an_export_says_of_a_model_changes_only_by_name(plant: Plant) -> None:
    change_recipe(plant, context=160, max_positions=160, rope_scaling={"kind": "linear", "factor": 2.0})
    with refused("training.imported_model_changed") as found:
        compare(plant, "rope_scaling")
    assert found.value.data["changes"] == [f"model.max_positions {ALLOWED} → 160"]
    assert set(compare(plant, "rope_scaling", "max_positions")) == {
        "training.model_change_accepted",
        "training.context_changed",
    }
    assert exported_positions(plant, train(plant, "rope_scaling", "max_positions").id) == 160
    assert compare(plant) == []
    change_recipe(plant, family="mistral")
    with refused("training.continued_model_changed") as found:
        compare(plant)
    assert found.value.data["changes"] == ["model.family llama → mistral"]
    with refused("training.no_such_change", InputError, key="max_positions"):
        compare(plant, "family", "max_positions")


def test_after_a_named_change_a_refusal_names_the_segment_with_which_the_recipe_was_compared(plant: Plant) -> None:
    change_recipe(plant)
    as_imported = plant.workspace.recipe_path().read_text()
    change_recipe(plant, rope_theta=5e5)
    row = train(plant, "rope_theta")
    plant.workspace.recipe_path().write_text(as_imported)
    with refused("training.continued_model_changed", ConfigError, segment=row.id, root=row.id) as found:
        plan_trunk(plant)
    assert found.value.data["changes"] == ["model.rope_theta 500000.0 → 10000.0"]
    rewind_segment(plant.ledger, row.id, "ann")
    assert compare(plant) == [], "the recipe is the imported model again"
