"""The search proposer: the changes that it picks, its predictions, and that it proposes no change twice."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from agents.core.workbench import AgentWrittenLines, EarlierProposal, Measurement, MeasurementError, UnreadableFileError
from agents.core.yaml_edit import set_yaml_value
from agents.search_proposer.search_proposer import POLICY, propose_implementations
from factory.demo.demo import use_plain_kernels
from kernels.contract.registry import OPS
from tests.support.paths import ROOT

SHIPPED = use_plain_kernels((ROOT / POLICY).read_text())


class Bench:
    """A workbench over given ratios; it remembers the measurements that it was asked for."""

    def __init__(self, ratios: dict[tuple[str, str], float]) -> None:
        self.ratios, self.asked = ratios, []  # type: ignore[var-annotated]
        self.past: dict[str, list[EarlierProposal]] = {}
        self.files = {POLICY: SHIPPED}
        self.a_row: dict[int, float] = {}  # seconds a row, by how many go at a time

    def read(self, path: str) -> str:
        if path not in self.files:
            raise UnreadableFileError(path)
        return self.files[path]

    def measure(self, op: str, implementation: str, against: str, rows: int = 0) -> Measurement:
        if rows:
            if rows not in self.a_row:
                raise MeasurementError("no seconds left")
            return Measurement(seconds=rows * self.a_row[rows], against_seconds=0.1, ratio=1.0, ratio_low=1.0)
        self.asked.append((op, implementation))
        if (op, implementation) not in self.ratios:
            raise MeasurementError("it crashed")
        ratio = self.ratios[op, implementation]
        return Measurement(seconds=0.1 / ratio, against_seconds=0.1, ratio=ratio, ratio_low=ratio)

    def find_agent_written_lines(self, path: str) -> list[AgentWrittenLines]:
        return []

    def list_earlier_proposals(self, target: str) -> list[EarlierProposal]:
        return self.past.get(target, [])


def _op(name: str) -> dict[str, Any]:
    """The entry of an op in a profile, without its times."""
    op = OPS[name]
    here = {i.name: i.description for i in op.implementations.values() if i.can_run_on("cpu")}
    return {"op": name, "in_block": op.in_block, "trained": bool(op.gradients), "implementations": here}


def _profile(compile: bool = False) -> dict[str, Any]:
    op = lambda name, share, calls: _op(name) | {"implementation": "reference", "share": share, "calls": calls}
    lines = [{"op": "attention", "file": "kernels/attention/__init__.py", "line": 25}]
    ops = [op("attention", 0.4, 4), op("linear_cross_entropy", 0.3, 1), op("swiglu", 0.01, 4)]
    return {
        "device": "x86_64 CPU",
        "device_kind": "cpu",
        "recipe": {"compile": compile},
        "recipe_step_s": 1.0,
        "eager_step_s": 2.0,
        "lines": lines,
        "ops": ops,
    }


def test_the_proposal_is_the_change_with_the_largest_gain_of_the_whole_step() -> None:
    bench = Bench({("attention", "recompute"): 1.5, ("linear_cross_entropy", "chunked_compiled"): 3.0})
    (proposal,) = propose_implementations(_profile(), bench)
    assert proposal.target == "kernel:linear_cross_entropy"
    assert proposal.predicted_gain == pytest.approx(1 / (0.7 + 0.1))
    assert "refuted" in proposal.hypothesis
    changed = yaml.safe_load(proposal.edits[0].new_text)
    assert changed["cpu"]["linear_cross_entropy"] == "chunked_compiled"
    assert not any(op == "swiglu" for op, _ in bench.asked), "an op of 1 % of the step is not worth a measurement"


def test_a_compiled_step_is_predicted_from_measured_times_and_not_compiled_again() -> None:
    bench = Bench({("attention", "recompute"): 2.0, ("attention", "compiled"): 9.0})
    (proposal,) = propose_implementations(_profile(compile=True), bench)
    assert proposal.predicted_gain == pytest.approx(1 / (0.6 + 0.2))  # 4 calls of 0.1 s in a step of 1 s
    assert ("attention", "compiled") not in bench.asked


def test_a_rejected_patch_is_not_proposed_again() -> None:
    bench = Bench({("attention", "recompute"): 2.0, ("linear_cross_entropy", "chunked"): 1.5})
    (first,) = propose_implementations(_profile(), bench)
    assert first.target == "kernel:attention"
    bench.past[first.target] = [EarlierProposal(first.patch_id, "reject")]
    (second,) = propose_implementations(_profile(), bench)
    assert second.target == "kernel:linear_cross_entropy"
    bench.past[first.target] = [EarlierProposal(first.patch_id, "promote")]
    (again,) = propose_implementations(_profile(), bench)
    assert again == first
    bench.past[first.target] = [EarlierProposal("another patch", "hold", closed=True)]
    assert propose_implementations(_profile(), bench) == [second]


def test_several_proposals_are_the_best_change_of_each_target() -> None:
    ratios = {("attention", "recompute"): 2.0, ("attention", "native"): 1.5, ("linear_cross_entropy", "chunked"): 1.5}
    found = propose_implementations(_profile(), Bench(ratios), count=3)
    assert [proposal.target for proposal in found] == ["kernel:attention", "kernel:linear_cross_entropy"]
    assert found[0] == propose_implementations(_profile(), Bench(ratios))[0] and "recompute" in found[0].title


NORM = ("kernels/rms_norm/__init__.py:16#rms_norm", "kernels/rms_norm/__init__.py:17#rms_norm")
ACROSS = ("trainer/model/block.py:268", "kernels/qk_norm_rope/__init__.py:28#qk_norm_rope")
HEAD = ("kernels/linear_cross_entropy/__init__.py:30#linear_cross_entropy",)
RECIPE = "policies/recipes/small.yaml"


def _with_fusions(compile: bool) -> dict[str, Any]:
    fusion = lambda lines, share: {
        "lines": list(lines),
        "bytes_saved": share * 1e9,
        "gain_s": share,
        "gain_share": share,
    }
    fusions = [fusion(HEAD, 0.3), fusion(NORM, 0.2), fusion(ACROSS, 0.05)]
    norms = [
        _op(name) | {"implementation": "reference", "share": 0.01, "calls": 4} for name in ("rms_norm", "qk_norm_rope")
    ]
    found = _profile() | {"recipe": {"compile": compile, "name": "small"}, "fusion_candidates": fusions}
    return found | {"ops": found["ops"] + norms}


def test_compiling_blocks_is_proposed_for_the_fusion_candidates_in_them() -> None:
    bench = Bench({})
    before = bench.files[RECIPE] = "name: small\ncompile: false  # for now\nseed: 1\n"
    (proposal,) = propose_implementations(_with_fusions(compile=False), bench)
    assert proposal.target == "recipe:compile"
    assert proposal.predicted_gain == pytest.approx(1 / (1 - 0.25)), "the loss head is no part of a block"
    assert " → ".join(NORM) in proposal.hypothesis and "200 MB" in proposal.hypothesis
    assert HEAD[0] not in proposal.hypothesis
    (edit,) = proposal.edits
    assert (edit.path, edit.new_text) == (RECIPE, before.replace("false", "true"))
    bench.past[proposal.target] = [EarlierProposal(proposal.patch_id, "reject")]
    assert propose_implementations(_with_fusions(compile=False), bench) == []


def test_compiling_is_not_proposed_if_the_recipe_compiles_or_is_outside_the_repository() -> None:
    bench = Bench({})
    assert (
        propose_implementations(_with_fusions(compile=False), bench) == []
    )  # nothing to read: the workspace's own recipe
    bench.files[RECIPE] = "name: small\ncompile: true\n"
    assert propose_implementations(_with_fusions(compile=True), bench) == []


def test_an_implementation_is_ranked_with_the_compiler_and_names_the_fusions_that_it_covers() -> None:
    bench = Bench({("linear_cross_entropy", "chunked"): 4.0})
    bench.files[RECIPE] = "name: small\ncompile: false\n"
    profile = _with_fusions(compile=False) | {"recipe_step_s": 2.0}
    (first,) = propose_implementations(profile, bench)
    assert first.target == "recipe:compile"
    bench.ratios["linear_cross_entropy", "chunked"] = 40.0
    (first,) = propose_implementations(profile, bench)
    assert first.target == "kernel:linear_cross_entropy"
    assert f"{HEAD[0]} (300 MB, 300.0 ms)" in first.hypothesis


def test_the_optimisers_share_of_a_compiled_step_is_its_eager_time_by_the_compiled_time() -> None:
    profile = _profile(compile=True)
    profile["ops"] = [_op("adamw") | {"implementation": "reference", "share": 0.2, "calls": 2}]
    (proposal,) = propose_implementations(profile, Bench({("adamw", "fused"): 4.0}))
    assert proposal.predicted_gain == pytest.approx(1 / (1 - 0.4 + 0.4 / 4))


@pytest.mark.parametrize(
    ("now", "a_row", "chosen"),
    [
        (None, {8: 0.2, 4: 0.1}, "4"),
        (4, {4: 0.2, 2: 0.3, 8: 0.1}, "null"),
        (4, {4: 0.1, 2: 0.11, 8: 0.12}, ""),
        (4, {4: 0.1}, ""),
    ],
)
def test_the_rows_of_a_micro_batch_may_be_proposed(now: int | None, a_row: dict[int, float], chosen: str) -> None:
    bench, profile = Bench({}), _profile()
    bench.a_row = a_row
    profile["recipe"] |= {"name": "tiny", "batch": {"sequences": 8, "micro_sequences": now}}
    text = (ROOT / "policies/recipes/tiny.yaml").read_text()
    bench.files["policies/recipes/tiny.yaml"] = text
    found = propose_implementations(profile, bench)
    assert [proposal.target for proposal in found] == (["recipe:micro_sequences"] if chosen else [])
    for proposal in found:
        assert proposal.predicted_gain == pytest.approx(1 / (1 - 0.7 + 0.7 / 2))  # the ops above 5 %, twice as fast
        (edit,) = proposal.edits
        batch = yaml.safe_load(text)["batch"] | {"micro_sequences": yaml.safe_load(chosen)}
        assert yaml.safe_load(edit.new_text) == yaml.safe_load(text) | {"batch": batch}


def test_a_small_gain_is_not_proposed() -> None:
    assert propose_implementations(_profile(), Bench({("attention", "recompute"): 1.01})) == []
    assert propose_implementations(_profile(), Bench({})) == []


def test_only_the_chosen_line_changes() -> None:
    text = set_yaml_value(SHIPPED, ("cpu", "attention"), "recompute")
    differing = [(a, b) for a, b in zip(SHIPPED.splitlines(), text.splitlines(), strict=True) if a != b]
    assert differing == [("  attention: reference", "  attention: recompute")]
    for before in ("cuda: {}\n", "", "# none\n", "cpu:\n", "cpu: # none\n", "cpu: {}\n", "cpu: {rms_norm: auto}\n"):
        after = set_yaml_value(before, ("cpu", "swiglu"), "compiled")
        expected = {"cpu": {}} | (yaml.safe_load(before) or {})
        assert yaml.safe_load(after) == expected | {"cpu": (expected["cpu"] or {}) | {"swiglu": "compiled"}}, after
