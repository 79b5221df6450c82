"""``factory plan`` prints a table or JSON, and one line for every mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from factory.cli import continuing_plan
from factory.cli.app import app
from factory.core.errors import FactoryError
from factory.presets.presets import Hardware
from kernels.linear_cross_entropy import chunks, cpp
from tests.support.factory.command import factory
from tests.support.messages import refused
from tests.support.paths import ROOT
from tests.support.trainer.public_configs import CONFIGS
from tests.support.trainer.published_runs import QWEN3_30B
from trainer.contract.plan.hf_config import read_config
from trainer.contract.plan.run_plan import FP8
from trainer.contract.plan.sizing import MOST_LOGITS

SIZED = ["--params", "8B", "--tokens", "300B"]
EXAMPLE = ["plan", "--params", "8e9", "--tokens", "300e9", "--gpus", "32", "--memory", "80"]


def said_here(*words: str) -> str:
    """The output of a command that runs in this process."""
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.exception
    return done.stdout


def test_the_example_of_plan_prints_a_table_with_formulas_and_sources(tmp_path: Path) -> None:
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


def test_json_output_has_the_options_and_the_costs_of_the_plan() -> None:
    said = json.loads(said_here(*EXAMPLE, "--price", "3", "--mfu", "0.5", "--gpu", "h200", "--json"))
    assert said["layout"]["data"] * said["layout"]["tensor"] == 32 and said["memory_there"] == 80e9
    assert said["effort"]["mfu"] == 0.5 and said["effort"]["cost"] == pytest.approx(3 * said["effort"]["gpu_hours"])
    assert said["gpu"] == "h200" and said["memory_needed"] <= said["memory_there"]


def test_a_plan_for_a_public_config_says_what_expert_parallelism_would_gain(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B))
    asked = ["plan", "--from", str(tmp_path), "--tokens", "1T", "--gpus", "16"]
    ours, others = (json.loads(said_here(*asked, *more, "--json")) for more in ([], ["--expert-parallel", "16"]))
    assert ours["effort"]["bound"] == "network" and ours["effort"]["days"] > 1.5 * others["effort"]["days"]
    said = said_here(*asked)
    assert "network limits the speed" in said and f"would take {others['effort']['days']:,.1f} days" in said
    wrong = factory(*asked, "--expert-parallel", "5")
    assert wrong.returncode == 2 and "error[plan.experts_not_divided]: --expert-parallel 5 " in wrong.stderr
    assert "GPUs (16)" in wrong.stderr and "experts (128)" in wrong.stderr


def make_folder(folder: Path) -> Path:
    """SmolLM2-135M's config.json with two layers, and weights of zeros."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIGS["SmolLM2-135M"] | {"num_hidden_layers": 2}))
    public = read_config(folder)
    assert public.family is not None
    tensors = {
        name: torch.zeros(one.shape, dtype=torch.bfloat16)
        for one in public.family.list_mappings(public.spec)
        for name in one.theirs
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_plan_to_continue_a_folder_compares_its_headers_and_says_what_fits_on_both_places(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    asked = ["plan", "--from", str(folder), "--gpus", "2", "--gpu", "rtx-4090", "--lora", "4", "--targets", "q,v"]
    said = json.loads(said_here(*asked, "--freeze", "blocks.0", "--context", "512", "--json"))
    assert said["model"]["parameters"] == 35_392_320 and said["model"]["context"] == 512 and said["family"] == "llama"
    assert said["files"] == {"files": 1, "tensors": 20, "bytes": 2 * 35_392_320} and said["longest_context"] == 8192
    assert [fit["recipe"].get("freeze") or fit["recipe"].get("adapt") for fit in said["fits"]][:4] == [
        None, ["blocks.0"], {"kind": "lora", "rank": 4, "targets": ["q", "v"]}, {"kind": "dora", "rank": 4, "targets": ["q", "v"]},
    ]  # fmt: skip
    assert said["fits"][2]["trained"] == 2 * 4 * (576 + 576 + 576 + 192)
    places = [fit["devices"] for fit in said["fits"]]
    assert len(places) == 8 and places[0]["memory"] == 24e9 and places[0]["count"] == 2
    assert places[4]["memory"] == min(Hardware.of_this_machine().gpus, default=Hardware.of_this_machine().memory)
    text = said_here(*asked)
    for word in (
        "35,392,320",
        "20 tensors",
        "LoRA, rank 4",
        "2 × rtx-4090",
        "this machine",
        "micro_sequences: ",
        "longest context",
    ):
        assert word in text, word
    both = json.loads(said_here(*asked, "--tokens", "10M", "--json"))
    assert both["effort"]["steps"] > 0 and len(both["continuing"]["fits"]) == 8
    assert "the run" in said_here(*asked, "--tokens", "10M")


def test_a_config_json_is_compared_with_the_weights_beside_it(tmp_path: Path) -> None:
    config = make_folder(tmp_path / "model") / "config.json"
    said = json.loads(said_here("plan", "--from", str(config), "--json"))
    assert said["files"] == {"files": 1, "tensors": 20, "bytes": 2 * 35_392_320}
    (config.parent / "model.safetensors").unlink()
    assert json.loads(said_here("plan", "--from", str(config), "--json"))["files"] is None


def test_a_context_beyond_the_models_positions_is_refused_with_its_number(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    error = CliRunner().invoke(app, ["plan", "--from", str(folder), "--context", "8193"]).exception
    assert isinstance(error, FactoryError) and error.exit_code == 2, error
    with refused("continuing_plan.context_beyond_model", context=8193, longest=8192, model=folder):
        raise error
    assert (
        json.loads(said_here("plan", "--from", str(folder), "--context", "8192", "--json"))["longest_context"] == 8192
    )


def test_a_folder_whose_weights_are_of_another_model_is_refused_with_both_numbers(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    (folder / "config.json").write_text(json.dumps(CONFIGS["SmolLM2-135M"]))
    done = factory("plan", "--from", str(folder))
    assert done.returncode == 2 and "error[plan.bad_model]: --from: " in done.stderr
    assert "35,392,320" in done.stderr and "134,515,008" in done.stderr and len(done.stderr.splitlines()) == 1


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
    ("words", "code", "data"),
    [
        (["--tokens", "300B"], "no_model", {}),
        (["--params", "8B", "--recipe", "demo", "--tokens", "1B"], "no_model", {}),
        (["--params", "8B"], "no_number", {"flag": "--tokens"}),
        (["--params", "eight", "--tokens", "1B"], "not_a_number", {"flag": "--params", "text": "eight"}),
        (["--params", "-8B", "--tokens", "1B"], "not_above_zero", {"flag": "--params", "text": "-8B"}),
        (["--params", "nan", "--tokens", "1B"], "not_a_number", {"flag": "--params", "text": "nan"}),
        (["--params", "8B", "--tokens", "inf"], "out_of_range", {"flag": "--tokens", "text": "inf"}),
        ([*SIZED, "--gpus", "0"], "not_above_zero", {"flag": "--gpus", "text": "0"}),
        ([*SIZED, "--memory", "-1"], "not_above_zero", {"flag": "--memory", "text": "-1"}),
        ([*SIZED, "--price", "-1"], "not_above_zero", {"flag": "--price", "text": "-1"}),
        ([*SIZED, "--mfu", "40"], "mfu_above_one", {"mfu": 40.0}),
        ([*SIZED, "--context", "4"], "short_context", {"context": 4}),
        (["--params", "8B", "--tokens", "1B"], "few_tokens", {"tokens": 1e9}),
        (["--params", "1M", "--tokens", "1B"], "bad_model", {"flag": "--params"}),
        ([*SIZED, "--gpu", "h1000"], "no_gpu", {"gpu": "h1000", "nearest": "; did you mean 'h100'?"}),
        (["--params", "70B", "--tokens", "2T", "--gpus", "8"], "nothing_fits", {"gpus": 8}),
        ([*SIZED, "--expert-parallel", "2"], "no_experts", {"ways": 2}),
        (["--recipe", "dmeo", "--tokens", "1B"], "no_recipe", {"name": "dmeo", "nearest": "; did you mean 'demo'?"}),
        (["--recipe", "demo", "--tokens", "1B", "--gpus", "3"], "bad_model", {"flag": "--recipe"}),
        (["--recipe", "demo", "--tokens", "1B", "--vocab", "9"], "known_already", {"flag": "--vocab"}),
        (["--recipe", "missing.yaml", "--tokens", "1B"], "bad_model", {"flag": "--recipe"}),
        ([*SIZED, "--lora", "8"], "only_with_from", {"flag": "--lora"}),
        ([*SIZED, "--freeze", "embedding"], "only_with_from", {"flag": "--freeze"}),
        ([*SIZED, "--targets", "q"], "only_with_from", {"flag": "--targets"}),
        (["--from", "missing"], "gguf_source.no_place", {"place": Path("missing")}),
        (["--from", "missing", "--vocab", "9"], "known_already", {"flag": "--vocab"}),
        (["--from", "missing", "--lora", "0"], "not_above_zero", {"flag": "--lora", "text": "0"}),
        (["--from", "missing", "--params", "8B"], "no_model", {}),
    ],
)
def test_a_mistake_gets_one_line_that_names_the_option(words: list[str], code: str, data: dict[str, Any]) -> None:
    """Runs in this process. ``test_cli`` checks how a command prints an error."""
    error = CliRunner().invoke(app, ["plan", *words]).exception
    assert isinstance(error, FactoryError) and error.exit_code == 2, error
    with refused(code if "." in code else f"plan.{code}", **data):
        raise error
    assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--params", "1M", "--tokens", "1B"], "1,000,000"),
        (["--recipe", "demo", "--tokens", "1B", "--gpus", "3"], "batch.sequences (16)"),
        (["--recipe", "missing.yaml", "--tokens", "1B"], "missing.yaml"),
    ],
)
def test_the_error_of_a_plan_names_the_wrong_number_or_file(words: list[str], said: str) -> None:
    assert said in str(CliRunner().invoke(app, ["plan", *words]).exception)


def test_the_plan_knows_the_chunks_of_the_loss_heads_that_overwrite_their_logits() -> None:
    assert continuing_plan.IN_PLACE == {"native": cpp.LEAST_TOKENS, "triton": chunks.GPU_TOKENS}
    assert MOST_LOGITS == chunks.GPU_BYTES
    assert continuing_plan.describe_loss_head("cuda") == (chunks.GPU_TOKENS, True)
