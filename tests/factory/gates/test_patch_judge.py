"""The pure judge of the patch gate: the evidence that promotes, holds and rejects a patch, and how often the judge errs."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ttest_ind

from factory.core.workspace import find_checkout_root
from factory.gates.patch.judge import (
    STAGES,
    compute_step_gain,
    compute_t_quantile,
    find_smaller_measured_gain,
    judge_patch,
)
from factory.gates.patch.policy import PatchPolicy
from kernels.contract.message import Message
from tests.support.gates.patch_evidence import evidence
from tests.support.gates.reasons import Expected, expect, tells
from tests.support.messages import codes

SHIPPED = PatchPolicy.load(find_checkout_root() / "policies" / "gates" / "patch.yaml")
POLICY = SHIPPED.model_copy(update={"training": SHIPPED.training.model_copy(update={"pairs": 2})})
GOOD = evidence([1.0, 1.01, 0.99], [0.8, 0.81, 0.79])


def test_a_clear_gain_promotes_and_says_how_much() -> None:
    verdict = judge_patch(POLICY, GOOD)
    assert verdict.outcome == "promote" and tells(verdict.reasons[:1], expect("patch.wall_gain", ratio=1.25))


@pytest.mark.parametrize(
    ("found", "outcome", "expected"),
    [
        (evidence([1.0, 1.01], [1.0, 1.01]), "reject", expect("patch.no_gain")),  # A/A is "no gain", nothing worse
        (evidence([1.0, 1.01], [1.2, 1.21]), "reject", expect("patch.no_gain")),
        (evidence([1.0, 1.2], [0.75, 0.9]), "hold", expect("patch.gain_likely")),
        (evidence([1.0, 1.6], [0.5, 0.6]), "hold", expect("patch.too_noisy")),
        (evidence([1.0], [0.5]), "hold", expect("patch.not_timed")),
        (evidence([1.0, math.nan], [0.5, 0.5]), "hold", expect("patch.not_timed")),
        (evidence([1.0, 1.0], [0.5, -0.5]), "hold", expect("patch.not_timed")),
        (evidence([1.0, 1.0], [0.5, 0.5], drift=1.2), "reject", expect("patch.training_differs", drift=1.2)),
        (
            evidence([1.0, 1.0], [0.5, 0.5], drift=0.11),
            "reject",
            expect("patch.training_differs", drift=0.11, allowed=0.1),
        ),
        (evidence([1.0, 1.0], [0.5, 0.5], drift=math.nan), "hold", expect("patch.weights_not_compared")),
        (evidence([1.0, 1.0], [0.5, 0.5], control_drift=None), "hold", expect("patch.weights_not_compared")),
        (evidence([1.0, 1.01], [0.8, 0.81], again=None), "hold", expect("patch.measured_once")),
        (
            evidence([1.0, 1.01], [0.8, 0.81], again=([1.0, 1.01], [1.0, 1.01])),
            "hold",
            expect("patch.gain_not_repeated"),
        ),
        (
            evidence([1.0, 1.01], [0.8, 0.81], again=([1.0, 1.6], [0.5, 0.6])),
            "hold",
            expect("patch.second_unsure", pairs=2),
        ),
        (evidence([1.0, 1.01], [1.0, 1.01], again=([1.0, 1.01], [0.8, 0.81])), "reject", expect("patch.no_gain")),
        ({}, "hold", expect("gates.no_evidence", stage="scope")),
        (GOOD | {"tries": None}, "hold", expect("gates.tries_unknown")),
    ],
)
def test_each_evidence_gets_its_verdict(found: dict[str, Any], outcome: str, expected: Expected) -> None:
    verdict = judge_patch(POLICY, found)
    assert verdict.outcome == outcome and tells(verdict.reasons[:1], expected), verdict


def test_the_judge_seldom_errs_when_processes_differ() -> None:
    """Simulated: all runs of a process are 2 or 3 % faster or slower than another process's, runs of one process differ by 1 %; two
    sessions of two runs a side."""
    draw = random.Random(7)
    policy = SHIPPED.training
    runs = lambda mean, apart: [
        mean * math.exp(process + draw.gauss(0, 0.01))
        for process in (draw.gauss(0, apart), draw.gauss(0, apart))
        for _ in "12"
    ]

    def promoted(true: float, apart: float, new_code: bool, times: int = 600) -> float:
        count = 0
        for _ in range(times):
            long = LONG | {"ratio": true * math.exp(draw.gauss(0, 1.4 * apart))}
            side = lambda: (runs(1.0, apart), runs(1 / true, apart))
            found = evidence(*side(), again=side(), new_code=new_code, long=long)
            count += judge_patch(SHIPPED, found).outcome == "promote"
        return count / times

    assert policy.pairs == 4
    wrong = {(apart, new): promoted(1.0, apart, new) for apart in (0.01, 0.02, 0.03) for new in (False, True)}
    right = {(apart, new): promoted(1.2, apart, new) for apart in (0.01, 0.02, 0.03) for new in (False, True)}
    print(f"promoted without a gain: {wrong}; with a gain of 1.2: {right}")
    assert max(wrong.values()) < 0.02  # measured once, it was 0.08
    assert min(right.values()) > 0.95


LONG = {"steps": 80, "ratio": 1.2, "hideable": 1.04, "drift": 0.02, "control_drift": 0.2}


@pytest.mark.parametrize(
    ("long", "outcome", "expected"),
    [
        (LONG, "promote", expect("patch.long_gain", ratio=1.2, steps=80)),
        (None, "hold", expect("patch.long_not_timed")),
        ([LONG], "hold", expect("patch.long_not_timed")),
        (LONG | {"ratio": float("nan")}, "hold", expect("patch.long_not_timed")),
        ({"steps": 80, "failed": "the candidate's run broke"}, "hold", expect("", text="the candidate's run broke")),
        (LONG | {"ratio": 1.045}, "hold", expect("patch.quicker_start", ratio=1.045, needed=1.0608)),
        (LONG | {"ratio": 1.05, "hideable": 1.03}, "hold", expect("patch.quicker_start", ratio=1.05, needed=1.0506)),
        (LONG | {"ratio": 1.06, "hideable": 1.03}, "promote", expect("patch.long_gain", ratio=1.06, steps=80)),
        (LONG | {"ratio": 0.99, "hideable": 1.001}, "reject", expect("patch.no_long_gain", steps=80, ratio=0.99)),
        (LONG | {"ratio": 1.01, "hideable": 1.001}, "hold", expect("patch.quicker_start", ratio=1.01)),  # or noise
        (LONG | {"drift": 0.11}, "reject", expect("patch.long_differs", steps=80, drift=0.11, allowed=0.1)),
    ],
)
def test_new_code_must_gain_over_long_runs_too(long: Any, outcome: str, expected: Expected) -> None:
    found = evidence([1.0, 1.01, 0.99], [0.8, 0.81, 0.79], new_code=True, long=long)
    verdict = judge_patch(POLICY, found)
    assert verdict.outcome == outcome, verdict
    broke = str(long["failed"]) in map(str, verdict.reasons) if "failed" in (long or ()) else None
    assert tells(verdict.reasons, expected) if broke is None else broke, verdict
    del found["stages"]["training"]["new_code"]  # what nobody vouches for is new
    assert judge_patch(POLICY, found) == verdict


@pytest.mark.parametrize(
    ("gains", "outcome", "expected"),
    [
        (
            {"code": [0.0, 0.001], "docs": [-0.03, -0.031]},
            "reject",
            expect("patch.weights_worse", domain="docs", change=0.0305),
        ),
        (
            {"code": [0.0, 0.001], "docs": [0.1, -0.1]},
            "hold",
            expect("patch.weights_unsure", domain="docs", change=0.0),
        ),
        ({"code": [0.0, 0.001], "docs": [0.1]}, "hold", expect("patch.few_documents", domain="docs")),
        ({"code": [0.0, None]}, "hold", expect("patch.few_documents", domain="code")),
        ({"code": "0.0"}, "hold", expect("patch.few_documents", domain="code")),
        ({}, "hold", expect("patch.not_scored")),
        (None, "hold", expect("patch.not_scored")),
        ([0.1, 0.2], "hold", expect("patch.not_scored")),
    ],
)
def test_a_faster_patch_with_worse_weights_is_not_promoted(gains: Any, outcome: str, expected: Expected) -> None:
    found = evidence([1.0, 1.01, 0.99], [0.8, 0.81, 0.79])
    found["stages"]["evals"]["gains"] = gains
    verdict = judge_patch(POLICY, found)
    assert verdict.outcome == outcome and tells(verdict.reasons[:1], expected), verdict


LIMIT = POLICY.training.max_drift * 0.2  # of weights, where leaving out steps moves them by 0.2
EQUAL = [1.0, 1.0]  # runs without noise
MORE = LIMIT * 1.0001
NEEDED = POLICY.training.min_gain


@pytest.mark.parametrize(
    ("training", "gains", "outcome"),
    [
        ({"drift": LIMIT, "again": None}, None, "hold"),  # for want of a second measurement
        ({"drift": MORE, "again": None}, None, "reject"),
        ({"long": LONG | {"drift": LIMIT}}, None, "promote"),
        ({"long": LONG | {"drift": MORE}}, None, "reject"),
        ({"long": LONG | {"ratio": NEEDED, "hideable": 0.9}}, None, "reject"),
        ({"long": LONG | {"ratio": NEEDED * 1.0001, "hideable": 0.9}}, None, "promote"),
        ({"long": LONG | {"ratio": 2 * NEEDED, "hideable": 2}}, None, "hold"),
        ({"long": LONG | {"ratio": 2 * NEEDED * 1.0001, "hideable": 2}}, None, "promote"),
        ({}, [-0.02, -0.02], "hold"),
        ({}, [-0.0199, -0.0199], "promote"),
        ({}, [-0.0201, -0.0201], "reject"),
        ({}, [-0.04, 0.0], "hold"),
        ({}, [-0.041, 0.0], "reject"),
        (
            {},
            [0.0, 0.029, 0.058],
            "promote",
        ),  # Student's t of two degrees: the lower bound is 0.686 of the middle below zero
        ({}, [0.0, 0.0294, 0.0588], "hold"),
    ],
)
def test_a_value_equal_to_an_upper_limit_passes_and_to_a_lower_limit_does_not(
    training: dict[str, Any], gains: list[float] | None, outcome: str
) -> None:
    """A value equal to an upper limit passes. A value equal to a lower limit does not."""
    found = evidence(EQUAL, [0.8, 0.8], new_code="long" in training, **training)
    if gains is not None:
        found["stages"]["evals"]["gains"] = {"code": gains}
    verdict = judge_patch(POLICY, found)
    assert verdict.outcome == outcome, verdict


@pytest.mark.parametrize(
    ("candidate", "outcome"), [(1 / 1.02, "reject"), (1 / 1.0201, "promote"), (1.0, "reject"), (1.1, "reject")]
)
def test_a_gain_equal_to_the_threshold_is_not_enough(candidate: float, outcome: str) -> None:
    assert judge_patch(POLICY, evidence(EQUAL, [candidate] * 2)).outcome == outcome


def test_the_smaller_of_two_gains_is_reported() -> None:
    policy, once = POLICY.training, {"baseline_seconds": EQUAL, "candidate_seconds": [0.8, 0.8]}
    twice = [once | {"again": {"baseline_seconds": EQUAL, "candidate_seconds": [other] * 2}} for other in (0.9, 0.7)]
    unmeasured = {"again": {"state": "missing"}}
    shown = [find_smaller_measured_gain(policy, found, 1) for found in (once, *twice, once | unmeasured, unmeasured)]
    assert [found and round(found.ratio, 3) for found in shown] == [1.25, 1.111, 1.25, 1.25, None]


def test_the_second_measurement_is_the_reported_gain() -> None:
    verdict = judge_patch(POLICY, evidence([1.0, 1.01], [0.8, 0.81], again=([1.0, 1.01], [0.9, 0.91])))
    assert verdict.outcome == "promote" and tells(verdict.reasons[:1], expect("patch.wall_gain", ratio=1.111))
    assert tells(verdict.reasons[1:2], expect("patch.measurement", number=1, ratio=1.248))


def test_different_weights_in_the_second_measurement_are_rejected() -> None:
    found = evidence([1.0, 1.01], [0.8, 0.81])
    found["stages"]["training"]["again"]["drift"] = 0.11
    verdict = judge_patch(POLICY, found)
    assert verdict.outcome == "reject" and verdict.reasons[0].code == "patch.training_differs"


def test_the_reasons_of_both_measurements_are_reported() -> None:
    quiet, none = ([1.0, 1.01], [0.8, 0.81]), ([1.0, 1.01], [1.0, 1.01])
    told = judge_patch(POLICY, evidence(*quiet, again=none)).reasons
    assert codes(told) == ["patch.gain_not_repeated", "patch.wall_gain", "patch.measurement", "patch.wall_gain"]
    assert told[1].data["ratio"] == pytest.approx(1.248, abs=5e-4) and told[3].data["ratio"] == pytest.approx(1.0)
    assert told[2].data == {"number": 2, "reason": told[2].data["reason"]}
    assert told[2].data["reason"].code == "patch.no_gain"
    found = evidence(*quiet, again=([1.0, 1.01], [0.9, 0.91]), new_code=True, long=LONG)
    found["stages"]["evals"]["gains"] = {"code": [0.0, 0.0], "docs": [-0.01, -0.012, -0.011], "chat": [0.1, 0.1]}
    told = judge_patch(POLICY, found).reasons
    assert codes(told) == ["patch.wall_gain", "patch.measurement", "patch.long_gain", "patch.worst_domain"]
    assert tells(told[:1], expect("patch.wall_gain", ratio=1.111))
    assert tells(told[1:2], expect("patch.measurement", number=1, ratio=1.248))
    assert tells(told[2:3], expect("patch.long_gain", ratio=1.2, steps=80))
    assert tells(told[3:], expect("patch.domain_change", domain="docs", change=0.011, documents=3))


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_that_does_not_pass_gives_its_reasons_or_its_name(name: str) -> None:
    for state, outcome in (("failed", "reject"), ("missing", "hold"), ("", "hold")):
        named = expect("gates.stage_failed" if state == "failed" else "gates.no_evidence", stage=name)
        because = Message("patch.test", "because").to_json()
        for reasons, expected in (([because], expect("patch.test")), (["because"], expect("")), (None, named)):
            found = evidence(EQUAL, [0.8, 0.8])
            found["stages"][name] |= {"state": state, "reasons": reasons}
            verdict = judge_patch(POLICY, found)
            assert verdict.outcome == outcome and tells(verdict.reasons, expected) and len(verdict.reasons) == 1
            assert reasons is None or verdict.reasons[0] == "because"


@pytest.mark.parametrize(
    ("baseline", "candidate", "outcome"),
    [
        ([1.0, 1.0], [0.5, 0.5], "reject"),  # just as much as is needed
        ([1.0, 1.0], [0.4999, 0.4999], "promote"),
        ([2.0, *[1.0] * 40], [0.49] * 40, "promote"),
        ([2.4, *[1.0] * 40], [0.45] * 40, "hold"),  # shown, and within the noise
        ([1.0, 1.3], [0.4, 0.62], "hold"),  # beyond the noise, and not shown
    ],
)
def test_a_gain_must_be_shown_and_be_beyond_the_noise(baseline: Any, candidate: Any, outcome: str) -> None:
    policy = POLICY.training.model_copy(update={"min_gain": 2.0, "max_noise": 3.0})
    found = evidence(baseline, candidate)
    assert judge_patch(POLICY.model_copy(update={"training": policy}), found).outcome == outcome


def test_the_bounds_of_a_gain_are_those_of_students_t_test() -> None:
    a, b = [1.0, 1.1, 0.9, 1.05], [0.8, 0.85, 0.81]
    for tries in (1, 3):
        shown = compute_step_gain(POLICY.training, a, b, tries)
        between = ttest_ind(np.log(a), np.log(b)).confidence_interval(1 - 2 * (1 - POLICY.training.confidence) / tries)
        assert shown is not None and math.log(shown.ratio) == pytest.approx(np.log(a).mean() - np.log(b).mean())
        assert [math.log(shown.lower), math.log(shown.upper)] == pytest.approx([between.low, between.high])
        assert shown.noise == pytest.approx(1.1 / 0.9)
        assert shown.to_json() == {name: getattr(shown, name) for name in ("ratio", "lower", "upper", "noise")}
    for few in (
        ([1.0, 1.0, 1.0], [0.5]),
        ([1.0], [0.5, 0.5, 0.5]),
        ([1.0, 1.0], "0.5"),
        (None, [0.5, 0.5]),
        ([True, 1.0], [0.5, 0.5]),
    ):
        assert compute_step_gain(POLICY.training, few[0], few[1], 1) is None
    extreme = compute_step_gain(POLICY.training, [1e300, 1e300], [1e-300, 1e-300], 1)
    assert extreme is not None and extreme.ratio == extreme.lower == math.exp(700)


def test_a_twentieth_try_needs_more_proof_than_the_first() -> None:
    found = evidence([1.0, 1.02, 0.98], [0.93, 0.95, 0.91])
    assert judge_patch(POLICY, found).outcome == "promote"
    assert judge_patch(POLICY, found | {"tries": 20}).outcome == "hold"


seconds = st.lists(st.floats(0.01, 100) | st.sampled_from([math.nan, math.inf, -1.0, 0.0]), max_size=5)
states = st.sampled_from(["passed", "failed", "missing", "not needed", None, 3])


@given(
    seconds,
    seconds,
    st.floats(0, 3),
    st.lists(st.floats(-0.1, 0.1) | st.sampled_from([math.nan, None]), max_size=4),
    st.dictionaries(st.sampled_from(STAGES), states),
    st.integers(-1, 30),
)
def test_only_complete_evidence_of_a_gain_promotes(
    baseline: list[float], candidate: list[float], drift: float, gains: list[Any], changed: dict[str, Any], tries: int
) -> None:
    found = evidence(baseline, candidate, drift=drift) | {"tries": tries}
    found["stages"]["evals"]["gains"] = {"code": gains}
    for name, state in changed.items():
        found["stages"][name]["state"] = state
    verdict = judge_patch(POLICY, found)
    assert verdict.outcome in ("promote", "hold", "reject") and verdict.reasons
    if verdict.outcome == "promote":
        assert sum(candidate) / len(candidate) < sum(baseline)  # sane
        assert drift <= 0.2 * POLICY.training.max_drift
        assert len(gains) > 1 and sum(gains) / len(gains) > -POLICY.evals.margin
        assert all(state in ("passed", "not needed") for state in changed.values())
        for name in STAGES:  # taking any stage away never keeps a promotion
            fewer = {key: stage for key, stage in found["stages"].items() if key != name}
            assert judge_patch(POLICY, found | {"stages": fewer}).outcome == "hold"


@given(
    st.lists(st.floats(0.5, 2), min_size=2, max_size=5),
    st.lists(st.floats(0.5, 2), min_size=2, max_size=5),
    st.floats(1, 3),
)
def test_a_slower_candidate_is_never_judged_better(
    baseline: list[float], candidate: list[float], slower: float
) -> None:
    rank = {"reject": 0, "hold": 1, "promote": 2}
    before = judge_patch(POLICY, evidence(baseline, candidate)).outcome
    after = judge_patch(POLICY, evidence(baseline, [s * slower for s in candidate])).outcome
    assert rank[after] <= rank[before]
    shown = compute_step_gain(POLICY.training, baseline, candidate, 1)
    assert shown is not None and shown.lower <= shown.ratio <= shown.upper and shown.noise >= 1


@pytest.mark.parametrize(
    ("share", "degrees", "value"), [(0.975, 1, 12.7062), (0.95, 1, 6.3138), (0.975, 30, 2.0423), (0.95, 30, 1.6973)]
)
def test_t_quantiles_are_those_of_the_table(share: float, degrees: int, value: float) -> None:
    assert compute_t_quantile(share, degrees) == pytest.approx(value, abs=1e-4)
