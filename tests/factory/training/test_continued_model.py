"""A public model, trained further with LoRA through the whole factory, averaged with itself as it was, and trained whole again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from factory.core.errors import InputError
from factory.core.progress import SILENT
from factory.core.workspace import Workspace
from factory.evals.evaluator import evaluate_candidate
from factory.evals.parity import CHECKS
from factory.ingest.chain import ingest_shard
from factory.ledger.ledger import segments
from factory.ledger.plant import Plant
from factory.ledger.rows import CandidateRow, EvaluationRow, SegmentRow, VerdictRow
from factory.ledger.status import describe_average
from factory.presets.imported_workspace import ImportOptions, make_imported_workspace
from factory.show.pages.provenance import read_release_provenance
from factory.training.averaging import plan_average
from factory.training.exporting import export_candidate
from factory.training.held_out_loss import load_held_out_loss_meter
from factory.training.planning import read_last_checkpoint
from factory.training.release_average import RELEASE_WEIGHTS
from factory.training.training import run_segment
from tests.support.factory.code_loop import make_target
from tests.support.factory.shown import release
from tests.support.lent_libraries import lend
from tests.support.messages import refused
from tests.support.paths import ROOT
from tests.support.plants.release_scene import add_verdict
from tests.support.plants.trained_plant import (
    close,
    commit_edit,
    lenient,
    opened,
    train_anneal,
    train_trunk,
    write_shards,
)
from tests.support.trainer.public_model import save_public_model
from trainer.contract.lora import is_lora_tensor
from trainer.contract.recipe import Recipe

ADAPT = {"rank": 4, "alpha": 64.0}


def write_recipe(workspace: Workspace, **changes: Any) -> None:
    """The recipe that the import wrote, for a few short steps, with ``changes``."""
    path = workspace.recipe_path()
    recipe = yaml.safe_load(path.read_text())
    for key in ("adapt", "freeze"):
        recipe.pop(key, None)
    recipe |= {"precision": "fp32", "compile": False, "checkpoint_every": 5, "batch": {"sequences": 8}}
    recipe["mixture"]["max_epochs"] = 20
    recipe["optimizer"]["lr"] = 0.02
    recipe["schedule"] = {"warmup_steps": 2, "trunk_steps": {"first": 10, "later": 3}, "anneal_steps": 4}
    path.write_text(yaml.safe_dump(recipe | changes))


def make(folder: Path, repository: Path) -> None:
    """A workspace from a public model, with two ingested shards."""
    source = folder.parent / f"{folder.name}-public"
    source.mkdir()
    made: list[str] = []
    data = folder.parent / f"{folder.name}-data"
    data.mkdir()
    write_shards(data)
    for path in sorted(data.iterdir()):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        made += [row["text"] for row in rows if "text" in row]
    save_public_model(source, made)
    make_imported_workspace(folder, ImportOptions(source, context=64), repository, SILENT)
    workspace, ledger = opened(folder)
    lend(workspace)
    own = workspace.root / "policies" / "gates"
    own.mkdir(parents=True, exist_ok=True)
    (own / "release.yaml").write_text(lenient((ROOT / "policies" / "gates" / "release.yaml").read_text()))
    for path in sorted(data.iterdir()):
        ingest_shard(Plant(workspace, ledger), path)
    close(workspace, ledger)


@pytest.fixture(scope="module")
def plant(tmp_path_factory: pytest.TempPathFactory) -> Plant:
    root = tmp_path_factory.mktemp("continued") / "plant"
    make(root, make_target(root.parent / "code"))
    plant = Plant(*opened(root))
    write_recipe(plant.workspace, adapt=ADAPT)
    train_trunk(plant.workspace, plant.ledger)
    train_anneal(plant.workspace, plant.ledger)
    return plant


def weights_of(plant: Plant, segment: int) -> dict[str, np.ndarray]:
    return load_file(Path(read_last_checkpoint(plant.ledger, segment)["path"]) / "model.safetensors")


def test_segments_with_lora_train_the_small_matrices_and_their_candidate_is_proven_equal(plant: Plant) -> None:
    imported, trunk, anneal = SegmentRow.select(plant.ledger)[:3]
    assert [row.kind for row in (imported, trunk, anneal)] == ["import", "trunk", "anneal"]
    before, after = weights_of(plant, imported.id), weights_of(plant, anneal.id)
    small = {name for name in after if is_lora_tensor(name)}
    assert len(small) == 2 * 7 * 2 and after.keys() - small == before.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before), "the weights stay to the bit"
    assert all(np.any(after[name]) for name in small if name.endswith("_lora_b"))
    assert_export_is_proven(plant, export_candidate(plant, anneal.id))


def test_an_average_with_release_0_keeps_what_it_knew_and_merges_lora(plant: Plant) -> None:
    number = plan_average(plant, "release", release=0)
    averaged = run_segment(plant, number)["averaged"]
    row, anneal = SegmentRow.get(plant.ledger, number), SegmentRow.get(plant.ledger, 3)
    assert (row.kind, row.parent, row.last_step) == ("average", anneal.id, anneal.last_step)
    assert "adapt" in anneal.recipe_json and "adapt" not in row.recipe_json
    assert row.recipe_sha256 == Recipe.parse(row.recipe_json).sha256
    old, new = averaged["sources"]
    assert (averaged["release"], old["segment"], new["segment"]) == (0, 1, anneal.id)

    table = {line["release_weight"]: line for line in averaged["table"]}
    assert list(table) == [1.0, 0.9, 0.7, 0.5, 0.3, 0.1, 0.0]
    guards = table[1.0]["bits_per_byte"]
    assert set(guards) == {"chat", "code", "docs"} == set(averaged["documents"]) == set(averaged["noise"])
    for line in table.values():
        assert line["mean"] == pytest.approx(np.mean(list(line["bits_per_byte"].values())))
        worse = {d: bits - guards[d] - 2 * averaged["noise"][d] for d, bits in line["bits_per_byte"].items()}
        assert line["lost"] == pytest.approx({d: loss for d, loss in worse.items() if loss > 0})
    assert table[0.0]["mean"] < table[1.0]["mean"], "so young a model learns"
    kept_all = [weight for weight in RELEASE_WEIGHTS if not table[weight]["lost"]]
    best = min(kept_all or RELEASE_WEIGHTS, key=lambda weight: table[weight]["mean"])
    assert averaged["guards_hold"] is bool(kept_all) and old["weight"] == best and old["weight"] + new["weight"] == 1
    assert describe_average(averaged).code == "ledger.release_average"

    before, after, made = (weights_of(plant, segment) for segment in (1, anneal.id, number))
    assert made.keys() == before.keys()
    for name, found in made.items():
        trained = after[name].astype(np.float64)
        if f"{name}_lora_a" in after:
            change = after[f"{name}_lora_b"].astype(np.float64) @ after[f"{name}_lora_a"].astype(np.float64)
            trained = (trained + ADAPT["alpha"] / ADAPT["rank"] * change).astype(np.float32)
        expected = best * before[name].astype(np.float64) + (1 - best) * trained
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)
    candidate = export_candidate(plant, number)
    assert_export_is_proven(plant, candidate)
    measured = load_held_out_loss_meter(plant).measure_loss(Path(CandidateRow.get(plant.ledger, candidate).export_path))
    assert measured == pytest.approx(table[best]["mean"], abs=1e-5), "what was measured is what was made"
    assert plan_average(plant, "release", release=0) == number, "the same checkpoints are the same average"


@pytest.mark.parametrize(
    ("keywords", "code"),
    [
        ({"release": 7}, "rows.unknown_key"),
        ({"release": 0, "segment": 1}, "training.not_trained"),
        ({"release": 0, "segment": 99}, "rows.unknown_key"),
    ],
)
def test_an_average_with_what_is_no_release_or_was_not_trained_is_refused(
    plant: Plant, keywords: dict[str, int], code: str
) -> None:
    with refused(code, InputError):
        plan_average(plant, "release", **keywords)


def test_an_average_of_models_that_compute_other_functions_is_refused_by_the_keys(plant: Plant) -> None:
    recipe = SegmentRow.get(plant.ledger, 2).recipe_json
    other = recipe | {"model": recipe["model"] | {"rope_theta": 20_000.0}}
    change = segments.update().where(segments.c.id == 2)
    with plant.ledger.begin() as tx:
        tx.execute(change.values(recipe_json=other))
    try:
        changes = ["model.rope_theta 10000.0 → 20000.0"]
        with refused("training.other_function", InputError, release=0, segment=2, changes=changes):
            plan_average(plant, "release", 2, release=0)
    finally:
        with plant.ledger.begin() as tx:
            tx.execute(change.values(recipe_json=recipe))


def test_frozen_weights_stay_after_lora_was_merged_and_lora_begins_again_under_new_code(plant: Plant) -> None:
    write_recipe(plant.workspace, freeze=["embedding", "blocks.1"])
    parent, whole = weights_of(plant, 2), weights_of(plant, train_trunk(plant.workspace, plant.ledger))
    assert whole.keys() == {name for name in parent if not is_lora_tensor(name)}
    assert np.array_equal(whole["embedding"], parent["embedding"])
    product = parent["blocks.1.q_lora_b"].astype(np.float64) @ parent["blocks.1.q_lora_a"].astype(np.float64)
    merged = parent["blocks.1.q"].astype(np.float64) + ADAPT["alpha"] / ADAPT["rank"] * product
    np.testing.assert_allclose(whole["blocks.1.q"], merged, rtol=1e-6, atol=1e-8)
    assert not np.array_equal(whole["blocks.0.down"], parent["blocks.0.down"])

    policy = {"steps": 3, "preflight": {"parts": ["resume"], "steps": 4}}
    (plant.workspace.root / "policies" / "gates" / "certificate.yaml").write_text(yaml.safe_dump(policy))
    commit_edit(plant.workspace.repository, "trainer/optim/schedule.py", "TAILS = {", "TAILS = {  # of anneals")
    write_recipe(plant.workspace, adapt=ADAPT | {"rank": 10})
    number = train_trunk(plant.workspace, plant.ledger)
    verdicts = VerdictRow.select(plant.ledger, "WHERE subject = :subject ORDER BY id", subject=f"segment:{number}")
    assert [(one.gate, one.outcome) for one in verdicts] == [("code", "promote"), ("preflight", "promote")]
    assert any(is_lora_tensor(name) for name in weights_of(plant, number))


def test_a_later_release_is_averaged_with_a_segment_that_was_trained_for_longer(plant: Plant) -> None:
    candidate = export_candidate(plant, 3)
    made = release(plant, add_verdict(plant.ledger, candidate, against=1))
    shorter, longer = SegmentRow.select(plant.ledger, "WHERE kind = 'trunk' AND id > 3 ORDER BY id")
    with refused("training.release_not_older", InputError, steps=14, fewer=13):
        plan_average(plant, "release", shorter.id, release=made)
    number = plan_average(plant, "release", longer.id, release=made)
    averaged = run_segment(plant, number)["averaged"]
    assert [(part["segment"], part["step"]) for part in averaged["sources"]] == [(3, 14), (longer.id, 16)]
    assert not any(is_lora_tensor(name) for name in weights_of(plant, number)), "both had LoRA, of other ranks"
    verdict = add_verdict(plant.ledger, export_candidate(plant, number), against=candidate)
    shown = read_release_provenance(plant.ledger, release(plant, verdict))
    assert shown["segments"][-1]["averaged"]["table"] == averaged["table"]


def assert_export_is_proven(plant: Plant, candidate: int) -> None:
    """Trainer, export, transformers and engine give the same numbers."""
    evaluate_candidate(plant, candidate)
    evaluation = EvaluationRow.find_newest(plant.ledger, candidate)
    assert evaluation is not None
    parity = evaluation.summary["parity"]
    assert parity.keys() >= set(CHECKS) and all(check["ok"] for check in parity.values()), parity
