"""``factory plan`` as a person meets it: a table, JSON, and one line for every mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from factory.cli.app import app
from factory.core.errors import FactoryError
from tests.support.factory.command import factory
from tests.support.paths import ROOT
from tests.support.trainer.published_runs import QWEN3_30B
from trainer.contract.plan.run_plan import FP8

EXAMPLE = ["plan", "--params", "8e9", "--tokens", "300e9", "--gpus", "32", "--memory", "80"]


def said_here(*words: str) -> str:
    """What it prints, within this process."""
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.exception
    return done.stdout


def test_the_example_is_a_table_with_formulas_and_sources(tmp_path: Path) -> None:
    done = factory(*EXAMPLE, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for word in (
        *(
            "weights",
            "gradients",
            "optimiser",
            "compute copies",
            "activations",
            "logits, temporaries",
            "reserve",
            "in all",
        ),
        *(
            "tensor parallel",
            "pipeline parallel",
            "data parallel",
            "micro-batch",
            "tokens per step",
            "steps",
            "time",
            "cost",
        ),
        *("arXiv 1910.02054", "arXiv 2205.05198", "arXiv 2204.02311", "arXiv 2401.02954", "arXiv 2203.15556"),
    ):
        assert word in done.stdout, word
    assert max(map(len, done.stdout.splitlines())) <= 200


def test_json_holds_the_same_plan() -> None:
    said = json.loads(said_here(*EXAMPLE, "--price", "3", "--mfu", "0.5", "--gpu", "h200", "--json"))
    assert said["layout"]["data"] * said["layout"]["tensor"] == 32 and said["memory_there"] == 80e9
    assert said["effort"]["mfu"] == 0.5 and said["effort"]["cost"] == pytest.approx(3 * said["effort"]["gpu_hours"])
    assert said["gpu"] == "h200" and said["memory_needed"] <= said["memory_there"]


def test_a_public_models_config_is_planned_and_the_missing_expert_parallelism_is_said(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B))
    asked = ["plan", "--config", str(tmp_path), "--tokens", "1T", "--gpus", "16"]
    ours, others = (json.loads(said_here(*asked, *more, "--json")) for more in ([], ["--expert-parallel", "16"]))
    assert ours["effort"]["bound"] == "network" and ours["effort"]["days"] > 1.5 * others["effort"]["days"]
    said = said_here(*asked)
    assert "The network bounds this plan." in said and f"would take {others['effort']['days']:,.1f} days" in said
    refused = factory(*asked, "--expert-parallel", "5")
    assert (
        refused.returncode == 2
        and "--expert-parallel 5: it must divide the 16 GPUs and the 128 experts" in refused.stderr
    )


def test_a_recipe_is_planned_with_its_own_batch(tmp_path: Path) -> None:
    by_name = factory("plan", "--recipe", "demo", "--tokens", "1B", "--gpus", "4", "--json", cwd=tmp_path)
    assert by_name.returncode == 0, by_name.stderr
    assert json.loads(by_name.stdout)["layout"]["sequences"] == 16
    path = ROOT / "policies" / "recipes" / "demo.yaml"
    by_path = said_here("plan", "--recipe", str(path), "--tokens", "1B", "--gpus", "4", "--json")
    assert by_path == by_name.stdout
    found = {}
    for precision in ("bf16", "fp8"):
        mine = tmp_path / f"{precision}.yaml"
        mine.write_text(path.read_text().replace("precision: auto", f"precision: {precision}"))
        found[precision] = json.loads(
            said_here("plan", "--recipe", str(mine), "--tokens", "1B", "--gpus", "4", "--json")
        )
    assert found["fp8"]["effort"]["mfu"] == pytest.approx(FP8 * found["bf16"]["effort"]["mfu"])
    assert not any("another trainer" in note for note in found["fp8"]["remarks"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tokens", "300B"], "name one: --params 8e9, --recipe NAME or --config FILE"),
        (
            ["--params", "8B", "--recipe", "demo", "--tokens", "1B"],
            "name one: --params 8e9, --recipe NAME or --config FILE",
        ),
        (["--params", "8B"], "--tokens: is missing"),
        (["--params", "eight", "--tokens", "1B"], "--params: 'eight' is not a number; write it as 8e9 or 8B"),
        (["--params", "-8B", "--tokens", "1B"], "--params: -8B is not above zero"),
        (["--params", "nan", "--tokens", "1B"], "--params: 'nan' is not a number"),
        (["--params", "8B", "--tokens", "inf"], "--tokens: inf is outside the range of the scaling rules"),
        (["--params", "8B", "--tokens", "300B", "--gpus", "0"], "--gpus: 0 is not above zero"),
        (["--params", "8B", "--tokens", "300B", "--memory", "-1"], "--memory: -1 is not above zero"),
        (["--params", "8B", "--tokens", "300B", "--price", "-1"], "--price: -1 is not above zero"),
        (["--params", "8B", "--tokens", "300B", "--mfu", "40"], "--mfu: 40 is above 1, the whole peak"),
        (["--params", "8B", "--tokens", "300B", "--context", "4"], "--context: 4 is less than 8"),
        (["--params", "8B", "--tokens", "1B"], "--tokens: 1,000,000,000 is less than one token per parameter"),
        (["--params", "1M", "--tokens", "1B"], "--params: 1,000,000 parameters are too few"),
        (
            ["--params", "8B", "--tokens", "300B", "--gpu", "h1000"],
            "--gpu: no 'h1000' in the table; did you mean 'h100'?",
        ),
        (["--params", "70B", "--tokens", "2T", "--gpus", "8"], "--gpus 8: Nothing fits"),
        (["--recipe", "dmeo", "--tokens", "1B"], "--recipe: no recipe 'dmeo'; did you mean 'demo'?"),
        (["--recipe", "demo", "--tokens", "1B", "--gpus", "3"], "--recipe: batch.sequences (16)"),
        (["--recipe", "demo", "--tokens", "1B", "--vocab", "9"], "--vocab: the recipe already has it"),
        (["--recipe", "missing.yaml", "--tokens", "1B"], "--recipe: missing.yaml: cannot be read"),
    ],
)
def test_mistakes_get_one_line_that_names_the_flag(words: list[str], said: str) -> None:
    """Asked within this process; that an error is printed, and its exit code, is the same of every command (``test_cli``)."""
    error = CliRunner().invoke(app, ["plan", *words]).exception
    assert isinstance(error, FactoryError) and error.exit_code == 2, error
    assert said in str(error) and "\n" not in str(error)
