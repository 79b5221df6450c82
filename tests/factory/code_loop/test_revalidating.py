"""Merged patches are judged again when their environment changes. The daemon starts this by itself."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa
from rich.console import Console

from factory.code_loop import approvals, revalidating
from factory.core.console import Terminal
from factory.core.workspace import find_checkout_root
from factory.gates.training_start import TrainingStart
from factory.git import repository
from factory.ledger.ledger import proposals, verdicts
from factory.ledger.plant import Plant
from tests.support.factory.approvals import FILES, NEW, PatchPlant, given_verdict

LEAN = (
    "-p",
    "no:langsmith_plugin",
    "-p",
    "no:hypothesispytest",
    "-p",
    "no:xdist",
)  # plugins that take seconds to import


@pytest.fixture
def plant(tmp_path: Path) -> PatchPlant:
    return PatchPlant(tmp_path)


@pytest.mark.slow("a benchmark's process, and a whole gate")
def test_a_slower_benchmark_makes_the_daemon_judge_merged_patches_again(
    plant: PatchPlant, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recipe = {"model": {}, "batch": {}, "precision": "fp32", "compile": False}
    for module in (approvals, revalidating):
        monkeypatch.setattr(module, "find_training_start", lambda ledger: TrainingStart(plant.target, 0, recipe, {}))
    judged = given_verdict(monkeypatch, "promote")
    plant.judged()
    plant.approve()
    suite = tmp_path / "test_speed.py"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:langsmith_plugin",
        "-p",
        "no:hypothesispytest",
        "-p",
        "benchmarks.conftest",
        "-c",
        os.devnull,
        str(suite),
    ]
    environment = os.environ | {"FACTORY_HOME": str(plant.workspace.root), "PYTHONPATH": str(find_checkout_root())}
    bench = lambda: subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True).stdout
    daemon = lambda: revalidating.revalidate_in_daemon(plant)
    suite.write_text("def test_stays(): pass\n")
    assert "noted" not in bench() and daemon() == []
    suite.write_text("def test_stays(): pass\ndef test_falls(): assert 0\n")
    noted = bench()
    assert " noted " in noted and "could not" not in noted
    assert daemon() == [2] and len(judged) == 1 and "benchmarks changed since" in plant.row(2)["hypothesis"]
    assert daemon() == []
    environment["FACTORY_HOME"] = str(tmp_path)
    assert "could not be noted" in bench()


def test_without_a_sandbox_the_daemon_reports_once_that_it_cannot_judge(
    plant: PatchPlant, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recipe = {"model": {"d_model": 8}, "batch": {}, "precision": "fp32", "compile": False}
    for module in (approvals, revalidating):
        monkeypatch.setattr(module, "find_training_start", lambda ledger: TrainingStart(plant.target, 0, recipe, {}))
    plant.judged()
    plant.approve()
    recipe["model"] = {"d_model": 16}
    monkeypatch.setenv("FACTORY_BWRAP", str(tmp_path / "bwrap"))
    said = io.StringIO()
    for _ in range(3):
        assert (
            revalidating.revalidate_in_daemon(
                Plant(plant.workspace, plant.ledger, Terminal(Console(file=said, width=300)))
            )
            == []
        )
    assert said.getvalue().count("cannot be judged again now") == 1
    assert len(plant.ledger.select_rows(sa.select(proposals))) == 1


@pytest.mark.parametrize("outcome", ["promote", "reject"])
def test_a_merged_patch_is_judged_again_once_after_its_environment_changed(
    plant: PatchPlant, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = {"model": {"d_model": 8}, "batch": {}, "precision": "fp32", "compile": False}
    start = TrainingStart(plant.target, 0, recipe, {})
    for module in (approvals, revalidating):
        monkeypatch.setattr(module, "find_training_start", lambda ledger: start)
    judged = given_verdict(monkeypatch, outcome)
    again = lambda: revalidating.revalidate_merged_patches(plant, plant.head())
    plant.judged()
    live = plant.approve()
    assert again() == [] and judged == []
    recipe["model"] = {"d_model": 16}
    assert again() == [2] and judged[0][:2] == (2, live)
    undo = plant.row(2)
    assert undo["target"] == "undo:1" and "recipe changed since" in undo["hypothesis"]
    assert repository.read_file_text(plant.target, undo["commit"], "kernels/ops.py") == FILES["kernels/ops.py"]
    assert again() == [] and plant.row()["state"] == "approved" and plant.head() == live
    with plant.ledger.begin() as tx:
        release = {"gate": "release", "subject": "candidate:7", "outcome": "reject", "against": "", "policy_sha256": ""}
        tx.execute(verdicts.insert().values(**release, subject_sha256="", reasons=[], evidence={}, created_at=1.0))
    if outcome == "reject":  # the daemon by itself, and once
        daemon = lambda: revalidating.revalidate_in_daemon(plant)
        stray = plant.target / "kernels" / "ops.py"
        text = stray.read_text()
        stray.write_text(text + "# mine")
        assert daemon() == []  # work that is not committed waits for nobody, and nobody for it
        stray.write_text(text)
        assert daemon() == [3] and "evals changed since" in plant.row(3)["hypothesis"] and daemon() == []
    if outcome == "promote":
        plant.approve(2)
        assert plant.files() == FILES | {"kernels/fused.py": NEW["kernels/fused.py"]}  # a file that nobody reads stays
        assert plant.row()["state"] == "reverted" and again() == []
