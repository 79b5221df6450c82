"""Replicas of a champion's anneal, trained by the real trainer from the real parent, and their record in the ledger."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import stdev

import pytest
import torch
from safetensors.numpy import load_file

from factory.core.errors import FactoryError
from factory.core.workspace import Workspace
from factory.gates.release.policy import ReleasePolicy, ReplicaNoisePolicy
from factory.gates.release.replica_noise import (
    MEASURED,
    find_anneal_due_for_replicas,
    find_newest_replica_measurement,
    find_newest_replica_noise,
    may_start_replicas,
)
from factory.ledger.ledger import Ledger, record_event, segments
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow, SqlReader
from factory.replicas.train_replicas import (
    find_replicas_folder,
    make_replica_arm,
    make_replica_runner,
    train_next_replica,
)
from factory.retention.needs import RetentionNeeds
from factory.runs.arm import Arm
from factory.runs.arm_runner import ArmRunner, list_runs
from factory.training.exporting import export_candidate
from factory.training.planning import read_last_checkpoint
from tests.support.factory.code_loop import make_target
from tests.support.factory.errands import do, next_due
from tests.support.messages import refused
from tests.support.plants.release_scene import add_candidate, add_verdict, promote, write_replicas
from tests.support.plants.trained_plant import make_plant, train_anneal
from trainer.contract.checkpoint import format as checkpoints

Opened = tuple[Workspace, Ledger]


@pytest.fixture(scope="module")
def plant(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    """Release 1 is made of an anneal, steps 20–26 with a checkpoint every second; the policy asks for two replicas of a first release."""
    root = tmp_path_factory.mktemp("replicas")
    workspace, ledger = make_plant(root, make_target(root / "code"), checkpoint_every=2, keep_checkpoints=9)
    write_replicas(workspace, "from_release: 1")
    candidate = export_candidate(Plant(workspace, ledger), train_anneal(workspace, ledger))
    promote(ledger, 1, candidate, add_verdict(ledger, candidate))
    yield workspace, ledger


def two_replicas(workspace: Workspace, ledger: Ledger) -> tuple[ArmRunner, list[Arm]]:
    plant = Plant(workspace, ledger)
    return make_replica_runner(plant, 2), [
        make_replica_arm(plant, SegmentRow.get(ledger, 2), number) for number in (1, 2)
    ]


TABLES = ("segments", "candidates", "checkpoints", "evaluations", "data_plans")
REPLICATE = "replicate 2"


@pytest.fixture(scope="module")
def undisturbed(plant: Opened) -> Path:
    """A copy of the folder of two replicas, which nothing disturbed, and which are measured now."""
    workspace, ledger = plant
    before = {name: ledger.read(f"SELECT * FROM {name}") for name in TABLES}
    assert next_due(Plant(workspace, ledger)) != REPLICATE, "12 steps are more than a fifth of 26"
    write_replicas(workspace, "from_release: 1, steps_max: 0.5")
    for _ in range(2):
        assert next_due(Plant(workspace, ledger)) == REPLICATE
        do(Plant(workspace, ledger), REPLICATE)
        write_replicas(workspace, "from_release: 1")  # what has begun goes on
    runs, arms = two_replicas(workspace, ledger)
    folder, kept = runs.home, workspace.root.parent / "undisturbed"
    for number, arm in enumerate(arms, 1):
        shutil.copytree(runs.find_arm_folder(arm), kept / str(number))
    overflows(runs.find_arm_folder(arms[1]) / "checkpoints")
    with refused("replicas.no_finite_loss", FactoryError, domains=["chat", "code", "docs"], segment=2):
        train_next_replica(Plant(workspace, ledger), 2)
    shutil.copytree(kept / "2" / "checkpoints", runs.find_arm_folder(arms[1]) / "checkpoints", dirs_exist_ok=True)
    assert find_newest_replica_measurement(ledger) is None and next_due(Plant(workspace, ledger)) == REPLICATE
    do(Plant(workspace, ledger), REPLICATE)
    assert not folder.exists() and next_due(Plant(workspace, ledger)) != REPLICATE
    after = {name: ledger.read(f"SELECT * FROM {name}") for name in TABLES}
    assert after == before, "a replica is no segment and no candidate"
    told = {run["key"]: (run["purpose"], run["state"], run["arm"]["plan"]) for run in list_runs(ledger)}
    assert [told[arm.key] for arm in arms] == [("replica", "done", {"reshuffled": number}) for number in (1, 2)]
    return kept


@pytest.mark.long("trains a trunk, an anneal and two replicas of it")
def test_a_replica_trains_an_anneal_again_on_other_documents_and_is_measured(plant: Opened, undisturbed: Path) -> None:
    _, ledger = plant
    anneal, weights = SegmentRow.get(ledger, 2), []
    of_anneal = anneal.first_step, anneal.last_step, anneal.recipe_json, read_last_checkpoint(ledger, 1)["path"]
    for number, place in enumerate((Path(anneal.folder), undisturbed / "1", undisturbed / "2")):
        spec = json.loads((place / "segment.json").read_text())
        assert tuple(spec[key] for key in ("first_step", "last_step", "recipe", "initial_checkpoint")) == of_anneal
        assert spec["data_plan"].get("reshuffled", 0) == number
        weights.append(
            load_file(
                place / "checkpoints" / checkpoints.format_checkpoint_name(anneal.last_step) / "model.safetensors"
            )
        )
    assert all(any((a[name] != b[name]).any() for name in a) for a, b in pairwise(weights))
    found = find_newest_replica_measurement(ledger)
    assert found is not None and found["subject"] == "segment:2" and len(found["runs"]) == 3
    noise = find_newest_replica_noise(ledger, {"code": 1.0})
    assert noise is not None and noise.target is not None and noise.target > 0
    assert noise.by_domain["code"] == noise.target == pytest.approx(stdev(run["code"] for run in found["runs"]))


def overflows(folder: Path) -> None:
    """Make the newest checkpoint one of finite weights that gives no finite loss."""
    whole = checkpoints.load_checkpoint(checkpoints.list_checkpoints(folder)[-1][1])
    model = {name: torch.full_like(w, 3e38) if w.dim() == 1 else w for name, w in whole.model.items()}
    checkpoints.save_checkpoint(folder, replace(whole, model=model))


def schedule(db: SqlReader, **keys: int) -> tuple[int, int] | None:
    found = find_anneal_due_for_replicas(db, ReplicaNoisePolicy(**keys))
    return (found[0].id, found[1]) if found else None


def test_schedule_names_the_newest_champion_s_anneal_when_replicas_are_due(
    workspace: Workspace, ledger: Ledger
) -> None:
    for number in (1, 2, 3):
        candidate = add_candidate(workspace, ledger)
        promote(ledger, number, candidate, add_verdict(ledger, candidate))
    with ledger.begin() as tx:
        tx.execute(segments.update().values(parent=segments.c.id - 1))
        tx.execute(segments.update().where(segments.c.id == 1).values(kind="trunk", parent=None))
        tx.execute(segments.update().where(segments.c.id == 3).values(kind="average", parent=2))
    assert schedule(ledger) == (2, 3), "of an average, the anneal whose checkpoints it is made of"
    needs = RetentionNeeds()
    needs._replicas(ledger, ReleasePolicy())
    assert set(needs.ends) == {1, 2}, "what they begin at, and what they are compared with, is kept"
    assert schedule(ledger, from_release=4) is None and schedule(ledger, count=0) is None
    measured = {"release": 3, "recipe_sha256": "r" * 64, "runs": []}
    with ledger.begin() as tx:
        record_event(tx, MEASURED, "segment:2", measured)
    assert schedule(ledger, every_releases=1) is None
    candidate = add_candidate(workspace, ledger)
    promote(ledger, 4, candidate, add_verdict(ledger, candidate))
    with ledger.begin() as tx:
        tx.execute(segments.update().where(segments.c.id == 4).values(parent=1))
    assert schedule(ledger, every_releases=2) is None and schedule(ledger, every_releases=1) == (4, 4)
    with ledger.begin() as tx:
        tx.execute(segments.update().where(segments.c.id == 4).values(recipe_sha256="s" * 64))
    assert schedule(ledger, every_releases=2) == (4, 4), "another recipe"


def test_replicas_take_a_limited_share_of_the_steps(workspace: Workspace, ledger: Ledger) -> None:
    for number in (1, 2, 3):  # anneals of 100 steps
        candidate = add_candidate(workspace, ledger)
        promote(ledger, number, candidate, add_verdict(ledger, candidate))
    anneal = SegmentRow.get(ledger, 3)

    def waits_no_more(**keys: float) -> bool:
        return may_start_replicas(ledger, ReplicaNoisePolicy.model_validate(keys), anneal)

    assert waits_no_more(count=1, steps_max=0.34) and not waits_no_more(count=1, steps_max=0.33)
    assert waits_no_more(count=2, steps_max=0.67) and not waits_no_more(count=2) and not waits_no_more(steps_max=0.0)
    with ledger.begin() as tx:
        record_event(tx, MEASURED, "segment:2", {"release": 2, "recipe_sha256": "r" * 64, "runs": []})
    assert waits_no_more(count=1, steps_max=1.0) and not waits_no_more(count=1, steps_max=0.99), "since the newest ones"


def test_the_folder_of_an_anneal_that_is_not_due_is_removed(workspace: Workspace, ledger: Ledger) -> None:
    left = find_replicas_folder(workspace) / "00007" / "1"
    left.mkdir(parents=True)
    assert next_due(Plant(workspace, ledger)) == "replicate 7"
    train_next_replica(Plant(workspace, ledger), 7)
    assert not left.parent.exists() and next_due(Plant(workspace, ledger)) == ""
