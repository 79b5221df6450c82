"""The comparison of a candidate's answers with the truth: allowed errors, and the evidence from a process's files."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from factory.gates.patch import op_answers
from factory.gates.patch.op_answers import OpAnswers, are_tensors_identical, find_wrong_results
from factory.gates.patch.stages import exploits, oracle
from kernels.contract.message import Message
from tests.support.gates.reasons import Expected, expect, tells

EPS = torch.finfo(torch.float32).eps
NAN, INF = math.nan, math.inf


def tensors(*values: float, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {"output 0": torch.tensor(values, dtype=torch.float64).to(dtype)}


@pytest.mark.parametrize(
    ("found", "exact", "eager", "wrong", "share"),
    [
        # as far as twice the eager reference is allowed, by the mean square and by the largest
        ([1.02, 1.0], [1.0, 1.0], [1.01, 1.0], "", 1.0),
        ([1.03, 1.0], [1.0, 1.0], [1.01, 1.0], "relative error", 1.5),
        (
            [1.015, 0.985],
            [1.0, 1.0],
            [1.01, 1.0],
            "relative error",
            0.015 / (0.02 / 2**0.5),
        ),  # small each, large together
        ([103.0, 100.0], [100.0, 100.0], [101.0, 100.0], "relative error", 1.5),  # whatever the size
        ([103.0, 100.0], [100.0, 100.0], [102.0, 100.0], "", 0.75),
        ([4.0, 0.0], [0.0, 0.0], [2.0, 0.0], "", 1.0),  # of nothing, the error itself
        # sixteen roundings of fp32 always pass
        ([1 + 16 * EPS, 1 - 16 * EPS], [1.0, 1.0], [1.0, 1.0], "", 1.0),
        ([1 + 20 * EPS, 1 - 20 * EPS], [1.0, 1.0], [1.0, 1.0], "relative error", 1.25),
        (
            [128 * (1 + 20 * EPS), 128 * (1 - 20 * EPS)],
            [128.0, 128.0],
            [128.0, 128.0],
            "relative error",
            1.25,
        ),  # of their size
        ([128 * (1 + 20 * EPS), 128.0], [128.0, 128.0], [128.0, 128.0], "relative error", 1.25),  # one alone
        ([128 * (1 + 16 * EPS), 128.0], [128.0, 128.0], [128.0, 128.0], "", 1.0),
        # what is not finite in the reference is not asked for
        ([NAN, 1.0], [NAN, 1.0], [NAN, 1.0], "", 0.0),
        ([5.0, 1.0], [INF, 1.0], [1.0, 1.0], "", 0.0),
        ([5.0, 1.0], [1.0, 1.0], [INF, 1.0], "", 0.0),
        ([NAN, 1.0], [1.0, 1.0], [1.0, 1.0], "not finite", 0.0),
        ([INF, 1.0], [1.0, 1.0], [1.0, 1.0], "not finite", 0.0),
        ([1.0, 2.0], [NAN, INF], [1.0, 1.0], "", 0.0),
        ([1.0], [1.0, 1.0], [1.0, 1.0], "shape or dtype", 0.0),
    ],
)
def test_an_error_of_more_than_twice_the_references_error_is_too_large(
    found: list[float], exact: list[float], eager: list[float], wrong: str, share: float
) -> None:
    problems, worst = find_wrong_results(tensors(*found), tensors(*exact, dtype=torch.float64), tensors(*eager))
    assert (
        len(problems) == bool(wrong)
        and wrong in "".join(problems)
        and worst == pytest.approx(share, rel=1e-3, abs=1e-9)
    )


def test_each_result_is_judged_and_in_its_own_precision() -> None:
    exact = {name: torch.ones(2, dtype=torch.float64) for name in ("output 0", "gradient 1")}
    eager = {name: torch.ones(2, dtype=torch.bfloat16) for name in exact}
    off = {name: torch.full((2,), 1 + 2.0**-7, dtype=torch.bfloat16) for name in exact}  # one unit in the last place
    assert find_wrong_results(off, exact, eager) == ([], 1.0)
    wrong, _ = find_wrong_results({name: x.float() for name, x in off.items()}, exact, eager)
    assert [problem.data["result"] for problem in wrong] == ["output 0", "gradient 1"]
    assert len(find_wrong_results({"output 0": off["output 0"]}, exact, eager)[0]) == 1


@pytest.mark.parametrize("first", [[NAN, INF], [0.0, NAN], [2.0, 2.0], [1.0]])
def test_an_odd_result_does_not_hide_the_next(first: list[float]) -> None:
    exact = {f"output {number}": torch.ones(2, dtype=torch.float64) for number in range(3)}
    if first[-1] == INF:
        exact["output 0"].fill_(NAN)
    eager = {name: torch.ones(2) for name in exact}
    found = {"output 0": torch.tensor(first), "output 1": torch.zeros(2), "output 2": torch.full((2,), 3.0)}
    wrong, worst = find_wrong_results(found, exact, eager)
    assert [one[:8] for one in wrong] == [f"output {number}" for number in range(3)][first[-1] == INF :]
    assert worst == pytest.approx(2 / (16 * EPS))


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (torch.tensor([1.0, NAN]), torch.tensor([1.0, NAN]), True),
        (torch.tensor([1.0, NAN]), torch.tensor([NAN, 1.0]), False),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]), False),
        (torch.tensor([1.0]), torch.tensor([1.0, 1.0]), False),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64), False),
    ],
)
def test_are_identical_compares_shape_dtype_and_elements(a: torch.Tensor, b: torch.Tensor, same: bool) -> None:
    assert are_tensors_identical(a, b) == are_tensors_identical(b, a) == same


@pytest.mark.parametrize(
    ("mine", "same"),
    [
        ([1.0, -100.0], True),
        ([1.0 + 0.9e-7, -100.0], True),  # beside the largest
        ([1.0 + 2e-7, -100.0], False),
        ([1.0, -100.0 - 2e-7], False),
        ([1.0, NAN], False),
        ([1.0], False),
    ],
)
def test_a_truth_may_differ_by_rounding_only(mine: list[float], same: bool) -> None:
    theirs = torch.tensor([1.0, -100.0], dtype=torch.float64)
    assert op_answers._same_truth(torch.tensor(mine, dtype=torch.float64), theirs) == same
    assert not op_answers._same_truth(torch.tensor(mine), theirs)  # in fewer bits
    nothing = torch.full((2,), NAN, dtype=torch.float64)
    assert op_answers._same_truth(theirs, nothing) and not op_answers._same_truth(theirs[:1], nothing)


def test_one_test_of_every_kind_is_made_again() -> None:
    job = {"op": "a", "values": "normal", "case": "small", "dtype": "fp32"}
    kinds = [job, job | {"op": "b"}, job | {"values": "zero"}, job | {"case": "prime"}, job | {"dtype": "bf16"}]
    kinds += [job | {"storage": 0}, job | {"storage": 1}]
    jobs = [kind for kind in kinds for _ in range(3)]
    drawn = [op_answers._drawn(jobs) for _ in range(40)]
    assert all([number // 3 for number in numbers] == list(range(len(kinds))) for numbers in drawn)
    assert {number for numbers in drawn for number in numbers} == set(range(len(jobs)))


# -- the evidence of a process -----------------------------------------------------------------------------------------
GOOD, WRONG, REFUSED = "good", "wrong", "refused"
KILLED, LATE = Message("patch.test_killed", "killed"), Message("patch.test_late", "late")
NO_TRUTH, RIGHT = Message("patch.test_truth", "no truth"), expect("patch.test_right")
LEFT: dict[str, dict[str, torch.Tensor]] = {
    GOOD: tensors(1.0, 1.0) | {"inputs changed": torch.zeros(0, dtype=torch.int64)},
    WRONG: tensors(1.0, 2.0) | {"inputs changed": torch.ones(1, dtype=torch.int64)},
    REFUSED: {"raised": torch.tensor(list(b"TypeError: no\nfp64"), dtype=torch.uint8)},
}


@pytest.fixture
def answers(tmp_path: Path) -> Iterator[Callable[..., OpAnswers]]:
    """Answers of a process that left these; '': none."""
    (tmp_path / "left").mkdir()
    folder = os.open(tmp_path / "left", os.O_RDONLY)

    def made(*left: str, **more: Any) -> OpAnswers:
        for number, kind in enumerate(left):
            for name, dtype in (("exact", torch.float64), ("eager", torch.float32)):
                save_file(tensors(1.0, 1.0, dtype=dtype), tmp_path / f"{name}-{number}.safetensors")
            if kind:
                save_file(LEFT[kind], tmp_path / "left" / f"answer-{number}.safetensors")
        job = {"op": "swiglu", "implementation": "fast", "case": "small", "dtype": "fp32", "values": "normal"}
        jobs = [job | ({"optional": True} if kind == REFUSED else {}) for kind in left]
        return OpAnswers(jobs, tmp_path, folder, 2.0, 1.0, **more)

    yield made
    os.close(folder)


@pytest.mark.parametrize(
    ("left", "more", "last", "state", "failures", "expected"),
    [
        ([GOOD, GOOD], {}, True, "passed", None, RIGHT),
        ([GOOD, REFUSED], {}, True, "passed", None, RIGHT),  # it may refuse what no training uses
        (
            [GOOD, WRONG],
            {},
            True,
            "failed",
            2,
            expect("patch.op_wrong", op="swiglu", problem="patch.op_changes_inputs"),
        ),
        ([WRONG, WRONG, WRONG], {}, True, "failed", 6, expect("patch.op_changes_inputs")),
        ([GOOD, ""], {}, True, "failed", 1, expect("patch.no_answer")),
        (
            [GOOD, ""],
            {"died": KILLED},
            False,
            "failed",
            1,
            expect("patch.ops_not_run", ops=["swiglu"], problem="killed"),
        ),
        (
            ["", WRONG],
            {"died": KILLED},
            False,
            "failed",
            1,
            expect("patch.ops_not_run", problem="killed"),
        ),  # the others are not looked at
        ([GOOD, GOOD], {"died": KILLED}, True, "failed", 1, expect("patch.ops_not_run", problem="killed")),
        ([GOOD, GOOD], {"died": KILLED}, False, "passed", None, RIGHT),  # after other jobs, which say so
        ([GOOD, ""], {"died": LATE, "out_of_time": True}, True, "missing", None, expect("patch.test_late")),
        ([WRONG, ""], {"died": LATE, "out_of_time": True}, True, "failed", 3, expect("patch.op_changes_inputs")),
        ([GOOD], {"missing": NO_TRUTH}, True, "missing", None, expect("patch.test_truth")),
        ([GOOD], {"missing": NO_TRUTH, "out_of_time": True}, True, "missing", None, expect("patch.test_truth")),
    ],
)
def test_the_evidence_follows_from_the_answers(
    answers: Callable[..., OpAnswers],
    left: list[str],
    more: dict[str, Any],
    last: bool,
    state: str,
    failures: Any,
    expected: Expected,
) -> None:
    found = answers(*left, **more).make_evidence(range(len(left)), Message("patch.test_right", "right"), last=last)
    assert found["state"] == state and found.get("failures") == failures and tells(found["reasons"][:1], expected), (
        found
    )
    assert found.get("out_of_time", False) == (state == "missing" and bool(more.get("out_of_time")))
    assert len(found["reasons"]) == min(failures or 1, 5)
    if "missing" not in more:
        assert found["checks"] == len(left) and found["seconds"] == 2.0
        assert (found["worst_share_of_allowed_error"] == INF) == ("" in left and not more)


def test_an_exception_in_a_required_answer_fails_the_patch(answers: Callable[..., OpAnswers]) -> None:
    found = answers(REFUSED, GOOD)
    required = OpAnswers([{**job, "optional": False} for job in found.jobs], found.truth, found.folder, 2.0, 1.0)
    said = required.make_evidence([0, 1], Message("patch.test_right", "right"), last=True)
    assert said["state"] == "failed" and tells(
        said["reasons"], expect("patch.op_raised", error="TypeError: no fp64")
    ), said


def test_the_oracle_and_the_exploit_checks_each_read_their_own_answers(answers: Callable[..., OpAnswers]) -> None:
    """The process ends after the calls: its end counts against them, and against the oracle's cases where there are no calls."""
    found = answers(GOOD, GOOD, GOOD, died=KILLED)
    call = {"op": "adamw", "implementation": "fast", "about": "call 1", "storage": 0}
    for jobs, states, checks in (
        ([found.jobs[0], call, call], ("passed", "failed"), (1, 2)),
        ([*found.jobs], ("failed", "failed"), (3, 0)),
    ):
        both = OpAnswers(jobs, found.truth, found.folder, 2.0, 1.0, died=KILLED)
        told = oracle.make_oracle_evidence(both), exploits.make_exploit_evidence(both)
        assert tuple(one["state"] for one in told) == states and tuple(one["checks"] for one in told) == checks, told
    whole = exploits.make_exploit_evidence(
        OpAnswers([call, call | {"op": "swiglu"}, call], found.truth, found.folder, 2.0, 1.0)
    )
    assert whole["state"] == "passed" and tells(whole["reasons"], expect("patch.calls_right", calls=3, ops=2))
