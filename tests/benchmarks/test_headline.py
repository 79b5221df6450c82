"""``python -m benchmarks.headline``: both models compute the same function and see the same tokens. Also its arguments and its table."""

from __future__ import annotations

import doctest
import json
import os
import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.headline import __main__ as command
from benchmarks.headline import facts, models, page
from benchmarks.support import best_here
from factory.core.errors import FactoryError
from factory.core.progress import SILENT
from tests.support.paths import ROOT
from tests.support.text.library import write_library
from trainer.contract.json_lines import read_json_lines

KERNELS = ROOT / "policies" / "kernels.yaml"
STEPS = 8


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> models.Task:
    """Of a few modules, in fp32, so that rounding hides no difference."""
    root = tmp_path_factory.mktemp("headline")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sysconfig, "get_paths", lambda *_: {"stdlib": str(write_library(root / "library"))})
        plant = models.ingest_library(root / "workspace", SILENT)
    recipe = models.recipe_of(STEPS, 64, 4e-3, compile=False).model_copy(update={"precision": "fp32"})
    return models.task_of(plant, recipe, 1)


@pytest.fixture(scope="module")
def ours(task: models.Task, tmp_path_factory: pytest.TempPathFactory) -> models.Trained:
    return models.train_ours(task, tmp_path_factory.mktemp("ours") / "factory", KERNELS)


@pytest.fixture(scope="module")
def same(task: models.Task, tmp_path_factory: pytest.TempPathFactory) -> models.Trained:
    """transformers, from the factory's first weights."""
    return models.train_theirs(task, tmp_path_factory.mktemp("same") / "theirs", models.first_weights(task, KERNELS))


def test_the_same_weights_have_the_same_first_loss(ours: models.Trained, same: models.Trained) -> None:
    assert ours.losses[0] == pytest.approx(same.losses[0], abs=1e-5)


def test_both_models_see_the_same_tokens(task: models.Task, ours: models.Trained, same: models.Trained) -> None:
    batches = [batch for batch, _ in task.batches()]
    counted = sum(batch.used for batch in batches), sum(batch.supervised for batch in batches)
    assert len(batches) == len(ours.losses) == len(same.losses) == STEPS
    assert (ours.tokens, ours.supervised) == (same.tokens, same.supervised) == counted
    assert counted[0] > counted[1] > 0


def test_both_models_train_with_the_same_rates(task: models.Task, ours: models.Trained) -> None:
    lines = [
        line for kind in ("trunk", "anneal") for line in read_json_lines(ours.export.parent / kind / "metrics.jsonl")
    ]
    rates = [lr for _, lr in task.batches()]
    assert [line["lr"] for line in lines] == rates
    assert rates[-1] < max(rates), "the last steps anneal"


def test_both_models_learn_the_same_from_the_same_weights(
    task: models.Task, ours: models.Trained, same: models.Trained
) -> None:
    """A healthy control: nothing but z-loss and the order of sums is between them."""
    assert same.losses == pytest.approx(ours.losses, abs=2e-3)
    assert models.same_tensors(ours.export, same.export)
    bits = [models.bits_of(task, one.export, SILENT) for one in (ours, same)]
    assert bits[0] == pytest.approx(bits[1], abs=2e-3)
    assert ours.losses[-1] < ours.losses[0] - 0.1, "and they do learn"


def test_the_losses_reveal_other_masks_weights_and_rates(task: models.Task, ours: models.Trained) -> None:
    """Documents that see one another, a matrix that is other, rates that are other: each moves the losses by more than the bounds above."""
    weights = models.first_weights(task, KERNELS)
    batch, lr = next(task.batches())
    seeing = replace(batch, positions_BT=torch.arange(batch.tokens_BT.shape[1]).expand_as(batch.tokens_BT))
    theirs = models.Theirs(task.recipe, weights)
    with torch.no_grad():
        assert abs(float(theirs.loss(seeing)) - ours.losses[0]) > 1e-4
    other = weights | {"model.layers.0.mlp.up_proj.weight": 2 * weights["model.layers.0.mlp.up_proj.weight"]}
    with torch.no_grad():
        assert abs(float(models.Theirs(task.recipe, other).loss(batch)) - ours.losses[0]) > 1e-4
    slower = models.Theirs(task.recipe, weights)
    losses = [slower.step(batch, lr / 2) for batch, lr in task.batches()]
    assert max(abs(a - b) for a, b in zip(losses, ours.losses)) > 2e-3


def test_models_that_are_not_comparable_are_refused(ours: models.Trained) -> None:
    trained = {page.OURS: ours, page.THEIRS: ours, page.FROM_OURS: ours}
    command.refuse_unequal(trained)
    with pytest.raises(FactoryError, match="nothing is compared"):
        command.refuse_unequal(trained | {page.THEIRS: replace(ours, tokens=ours.tokens - 1)})
    with pytest.raises(FactoryError, match="these are two models"):
        command.refuse_unequal(trained | {page.FROM_OURS: replace(ours, losses=[1.1 * ours.losses[0]])})


def test_the_trigram_baseline_scores_every_domain(task: models.Task) -> None:
    bits = models.trigram(task, SILENT)
    assert set(bits) == set(models.scored_bytes(task)) == {"chat", "code", "docs"}
    assert all(1.0 < value < 8.0 for value in bits.values())


def test_timed_steps_of_both_models_alternate(task: models.Task) -> None:
    seconds = models.step_seconds(task, KERNELS, 0.0)
    assert [len(one) for one in seconds] == [models.LEAST_ROUNDS] * 2
    assert all(one > 0 for times in seconds for one in times)


def test_the_size_of_the_set_up_includes_indirect_requirements() -> None:
    names = facts.closure(facts.requirements())
    assert {"torch", "numpy", "sympy", "pip"} <= set(names), "sympy is needed by torch alone"
    assert not {"pytest", "ruff", "lm-eval"} & set(names), "these are what tests need"
    assert facts.setup_bytes() > 5e8


def test_a_file_with_two_names_counts_once_on_disk(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(os.urandom(100_000))
    before = facts.on_disk(tmp_path)
    os.link(tmp_path / "one", tmp_path / "two")
    assert facts.on_disk(tmp_path) == before >= 100_000


FOUND: dict[str, Any] = {
    "command": "python -m benchmarks.headline",
    "commit": "0123abc",
    "machine": {"name": "cpu-test", "processor": "A Processor", "threads": 2, "torch": "2.13.0"},
    "model": {
        "parameters": 1_300_000,
        "layers": 4,
        "width": 128,
        "vocabulary": 4096,
        "steps": 130,
        "lr": 0.002,
        "tokens_per_step": 4096,
        "precision": "bf16",
        "flops_per_token": 8e6,
    },
    "trained": {
        name: [{"tokens": 9, "supervised": 8, "losses": [8.3], "seconds": 40.0, "core_seconds": 72.0}] * 2
        for name in (page.OURS, page.THEIRS, page.FROM_OURS)
    },
    "step_seconds": {page.OURS: [0.2, 0.1, 0.3], page.THEIRS: [0.4, 0.2, 0.5]},
    "load_before": 0.1,
    "matmul_flops_per_s": {"bf16": 1e12, "fp32": 2e11},
    "held_out": {"code": {"documents": 23, "bytes": 9}},
    "bits_per_byte": {name: [{"code": 2.5, "all": 2.5}, {"code": 2.7, "all": 2.6}] for name in page.MEASURED},
    "shard_to_verdict": [{"shard": "a.jsonl", "candidate": 2, "outcome": "promote", "seconds": 64.0}],
    "no_verdict": "",
    "disk": {"setup_bytes": 2.2e9, "venv_bytes": 3e9, "clone": {"files_bytes": 1.1e7, "history_bytes": 8e6}},
    "price": {"per_hour": 0.1, "source": "ours"},
}


def test_the_table_begins_with_machine_and_command_and_has_each_number_once() -> None:
    lines = page.markdown(FOUND).splitlines()
    assert "cpu-test" in lines[0] and "`python -m benchmarks.headline`" in lines[0]
    table = [line for line in lines if line.startswith("|")]
    assert {line.count("|") for line in table} == {2 + len(page.MEASURED)}
    found = {line.split(" | ")[0].removeprefix("| "): line.split(" | ")[1:3] for line in table}
    assert found["training step, tokens/s in bf16"] == ["40,960", "20,480"]  # of the fastest of each
    assert found["its share of what bf16 matrix products alone reach here, 1,000 GFLOP/s"] == ["32.8%", "16.4%"]
    assert found["held-out bits per byte, code (23 documents)"][0] == "2.600", "the mean of two seeds"
    assert found["a billion tokens, core-hours"] == ["14", "27"]  # 1e9 / 40,960 / 3,600 × 2
    assert found["a billion tokens, at 0.1 an hour (ours)"] == ["0.68", "1.36"]
    assert found["from a shard's ingest to its verdict, s"][0] == "64"


def test_the_table_names_missing_measurements() -> None:
    lacking = FOUND | {"shard_to_verdict": [], "no_verdict": "not measured: no demo has run here.", "price": None}
    said = page.markdown(lacking | {"disk": FOUND["disk"] | {"clone": None}})
    assert "not measured: no demo has run here." in said and "Price: not stated" in said and "a clone" not in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--steps", "1"], "--steps: expected a whole number, at least 4; got '1'"),
        (["--width", "100"], "--width: expected a multiple of 64, at least 64; got '100'"),
        (
            ["--price-per-hour", "nan", "--price-source", "x"],
            "--price-per-hour: expected a number above zero; got 'nan'",
        ),
        (["--price-per-hour", "0.1"], "a price needs the words that say whose it is"),
        (
            ["--workspace", "/nowhere/at/all"],
            "there is no ledger.db; 'factory demo --workspace /nowhere/at/all' makes one",
        ),
        (["--out", "/proc/nothing"], "--out /proc/nothing: no files can be written there"),
        (["--wrong"], "unrecognized arguments: --wrong"),
    ],
)
def test_an_invalid_argument_is_one_line_and_measures_nothing(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert command.main(["--out", str(tmp_path), *words]) == 2
    printed = capsys.readouterr()
    assert said in printed.err and printed.err.count("\n") == 1 and not printed.out
    assert not list(tmp_path.iterdir())


def test_the_help_text_explains_every_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--help"])
    said = capsys.readouterr().out
    for word in ("speed", "quality", "delay", "disk", "cost", "exit codes", "examples", "--price-source"):
        assert word in said


def test_the_examples_in_docstrings_hold() -> None:
    for module in (command, models, page):
        found = doctest.testmod(module)
        assert found.attempted and not found.failed


@pytest.mark.slow("trains six small models and times two more: half a minute of a core")
def test_the_whole_command_measures_and_writes_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    library = str(write_library(tmp_path / "library"))
    monkeypatch.setattr(sysconfig, "get_paths", lambda *_: {"stdlib": library})
    monkeypatch.setattr(best_here, "tuned_kernels", lambda _: KERNELS)
    whole = models.recipe_of
    monkeypatch.setattr(models, "recipe_of", lambda *sizes: whole(*sizes, compile=False))
    monkeypatch.setattr(command, "SECONDS", 0.5)
    out = tmp_path / "out"
    words = ["--steps", "8", "--width", "64", "--seeds", "2", "--price-per-hour", "0.5", "--price-source", "a test"]
    assert command.main([*words, "--out", str(out)]) == 0
    said = capsys.readouterr()
    (table,), (document,) = out.glob("headline-cpu-*.md"), out.glob("headline-cpu-*.json")
    assert said.out == table.read_text() and "Seed 2 of 2: " in said.err
    found = json.loads(document.read_text())
    assert page.markdown(found) == table.read_text()
    assert str(tmp_path) not in table.read_text() + document.read_text()
    assert set(found["bits_per_byte"]) == set(page.MEASURED)
    one, other = found["trained"][page.OURS]
    assert one["losses"] != other["losses"], "each seed has its own weights and order"
    assert [one["tokens"], other["tokens"]] == [theirs["tokens"] for theirs in found["trained"][page.THEIRS]]
