"""The comparison of the files of two runs, tested on single numbers and files."""

from __future__ import annotations

import errno
import json
import math
import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from factory.core.workspace import Workspace
from factory.gates.patch.matrix import compare
from factory.gates.patch.matrix.cases import MatrixCase
from factory.gates.patch.matrix.compare import (
    CaseComparison,
    CaseDifference,
    Discrepancy,
    RoundingEffect,
    measure_rounding_effect,
)
from factory.gates.patch.matrix.runs import MatrixSide, copy_compiled_libraries
from factory.gates.patch.stages import matrix
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.ledger.rows import Subject
from factory.runs.arm_runner import list_runs
from factory.runs.distance import TensorDistance
from factory.runs.untrusted_files import UntrustedFileError
from tests.support.factory.matrix import prepare
from tests.support.gates.reasons import expect, tells


def test_a_ranks_part_of_a_tensor_is_measured_by_its_own_size() -> None:
    """The weights that the run began with are whole, the file of a rank holds some of their rows."""
    ours, start = torch.ones(2, 4), {"w": torch.zeros(4, 4)}
    found = compare._apart("w", ours, 1.5 * ours, start)
    assert (found.apart, found.size) == pytest.approx((0.5 * 8**0.5, 8**0.5))
    still = torch.ones(4, 4)
    assert compare._apart("w", still, still, {"w": still}) == TensorDistance(0.0, 0.0), "it did not move"
    assert (
        max(
            [Discrepancy("a", TensorDistance(math.nan, 1.0)), Discrepancy("b", TensorDistance(1.0, 1.0))],
            key=lambda part: part.share_of_scale,
        ).what
        == "a"
    )


def part(what: str, apart: float, total: str = "") -> Discrepancy:
    return Discrepancy(what, TensorDistance(apart, 1.0), total)


SCALE, LOSS, ONSET = (
    "metrics.jsonl, line 3: noise_scale",
    "metrics.jsonl, line 3: loss",
    "anomalies.jsonl, line 1: onset: step",
)
MONITOR = "step-00000002, state.json: monitor: sum"
MOMENTS = [part("a", 0.3, "exp_avg"), part("b", 0.4, "exp_avg"), part("c", 0.1, "weights")]


@pytest.mark.parametrize(
    ("found", "totals", "what", "share"),
    [
        ([], False, "", 0.0),
        ([part("a", 0.1), part("b", 0.3), part("c", 0.2)], False, "b", 0.3),
        # the noise scale counts a hundredth beside other numbers, and whole where nothing else differs
        ([part(SCALE, 0.5), part(LOSS, 0.01)], False, LOSS, 0.01),
        ([part(MONITOR, 5.0), part(LOSS, 0.01)], False, MONITOR, 0.05),
        ([part(SCALE, 0.5)], False, SCALE, math.inf),
        ([part(SCALE, 0.5), part(MONITOR, 0.1)], False, SCALE, math.inf),
        ([part(SCALE, math.inf), part(LOSS, 0.01)], False, SCALE, math.inf),
        # an onset counts where nothing else differs
        ([part(ONSET, math.inf), part(LOSS, 0.01)], False, LOSS, 0.01),
        ([part(ONSET, math.inf)], False, ONSET, math.inf),
        # of totals: tensors of a kind together, the loss, the rate, and what has no size
        (MOMENTS, False, "b", 0.4),
        (MOMENTS, True, "exp_avg together", 0.5 / 2**0.5),
        ([*MOMENTS, part("metrics.jsonl, line 1: grad_norm", 9.0)], True, "exp_avg together", 0.5 / 2**0.5),
        (
            [*MOMENTS, part("metrics.jsonl, line 1: grad_norm", math.inf)],
            True,
            "metrics.jsonl, line 1: grad_norm",
            math.inf,
        ),
        ([*MOMENTS, part("metrics.jsonl, line 1: lr", 0.6)], True, "metrics.jsonl, line 1: lr", 0.6),
        ([*MOMENTS, part(LOSS, 0.6)], True, LOSS, 0.6),
    ],
)
def test_a_case_is_judged_by_its_largest_difference(
    found: list[Discrepancy], totals: bool, what: str, share: float
) -> None:
    worst = compare.find_largest_discrepancy(MatrixCase("x", totals=totals), found)
    assert worst.what == what and worst.share_of_scale == pytest.approx(share)


def test_a_missing_noise_scale_is_rounding_only_in_coarse_runs() -> None:
    found = [part(SCALE, math.inf), part(LOSS, 0.01)]
    assert [
        compare.find_largest_discrepancy(MatrixCase("x", rounding=bound), found).what for bound in (2e-4, 0.0299, 0.03)
    ] == [
        SCALE,
        SCALE,
        LOSS,
    ]


@pytest.mark.parametrize("files", [5, [1, "a"], {"model.safetensors": 3}, None])
def test_a_manifest_that_lists_no_files_is_a_difference(tmp_path: Path, files: object) -> None:
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-00000001" / "manifest.json").write_text(json.dumps({"files": files}))
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(UntrustedFileError):
            compare._listed(folder, "step-00000001")
    finally:
        os.close(folder)


def test_a_checkpoints_state_is_compared_without_machine_values(tmp_path: Path) -> None:
    states = {
        "old": {"step": 5, "skipped": [1], "throughput": 2.0},
        "new": {"step": 6, "skipped": [], "throughput": 3.0},
    }
    with ExitStack() as opened:
        folders = []
        for side, state in states.items():
            folder = tmp_path / side / "checkpoints" / "whole"
            folder.mkdir(parents=True)
            (folder / "manifest.json").write_text('{"files": {}}')
            (folder / "state.json").write_text(json.dumps(state))
            folders.append(os.open(tmp_path / side, os.O_RDONLY))
            opened.callback(os.close, folders[-1])
        found = [one.what for one in compare._checkpoint("whole", *folders, None)]
    assert tells(found, expect("runs.other_value", where="whole, state.json: step", value="6", baseline="5"))
    assert len(found) == 1


def test_libraries_are_copied_without_following_links_or_waiting_for_pipes(tmp_path: Path) -> None:
    source = tmp_path / "factory-kernels"
    source.mkdir()
    (tmp_path / "secret").write_text("mine")
    (source / "made.so").write_bytes(b"code")
    (source / "link.so").symlink_to(tmp_path / "secret")
    (source / "folder").symlink_to(tmp_path)
    os.mkfifo(source / "pipe.so")
    (source / "deep" / "deeper").mkdir(parents=True)
    copy_compiled_libraries(source, tmp_path / "copy")
    assert {path.name: path.read_bytes() for path in (tmp_path / "copy").iterdir()} == {"made.so": b"code"}
    (tmp_path / "elsewhere").symlink_to(source)
    with pytest.raises(OSError):
        copy_compiled_libraries(tmp_path / "elsewhere", tmp_path / "another")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e5m2])
@pytest.mark.parametrize("size", [(4,), (3, 5), (64, 64)])
def test_numbers_that_went_through_a_lower_precision_are_found_at_any_size_of_rounding(
    dtype: torch.dtype, size: tuple[int, ...]
) -> None:
    ours = torch.randn(size, generator=torch.Generator().manual_seed(1))
    assert compare.has_lost_precision(ours, ours.to(dtype).float())
    assert not compare.has_lost_precision(ours, ours * (1 + 1e-3)) and not compare.has_lost_precision(ours, ours)
    assert not compare.has_lost_precision(ours.to(dtype).float(), ours)  # more bits are no loss
    assert not compare.has_lost_precision(torch.ones(size), torch.ones(size))


@pytest.mark.parametrize(
    ("numbers", "zero", "lost"), [(4, 8, True), (4, 7, False), (4, 0, False), (3, 20, False), (64, 22, True)]
)
def test_eight_bits_fewer_are_a_lower_precision(numbers: int, zero: int, lost: bool) -> None:
    """``zero``: so many low bits of the fraction are zero in all numbers of the one side; of the other the lowest is not."""
    bits = torch.arange(1, numbers + 1, dtype=torch.int32) * 2 + 1 + (127 << 23)
    ours, theirs = bits.view(torch.float32), (((bits >> zero) | 1) << zero).view(torch.float32)
    assert compare.has_lost_precision(ours, theirs) == lost and not compare.has_lost_precision(theirs, ours)
    assert not compare.has_lost_precision(ours.double(), theirs.double())
    whole = torch.ones(numbers)  # no bit of the fraction is used: as if the lowest were the 24th
    assert compare.has_lost_precision(ours, whole) == (numbers > 3) and not compare.has_lost_precision(whole, whole)


def full(*given: Any, **more: Any) -> int:
    raise OSError(errno.EMFILE, "too many open files")


def test_the_checkpoints_of_a_run_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(UntrustedFileError):
            compare._checkpoints(folder)
        for name in ("step-2", "step-1", "bad-3", "other", "astep-1"):
            (tmp_path / "checkpoints" / name).mkdir(parents=True)
        before = len(os.listdir("/proc/self/fd"))
        assert (
            compare._checkpoints(folder) == ["bad-3", "step-1", "step-2"] and len(os.listdir("/proc/self/fd")) == before
        )
        for number in range(200):
            (tmp_path / "checkpoints" / f"step-{number:05d}").mkdir()
        assert 90 <= len(compare._checkpoints(folder)) <= 100
        (tmp_path / "checkpoints").rename(tmp_path / "elsewhere")
        (tmp_path / "checkpoints").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(UntrustedFileError):
            compare._checkpoints(folder)
        monkeypatch.setattr(os, "open", full)
        with pytest.raises(OSError, match="too many"):  # no fault of the candidate's
            compare._checkpoints(folder)
    finally:
        os.close(folder)


ONE, OTHER = "first steps", "resumed"


class Twins:
    """Stands for disturbed runs: how far each is from the baseline is told, by case; '': it failed."""

    def __init__(self, **far: list[float]) -> None:
        self.far, self.asked = far, list[tuple[str, int, list[str]]]()

    def run(self, plan: Any, side: Any, cases: list[MatrixCase]) -> Any:
        assert plan == "plan"
        self.asked.append((side.folder.as_posix(), side.disturbed, [case.name for case in cases]))
        return SimpleNamespace(failed="no room" if any(not self.far[name] for name in self.asked[-1][2]) else "")

    def differ(self, plan: Any, case: MatrixCase, baseline: Any, twins: Any) -> list[Discrepancy]:
        assert (plan, baseline, twins.failed) == ("plan", "baseline", "")
        far = self.far[case.name]
        return [part(LOSS, far[min(len(self.asked), len(far)) - 1]), part(LOSS, 0.0)]


@pytest.mark.parametrize(
    ("shares", "far", "asked", "beyond", "undecided"),
    [
        ({ONE: 0.9}, {ONE: [0.1]}, [[ONE]] * 24, {ONE: 0.3}, []),
        ({ONE: 0.3}, {ONE: [0.1]}, [[ONE]], {}, []),  # as far as three times the farthest twin is no difference
        ({ONE: 0.31}, {ONE: [0.1, 0.01, 0.11]}, [[ONE]] * 3, {}, []),
        ({ONE: 0.31}, {ONE: [0.1] * 9 + [0.11]}, [[ONE]] * 10, {}, []),
        ({ONE: 0.9, OTHER: 3.0}, {ONE: [0.1], OTHER: [0.5]}, [[ONE, OTHER]] * 4 + [[ONE]] * 20, {ONE: 0.3, OTHER: 1.5}, []),
        ({ONE: 0.89, OTHER: 3.0}, {ONE: [0.1, 0.3], OTHER: [0.5]}, [[ONE, OTHER]] * 2 + [[OTHER]] * 22, {OTHER: 1.5}, []),
        ({ONE: math.inf}, {ONE: [0.1, math.inf]}, [[ONE]] * 2, {}, [ONE]),
        ({ONE: math.inf}, {ONE: [0.1]}, [[ONE]] * 24, {ONE: 0.3}, []),
        ({ONE: 0.9, OTHER: 0.9}, {ONE: [0.1], OTHER: []}, [[ONE, OTHER]], None, []),
        ({"a tool": 0.9}, {}, [], {"a tool": 0.0}, []),
        ({}, {}, [], {}, []),
    ],
)  # fmt: skip
def test_only_changes_that_no_twin_shows_count_as_differences(
    monkeypatch: pytest.MonkeyPatch,
    shares: dict[str, float],
    far: dict[str, list[float]],
    asked: list[list[str]],
    beyond: Any,
    undecided: list[str],
) -> None:
    twins = Twins(**far)
    monkeypatch.setattr(compare, "run_cases", twins.run)
    monkeypatch.setattr(compare, "find_discrepancies", twins.differ)
    compared = [
        CaseComparison(True, None),
        *(CaseComparison(False, CaseDifference(name, "a", share, 0.0)) for name, share in shares.items()),
    ]
    plan: Any = "plan"
    baseline: Any = "baseline"
    found = measure_rounding_effect(
        plan, MatrixSide(Path("code"), {}, Path("twins"), 1.0, ExitStack()), baseline, compared
    )
    assert twins.asked == [(f"twins/{number}", number, names) for number, names in enumerate(asked, 1)]
    assert found.undecided == undecided and found.problem == ("no room" if beyond is None else "")
    assert {one.case: pytest.approx(one.allowed) for one in found.beyond} == (beyond or {})
    assert [one.share for one in found.beyond] == [shares[name] for name in beyond or {}], (
        "what is explained least is first"
    )


def test_a_difference_names_its_size() -> None:
    told = [str(CaseDifference("a", "loss", share, 0.25)) for share in (0.5, math.inf)]
    assert "0.5 of its size" in told[0] and "0.25" in told[0] and told[1].startswith("run 'a': loss differs")
    sized = CaseDifference("a", "loss", 0.5, 0.25).message
    assert sized.data == {"run": "a", "what": "loss", "share": 0.5, "allowed": 0.25}


@pytest.mark.long("tiny trainings of several processes")
def test_rounding_is_not_a_difference(
    tmp_path: Path, workspace: Workspace, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        compare, "MOST_TWINS", compare.TWINS_PER_CASE + 2
    )  # fewer than a gate runs: the rule is the same
    with ExitStack() as after:
        prepared = prepare(tmp_path, after, ["first steps", "bf16"])

        def measured(folder: str, **shares: float) -> RoundingEffect:
            compared = [CaseComparison(False, CaseDifference(name, "a", share, 0.0)) for name, share in shares.items()]
            side = replace(prepared.side, folder=tmp_path / folder)
            found = measure_rounding_effect(
                prepared.plan, side, prepared.baseline, [*compared, CaseComparison(True, None)]
            )
            assert not found.problem
            return found

        large = measured("large", **{"first steps": 1e9, "bf16": math.inf})
        assert not large.undecided
        allowed = {difference.case: difference.allowed for difference in large.beyond}
        print(allowed)
        assert 0 < allowed["first steps"] < 0.1 and 1e-4 < allowed["bf16"] < math.inf
        small = measured("small", **{"first steps": 0.9 * allowed["first steps"]})  # the same twins
        assert not small.beyond and not small.undecided
        lines = prepared.baseline.folders["first steps"] / "metrics.jsonl"
        lines.write_text(
            "".join(lines.read_text().splitlines(keepends=True)[:-1])
        )  # as if all twins told one line more
        found = measured("undecided", **{"first steps": math.inf})
        assert found.undecided == ["first steps"] and not found.beyond
        patch = SimpleNamespace(commit="c0ffee", base="ba5e")
        case: Any = SimpleNamespace(applied=patch, plant=Plant(workspace, ledger), subject=Subject("proposal", 7))
        side = replace(prepared.side, folder=tmp_path / "told", watched={"trainer/run.py": [*range(1, 400)]})
        runs = matrix._side(case, prepared.plan, side, prepared.cases, (), "candidate")
        assert not runs.failed and runs.executed.instructions
        (row,) = list_runs(ledger)
        assert (row["purpose"], row["subject"], row["state"]) == ("patch gate", "proposal:7", "done")
        assert row["arm"]["code"] == "c0ffee" and row["arm"]["name"] == "candidate, 2 tiny runs"
