"""The line profiler counts times for the right lines. Checked on a real step of the tiny recipe."""

from __future__ import annotations

import json
import re
import xml.dom.minidom
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from agents.line_profiler import session
from agents.line_profiler.__main__ import write_profile_files
from agents.line_profiler.capture import OperationRecorder
from agents.line_profiler.profile_schema import FORMAT, Profile
from agents.line_profiler.report.page import render_profile_page
from agents.line_profiler.report.report import make_profile_table
from agents.line_profiler.report.summary_text import write_profile_summary
from agents.line_profiler.session import ProfileSession, measure_profile
from tests.support.paths import ROOT
from trainer.contract.recipe import Recipe


@pytest.fixture(scope="module", autouse=True)
def as_the_clock_reads() -> Iterator[None]:
    """Which line a time belongs to must not hang on how quiet the machine is: nobody waits for the fastest step, and what
    watching costs, which a busy machine makes look like more than an operation takes, is not taken out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "LEAST_S", 0.0)
        patch.setattr(session, "SETTLING_S", 0.0)
        patch.setattr(session, "_crossing", lambda *_: 0.0)
        yield


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    recipe = Recipe.load(ROOT / "policies" / "recipes" / "tiny.yaml")
    kernels = tmp_path_factory.mktemp("kernels") / "kernels.yaml"
    kernels.write_text("cpu: {}\n")  # references: their lines are the ones looked for below
    return measure_profile(
        recipe, kernels, steps=2, measure_recipe_step=False, isolation_budget_s=1e6, implementations_s=0
    ).profile


def _line(found: Profile, text: str, op: str = "") -> tuple[float, float]:
    lines = [line for line in found.lines if text in line.source and line.op == op]
    assert lines, text
    return sum(line.forward_s for line in lines), sum(line.backward_s for line in lines)


def test_backward_time_counts_for_the_forward_line(found: Profile) -> None:
    for text, op in [
        ("scaled_dot_product_attention", "attention"),
        ("F.silu(gate_XF)", "swiglu"),
        ("joined_BTX = self.multiply(h_BTD, ", ""),
    ]:
        forward, backward = _line(found, text, op)
        assert forward > 0 and backward > 0, text
    assert not any("loss.backward()" in line.source and line.share > 0.05 for line in found.lines)


def test_the_profile_has_lines_for_the_optimiser_and_for_the_data(found: Profile) -> None:
    assert any(line.phase == "data" and line.file == "trainer/batch.py" for line in found.lines)
    lines = [line for line in found.lines if line.op == "adamw"]
    assert {(line.file, line.phase) for line in lines} == {("kernels/adamw/__init__.py", "optimizer")}
    op = next(op for op in found.ops if op.op == "adamw")
    assert op.backward_s == 0 and op.forward_s == pytest.approx(sum(line.forward_s for line in lines)) != 0


def test_newton_schulz_is_a_profiled_op_if_the_recipe_uses_muon(tmp_path: Path) -> None:
    recipe = Recipe.load(ROOT / "policies" / "recipes" / "tiny.yaml")
    recipe = recipe.model_copy(update={"optimizer": recipe.optimizer.model_copy(update={"name": "muon"})})
    kernels = tmp_path / "kernels.yaml"
    kernels.write_text("cpu: {}\n")
    muon = measure_profile(
        recipe, kernels, steps=1, measure_recipe_step=False, isolate=False, implementations_s=0
    ).profile
    calls = {op.op: op.calls for op in muon.ops}
    assert calls["newton_schulz"] == 3 and calls["adamw"] >= 1  # a stack of q, gate, up, one of k, v, one of o, down
    lines = [line for line in muon.lines if line.op == "newton_schulz"]
    assert lines and all(line.phase == "optimizer" for line in lines)
    assert all(line.forward_s > 0 for line in lines)
    assert any(line.flops for line in lines)


def test_the_calls_of_an_op_are_summed_over_the_layers(found: Profile) -> None:
    layers = found.recipe["model"]["layers"]
    calls = {op.op: op.calls for op in found.ops}
    assert calls == {
        "embedding": 1,
        "rms_norm": layers + 1,
        "add_rms_norm": layers,
        "qk_norm_rope": 2 * layers,
        "swiglu": layers,
        "attention": layers,
        "linear_cross_entropy": 1,
        "adamw": 2,  # matrices decay, the rest does not
    }


def test_flops_of_a_line_follow_from_its_shapes(found: Profile) -> None:
    model, tokens = found.recipe["model"], found.recipe["batch"]["sequences"] * found.recipe["model"]["context"]
    line = next(line for line in found.lines if "logits_NV = F.linear" in line.source)
    assert line.flops == pytest.approx(
        3 * 2 * tokens * model["d_model"] * model["vocab_size"]
    )  # one product forward, two backward


def test_a_profile_survives_json_and_can_be_printed(found: Profile) -> None:
    raw = json.loads(found.to_json())
    assert Profile.from_mapping(raw) == found
    assert make_profile_table(Profile.from_mapping(raw)) is not None and "eager step" in write_profile_summary(found)
    with pytest.raises(ValueError, match="format"):
        Profile.from_mapping(raw | {"format": 99})


def test_time_is_not_counted_outside_of_the_mode() -> None:
    recorder = OperationRecorder()
    torch.ones(3).sum()
    with recorder:
        pass
    assert not recorder.events


def test_a_line_counts_one_call_each_time_it_runs(found: Profile) -> None:
    layers = found.recipe["model"]["layers"]
    calls = lambda text, op: next(line.calls for line in found.lines if text in line.source and line.op == op)
    assert calls("F.silu(gate_XF) * up_XF", "swiglu") == layers  # two operations, one line
    assert calls("joined_BTX = self.multiply(h_BTD, ", "") == 2 * layers  # its comprehension is no call


def test_every_distinct_operation_was_timed_alone(found: Profile) -> None:
    alone = found.isolation
    assert alone is not None and alone.not_measured == ()
    assert (alone.warmup, alone.iterations) == (10, 100) and alone.full == alone.signatures
    events = sum(line.isolated_s is not None for line in found.lines)
    assert events == sum(line.phase != "data" for line in found.lines)
    silu = next(line for line in found.lines if line.op == "swiglu")
    assert silu.isolated_s and silu.isolated_spread_s is not None and silu.isolated_s > 0


def test_the_summary_shows_the_difference_to_torch_profiler(found: Profile) -> None:
    check = found.cross_check
    assert check.torch_s > 0 and check.lines_s > 0
    operations = sum(line.forward_s + line.backward_s for line in found.lines)
    assert check.lines_s == pytest.approx(operations)  # the same step, not another one
    assert f"({check.ratio:.0%}), a difference" in write_profile_summary(
        found
    ) and f"({found.coverage:.0%})" in write_profile_summary(found)


def test_edges_follow_the_data_flow_and_mark_conditional_lines(found: Profile) -> None:
    names = {line.source[:34]: line.name for line in found.lines if line.op in ("", "swiglu")}
    swiglu = next(line.name for line in found.lines if line.op == "swiglu")
    products = names["joined_BTX = self.multiply(h_BTD, torch.cat(weights)"[:34]]
    down = next(line.name for line in found.lines if line.source.startswith("return self.adapt(h_BTF, down)"))
    edges = {(edge.source, edge.target): edge for edge in found.edges}
    assert edges[products, swiglu].bytes > 0 and edges[swiglu, down].bytes > 0
    assert (down, swiglu) not in edges
    residual = next(line.name for line in found.lines if line.op == "add_rms_norm" and line.source.startswith("sum_XD"))
    out = next(line.name for line in found.lines if line.source.startswith("return self.adapt(o_BTX"))
    assert not edges[out, residual].conditional
    into = [edge for (_, target), edge in edges.items() if target == products]
    assert into and all(edge.conditional for edge in into)  # only where matrices are joined
    assert edges[residual, names["return x_BSD + y_BSD"]].conditional  # only where there are no experts


def test_query_and_key_are_stream_candidates(found: Profile) -> None:
    model = (ROOT / "trainer" / "model" / "attention.py").read_text().splitlines()
    at = lambda text: f"trainer/model/attention.py:{next(n for n, line in enumerate(model, 1) if text in line)}"
    q, k = at("q_BTHK = block.ops.qk_norm_rope"), at("k_BTGK = block.ops.qk_norm_rope")
    pairs = [{c.branches[0][0], c.branches[1][0]} for c in found.stream_candidates]
    assert {q, k} in pairs


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> ProfileSession:
    """With kernels as tuning may choose them."""
    recipe = Recipe.load(ROOT / "policies" / "recipes" / "tiny.yaml")
    kernels = tmp_path_factory.mktemp("chosen") / "kernels.yaml"
    kernels.write_text("cpu: {attention: recompute, linear_cross_entropy: native, adamw: fused}\n")
    return measure_profile(recipe, kernels, steps=1, measure_recipe_step=False, isolate=False, implementations_s=0)


def test_page_and_trace_contain_the_whole_profile(measured: ProfileSession, tmp_path: Path) -> None:
    write_profile_files(measured, tmp_path)
    assert json.loads((tmp_path / "profile.json").read_text())["format"] == FORMAT
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    timed = [event for event in trace if event["ph"] == "X"]
    assert len(timed) == len(measured.events) + sum(line.phase == "data" for line in measured.profile.lines)
    assert all(a["ts"] + a["dur"] <= b["ts"] + 0.01 for a, b in zip(timed, timed[1:]))
    page = (tmp_path / "profile.html").read_text()
    drawings = re.findall(r"<svg.*?</svg>", page, re.S)
    assert len(drawings) == 2 and all(xml.dom.minidom.parseString(drawing) for drawing in drawings)
    assert drawings[1].count('class="edge"') + drawings[0].count('class="edge"') == len(measured.profile.edges)
    assert not re.search(r"<script|src=|href=|https?://", page), "the page must open offline"


def test_source_lines_are_escaped(found: Profile) -> None:
    line = replace(found.lines[0], source="</script><script>alert(1)</script>", op="<img src=x>", file="<b>")
    page = render_profile_page(replace(found, lines=(line, *found.lines[1:]), device="<i>"))
    assert "<script" not in page and "<img" not in page and "<b>" not in page and "<i>" not in page


def test_a_hand_written_backward_counts_for_its_op(measured: ProfileSession) -> None:
    found = measured.profile
    assert found.kernels["attention"] == "recompute"
    backward = {op.op: op.backward_s for op in found.ops}
    assert backward.pop("adamw") == 0
    assert all(seconds > 0 for seconds in backward.values()), backward
