"""Are times put on the right lines? Checked on the tiny recipe's real step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from agents.line_profiler import Profile, profile
from agents.line_profiler.capture import Recorder
from agents.line_profiler.report import summary, table
from trainer.recipe import Recipe

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    recipe = Recipe.load(ROOT / "policies" / "recipes" / "tiny.yaml")
    kernels = tmp_path_factory.mktemp("kernels") / "kernels.yaml"
    kernels.write_text("cpu: {}\n")  # references: their lines are the ones looked for below
    return profile(recipe, kernels, steps=2, measure_recipe_step=False)


def _line(found: Profile, text: str, op: str = "") -> tuple[float, float]:
    lines = [line for line in found.lines if text in line.source and line.op == op]
    assert lines, text
    return sum(line.forward_s for line in lines), sum(line.backward_s for line in lines)


def test_backward_time_stands_at_the_forward_line(found: Profile) -> None:
    for text, op in [
        ("scaled_dot_product_attention", "attention"),
        ("F.silu(gate_XF)", "swiglu"),
        ("F.linear(h_BTD, torch.cat(weights))", ""),
    ]:
        forward, backward = _line(found, text, op)
        assert forward > 0 and backward > 0, text
    assert not any("loss.backward()" in line.source and line.share > 0.05 for line in found.lines)


def test_optimiser_and_data_have_lines(found: Profile) -> None:
    assert any(line.phase == "optimizer" and "adamw.step" in line.source and line.forward_s > 0 for line in found.lines)
    assert any(line.phase == "data" and line.file == "trainer/batch.py" for line in found.lines)


def test_calls_fold_the_layers(found: Profile) -> None:
    layers = found.recipe["model"]["layers"]
    calls = {op.op: op.calls for op in found.ops}
    assert calls == {
        "rms_norm": 2 * layers + 1,
        "qk_norm_rope": 2 * layers,
        "swiglu": layers,
        "attention": layers,
        "linear_cross_entropy": 1,
    }


def test_flops_are_those_of_the_shapes(found: Profile) -> None:
    model, tokens = found.recipe["model"], found.recipe["batch"]["sequences"] * found.recipe["model"]["context"]
    line = next(line for line in found.lines if "logits_NV = F.linear" in line.source)
    assert line.flops == pytest.approx(
        3 * 2 * tokens * model["d_model"] * model["vocab_size"]
    )  # one product forward, two backward


def test_profile_survives_json_and_prints(found: Profile) -> None:
    raw = json.loads(found.to_json())
    assert Profile.from_mapping(raw) == found
    assert table(raw) is not None and "eager step" in summary(found)
    with pytest.raises(ValueError, match="format"):
        Profile.from_mapping(raw | {"format": 99})


def test_time_is_not_counted_outside_of_the_mode() -> None:
    recorder = Recorder()
    torch.ones(3).sum()
    with recorder:
        pass
    assert not recorder.events
