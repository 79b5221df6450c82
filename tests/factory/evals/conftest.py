"""A plant of the evaluations, and a candidate in it whose export has no break."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from factory.evals.export_parity import compute_expected_export
from factory.ledger.ledger import checkpoints, record_event, segments
from factory.ledger.rows import CandidateRow
from tests.support.factory.export_breaks import RECIPE, checkpoint_of
from tests.support.factory.exports import FilledPlant, plant_of_one_thread
from trainer.contract.checkpoint.export import export_checkpoint as write_export


@pytest.fixture(scope="module")
def plant(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FilledPlant]:
    with plant_of_one_thread(tmp_path_factory.mktemp("plant")) as made:
        yield made


@pytest.fixture(scope="module")
def checkpoint(plant: FilledPlant) -> Path:
    return checkpoint_of(1, plant.workspace.root / "one")


@pytest.fixture(scope="module")
def sound(plant: FilledPlant, checkpoint: Path) -> CandidateRow:
    """A candidate as the trainer's own exporter and the factory make it."""
    export = plant.workspace.exports / "sound"
    write_export(checkpoint, export)
    plant.tokenizer.copy_to(export)
    number = plant.add_candidate(export)
    with plant.ledger.begin() as tx:
        tx.execute(segments.update().where(segments.c.id == number).values(recipe_json=RECIPE.model_dump()))
        tx.execute(checkpoints.update().where(checkpoints.c.segment == number).values(path=str(checkpoint)))
        made = compute_expected_export(checkpoint, RECIPE.model_dump())
        record_event(tx, "candidate", f"candidate:{number}", {"segment": number, "made": made.to_json()})
    return CandidateRow.get(plant.ledger, number)
