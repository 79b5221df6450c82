"""Averages of a real run's checkpoints: their weights equal those of numpy, and their candidates are judged like any other."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from factory.core.errors import InputError, SegmentError
from factory.core.workspace import Workspace
from factory.duties.releasing import judge_one_candidate
from factory.ledger.ledger import Ledger, candidates, checkpoints, segments
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow
from factory.ledger.status import format_status, read_status
from factory.retrying.trainer_deaths import find_open_segment
from factory.show.pages.provenance import read_release_provenance
from factory.training import averaging
from factory.training.averaging import (
    choose_checkpoints_to_average,
    compute_averaging_weights,
    list_averageable_checkpoints,
    load_held_out_loss_meter,
    plan_average,
)
from factory.training.exporting import export_candidate
from factory.training.training import run_segment
from tests.support.factory.command import factory
from tests.support.factory.errands import next_due, stuck
from tests.support.factory.shown import release
from tests.support.messages import refused
from tests.support.plants.release_scene import add_verdict
from tests.support.plants.trained_plant import make_plant, train_anneal, train_trunk

Opened = tuple[Workspace, Ledger]


@pytest.fixture(scope="module")
def plant(tmp_path_factory: pytest.TempPathFactory, code_repository: Path) -> Opened:
    made = make_plant(tmp_path_factory.mktemp("averaging"), code_repository, keep_checkpoints=3)
    train_trunk(*made, steps=6)
    return made


def made_average(plant: Opened, *words: Any, **keywords: Any) -> tuple[int, dict[str, Any]]:
    """(the candidate, the rule and the checkpoints of its average)."""
    number = plan_average(Plant(*plant), *words, **keywords)
    result = run_segment(Plant(*plant), number)
    return export_candidate(Plant(*plant), number), result["averaged"]


def weights_of(ledger: Ledger, candidate: int) -> dict[str, np.ndarray]:
    row = ledger.select_first(
        sa.select(checkpoints.c.path).join(candidates, candidates.c.checkpoint == checkpoints.c.id).where(candidates.c.id == candidate)
    )  # fmt: skip
    assert row is not None
    return load_file(Path(row["path"]) / "model.safetensors")


def test_checkpoints_of_all_trunk_segments_are_found(plant: Opened) -> None:
    workspace, ledger = plant
    sources = choose_checkpoints_to_average(ledger, None, None)
    assert [source.step for source in sources] == [10, 15, 20, 25, 26]
    assert [source.segment for source in sources] == [1, 1, 1, 2, 2]
    assert [source.step for source in choose_checkpoints_to_average(ledger, 1, 2)] == [15, 20]


def test_a_uniform_average_equals_numpys_mean_and_is_released_like_any_candidate(plant: Opened) -> None:
    workspace, ledger = plant
    candidate, averaged = made_average(plant, "uniform", last=3)
    assert [part["step"] for part in averaged["sources"]] == [20, 25, 26]
    arrays = [load_file(Path(part["path"]) / "model.safetensors") for part in averaged["sources"]]
    for name, found in weights_of(ledger, candidate).items():
        mean = np.mean([array[name].astype(np.float64) for array in arrays], axis=0).astype(np.float32)
        np.testing.assert_array_max_ulp(found, mean, maxulp=1)
    assert next_due(Plant(workspace, ledger)) == f"judge {candidate}"
    before = ledger.select_rows(sa.select(segments.c.id))
    assert made_average(plant, "uniform", last=3) == (candidate, averaged), (
        "the same checkpoints are the same candidate"
    )
    assert ledger.select_rows(sa.select(segments.c.id)) == before
    made = release(Plant(workspace, ledger), add_verdict(ledger, candidate))
    found = read_release_provenance(ledger, made)
    assert [step["kind"] for step in found["segments"]] == ["trunk", "trunk", "average"]
    assert found["segments"][-1]["averaged"] == averaged and found["shards"]
    assert set(found["licences"]) == {""} and found["licences"][""] > 0  # the plant's documents name none
    told = factory("provenance", "--release", str(made), "-w", str(workspace.root)).stdout
    assert f"licence none named: {found['licences']['']:,} supervised tokens, 100.0%" in told
    shown = "\n".join(format_status(read_status(workspace)))
    assert "3 checkpoints" in shown and "20, 25, 26" in shown and "equal weights" in shown


def test_an_average_weighted_by_held_out_loss_equals_numpys_weighted_mean(plant: Opened) -> None:
    _, ledger = plant
    candidate, averaged = made_average(plant, "held-out-loss", segment=1)
    parts = averaged["sources"]
    assert [part["step"] for part in parts] == [10, 15, 20]
    losses = [part["loss"] for part in parts]
    assert losses == sorted(losses, reverse=True), "the loss of so young a run still falls"
    deviation = max(float(np.std(losses)), averaged["noise"])
    expected = np.exp(-np.array(losses) / deviation)
    assert [part["weight"] for part in parts] == pytest.approx(expected / expected.sum())
    arrays = [load_file(Path(part["path"]) / "model.safetensors") for part in parts]
    for name, found in weights_of(ledger, candidate).items():
        mean = np.average([a[name].astype(np.float64) for a in arrays], axis=0, weights=[p["weight"] for p in parts])
        np.testing.assert_array_max_ulp(found, mean.astype(np.float32), maxulp=1)


def test_documents_that_weight_an_average_do_not_judge_candidates(plant: Opened) -> None:
    ruler = load_held_out_loss_meter(Plant(*plant))
    judged = {document.key for document in training_suite(plant)}
    assert sum(ruler.shares.values()) == pytest.approx(1)
    assert judged and ruler.texts and not judged & {text.document.key for text in ruler.texts}
    assert set(ruler.document_counts) == set(ruler.shares) == {"chat", "code", "docs"}


def training_suite(plant: Opened) -> Any:
    from factory.evals.evaluator import load_current_suite

    return load_current_suite(Plant(*plant)).documents


def test_an_anneal_averages_only_its_own_checkpoints(plant: Opened) -> None:
    workspace, ledger = plant
    number = train_anneal(workspace, ledger)
    export_candidate(Plant(workspace, ledger), number)
    assert [source.step for source in list_averageable_checkpoints(ledger, SegmentRow.get(ledger, number))] == [30, 32]


def test_a_damaged_checkpoint_fails_its_average_and_blocks_no_other_work(plant: Opened, tmp_path: Path) -> None:
    workspace, ledger = plant
    number = plan_average(Plant(workspace, ledger), "held-out-loss", last=2)
    path = Path(averaging.read_average_plan(ledger, number)["sources"][0]["path"])
    shutil.copytree(path, tmp_path / "copy")
    blob = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(blob[:-4] + b"\0\0\0\1")
    try:
        with pytest.raises(SegmentError, match="model.safetensors"):
            run_segment(Plant(workspace, ledger), number)
    finally:
        shutil.rmtree(path)
        shutil.copytree(tmp_path / "copy", path)
    assert stuck(Plant(workspace, ledger)) is None and find_open_segment(ledger) is None
    assert plan_average(Plant(workspace, ledger), "held-out-loss", last=2) > number, "a new request makes a new segment"
    averaging.mark_segment_failed(ledger, SegmentRow.get(ledger, number + 1), "test")


@pytest.mark.parametrize(
    ("keywords", "code", "data"),
    [
        ({"segment": 99}, "training.segment_not_finished", {"segment": 99}),
        ({"segment": 1, "last": 9}, "training.too_few_checkpoints", {"needed": 9, "segment": 1, "steps": [10, 15, 20]}),
    ],
)
def test_too_few_checkpoints_are_refused_with_a_list_of_them(
    plant: Opened, keywords: dict[str, int], code: str, data: dict[str, Any]
) -> None:
    with refused(code, InputError, **data) as raised:
        plan_average(Plant(*plant), "uniform", **keywords)
    if code == "training.segment_not_finished":
        assert raised.value.data["finished"][:2] == [1, 2], "an anneal of a test above may be the third"


@pytest.mark.long("three commands in processes of their own, one of which makes an average, which is judged")
def test_the_command_average_prints_json_and_is_safe_to_repeat(plant: Opened) -> None:
    words = ("average", "--last", "2", "--segment", "1", "--json", "-w", str(plant[0].root))
    first, again = factory(*words), factory(*words)
    assert first.returncode == 0, first.stderr
    found = json.loads(first.stdout)
    assert [part["step"] for part in found["averaged"]["sources"]] == [15, 20] and json.loads(again.stdout) == found
    assert judge_one_candidate(Plant(*plant), found["candidate"])
    assert factory("average", "--segment", "99", "-w", str(plant[0].root)).returncode == 2


LOSSES = st.lists(st.floats(0.1, 20), min_size=2, max_size=9)


@given(LOSSES, st.floats(0, 1))
def test_weights_decrease_with_the_loss(losses: list[float], noise: float) -> None:
    weights = compute_averaging_weights(losses, noise)
    assert math.isclose(sum(weights), 1) and min(weights) > 0
    ranked = [weight for _, weight in sorted(zip(losses, weights, strict=True))]
    assert all(a >= b * (1 - 1e-12) for a, b in zip(ranked, ranked[1:]))
    assert max(weights) / min(weights) <= math.exp(math.sqrt(2 * len(losses))) * (1 + 1e-6)


@given(LOSSES, st.floats(0.1, 10))
def test_weights_do_not_depend_on_the_unit_of_the_loss(losses: list[float], unit: float) -> None:
    if np.std(losses) < 1e-6:
        return
    assert compute_averaging_weights([loss * unit for loss in losses], 0.0) == pytest.approx(
        compute_averaging_weights(losses, 0.0), rel=1e-6
    )


def test_losses_that_differ_by_less_than_the_noise_get_almost_equal_weights() -> None:
    assert compute_averaging_weights([2.0, 2.001], noise=1.0) == pytest.approx([0.5, 0.5], abs=1e-3)
    assert compute_averaging_weights([2.0, 2.0, 2.0], noise=0.0) == pytest.approx([1 / 3] * 3)
