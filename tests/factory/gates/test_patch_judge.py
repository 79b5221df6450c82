"""The pure judge of the patch gate: the evidence that promotes, holds and rejects a patch, and how often the judge errs."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from factory.core.workspace import find_checkout_root
from factory.gates.patch.confidence import PRECISION, compute_interval_of_rounds, compute_reach
from factory.gates.patch.judge import (
    STAGES,
    compute_step_gain,
    compute_t_quantile,
    find_measured_gain,
    judge_patch,
)
from factory.gates.patch.policy import PatchPolicy
from kernels.contract.message import Message
from tests.support.gates.patch_evidence import evidence
from tests.support.gates.reasons import Expected, expect, tells
from tests.support.messages import codes

SHIPPED = PatchPolicy.load(find_checkout_root() / "policies" / "gates" / "patch.yaml")
POLICY = SHIPPED
QUIET, FAST = [1.0, 1.01, 0.99, 1.0, 1.01, 0.99], [0.8, 0.81, 0.79, 0.8, 0.81, 0.79]
GOOD = evidence(QUIET, FAST)
MIXED = [1.0, 0.9, 0.7, 1.0, 0.9, 0.7]  # faster or not, who knows


def test_a_clear_gain_promotes_and_says_how_much() -> None:
    verdict = judge_patch(POLICY, GOOD)
    assert verdict.outcome == "promote" and tells(verdict.reasons[:1], expect("patch.wall_gain", ratio=1.25, pairs=6))
    assert len(verdict.reasons) <= 5


@pytest.mark.parametrize(
    ("found", "outcome", "expected"),
    [
        (evidence(QUIET, QUIET), "reject", expect("patch.no_gain")),  # A/A is "no gain", nothing worse
        (evidence(QUIET, [1.2] * 6), "reject", expect("patch.no_gain")),
        (evidence(QUIET, MIXED), "hold", expect("patch.unclear", pairs=6, rounds=2)),
        (
            evidence(QUIET, [1.3, 1.0, 0.8] * 2),
            "hold",
            expect("patch.unclear"),
        ),  # never a reject while a gain may be there
        (evidence([1.0], [0.5]), "hold", expect("patch.not_timed")),
        (evidence(QUIET, FAST, round_pairs=[6]), "hold", expect("patch.not_timed")),  # one process of each side
        (evidence(QUIET, FAST, round_pairs=[3, 2]), "hold", expect("patch.not_timed")),
        (evidence(QUIET, FAST, round_pairs=None), "hold", expect("patch.not_timed")),
        (evidence(QUIET, FAST[:5]), "hold", expect("patch.not_timed")),
        (evidence([1.0, math.nan], [0.5, 0.5]), "hold", expect("patch.not_timed")),
        (evidence([1.0, 1.0], [0.5, -0.5]), "hold", expect("patch.not_timed")),
        (evidence(QUIET, FAST, drift=1.2), "reject", expect("patch.training_differs", drift=1.2)),
        (evidence(QUIET, FAST, drift=0.11), "reject", expect("patch.training_differs", drift=0.11, allowed=0.1)),
        (evidence(QUIET, FAST, drift=math.nan), "hold", expect("patch.weights_not_compared")),
        (evidence(QUIET, FAST, control_drift=None), "hold", expect("patch.weights_not_compared")),
        (
            evidence(QUIET, FAST, same_bits=False, bits_expected=True),
            "hold",
            expect("patch.bits_only_here", drift=0.01),
        ),
        (evidence(QUIET, FAST, same_bits=False, bits_expected=False), "promote", expect("patch.wall_gain")),
        (evidence(QUIET, FAST, same_bits=True, bits_expected=True), "promote", expect("patch.wall_gain")),
        ({}, "hold", expect("gates.no_evidence", stage="scope")),
        (GOOD | {"tries": None}, "hold", expect("gates.tries_unknown")),
    ],
)
def test_each_evidence_gets_its_verdict(found: dict[str, Any], outcome: str, expected: Expected) -> None:
    verdict = judge_patch(POLICY, found)
    assert verdict.outcome == outcome and tells(verdict.reasons[:1], expected), verdict
    assert len(verdict.reasons) <= 5, "what a person reads at once"


@pytest.mark.parametrize("apart", [0.0, 0.01, 0.02])
def test_looking_after_each_pair_seldom_promotes_a_patch_without_a_gain(apart: float) -> None:
    """Simulated: a process is faster or slower than another one by ``apart``, and the runs of one process differ by 1 to 20 %."""
    draw, policy, times = random.Random(7), SHIPPED.training, 400
    for each in (0.01, 0.05, 0.2):

        def sequence(true: float, each: float = each) -> str:
            baseline: list[float] = []
            candidate: list[float] = []
            for number in range(1, 7):
                sides = [draw.gauss(0, apart) for _ in range(2)]
                for _ in range(policy.pairs):
                    baseline.append(math.exp(sides[0] + draw.gauss(0, each)))
                    candidate.append(math.exp(sides[1] + draw.gauss(0, each)) / true)
                if number >= policy.rounds:
                    found = evidence(baseline, candidate, round_pairs=[policy.pairs] * number)
                    outcome = judge_patch(SHIPPED, found).outcome
                    if outcome != "hold":
                        return outcome
            return "hold"

        wrong = sum(sequence(1.0) == "promote" for _ in range(times)) / times
        right = sum(sequence(1.2) == "promote" for _ in range(times // 4)) / (times // 4)
        lost = sum(sequence(1.2) == "reject" for _ in range(times // 4)) / (times // 4)
        print(
            f"processes {apart:g}, runs {each:g}: promoted without a gain {wrong:.3f}, with 1.2 {right:.2f}, rejected {lost:.2f}"
        )
        assert wrong <= 0.01 and lost <= 0.02
        assert right > 0.9 or each == 0.2


LONG = {"steps": 80, "runs": 1, "ratio": 1.2, "hideable": 1.04, "drift": 0.02, "control_drift": 0.2}


@pytest.mark.parametrize(
    ("long", "outcome", "expected"),
    [
        (LONG, "promote", expect("patch.long_gain", ratio=1.2, steps=80)),
        (None, "hold", expect("patch.long_not_timed")),
        ([LONG], "hold", expect("patch.long_not_timed")),
        (LONG | {"ratio": float("nan")}, "hold", expect("patch.long_not_timed")),
        (LONG | {"ratio": 1.045}, "hold", expect("patch.quicker_start", ratio=1.045, needed=1.0608)),
        (LONG | {"ratio": 1.05, "hideable": 1.03}, "hold", expect("patch.quicker_start", ratio=1.05, needed=1.0506)),
        (LONG | {"ratio": 1.06, "hideable": 1.03}, "promote", expect("patch.long_gain", ratio=1.06, steps=80)),
        (LONG | {"ratio": 0.99, "hideable": 1.001}, "reject", expect("patch.no_long_gain", steps=80, ratio=0.99)),
        (LONG | {"ratio": 1.021, "hideable": 1.01}, "hold", expect("patch.quicker_start", ratio=1.021)),
        (LONG | {"drift": 0.11}, "reject", expect("patch.long_differs", steps=80, drift=0.11, allowed=0.1)),
    ],
)
def test_new_code_must_gain_over_long_runs_too(long: Any, outcome: str, expected: Expected) -> None:
    found = evidence(QUIET, [x / 1.25 for x in QUIET], new_code=True, long=long)
    verdict = judge_patch(POLICY, found)
    assert verdict.outcome == outcome, verdict
    assert tells(verdict.reasons, expected), verdict
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
    found = evidence(QUIET, FAST)
    found["stages"]["evals"]["gains"] = gains
    verdict = judge_patch(POLICY, found)
    assert verdict.outcome == outcome and tells(verdict.reasons[:1], expected), verdict


LIMIT = POLICY.training.max_drift * 0.2  # of weights, where leaving out steps moves them by 0.2
EQUAL = [1.0, 1.0, 1.0, 1.0]  # runs without noise
MORE = LIMIT * 1.0001
NEEDED = POLICY.training.min_gain


@pytest.mark.parametrize(
    ("training", "gains", "outcome"),
    [
        ({"drift": LIMIT}, None, "promote"),
        ({"drift": MORE}, None, "reject"),
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
    found = evidence(EQUAL, [0.8] * 4, new_code="long" in training, **training)
    if gains is not None:
        found["stages"]["evals"]["gains"] = {"code": gains}
    verdict = judge_patch(POLICY, found)
    assert verdict.outcome == outcome, verdict


@pytest.mark.parametrize(
    ("candidate", "outcome"),
    [(1 / 1.02, "hold"), (1 / 1.0199, "reject"), (1 / 1.0201, "promote"), (1.0, "reject"), (1.1, "reject")],
)
def test_a_gain_equal_to_the_threshold_is_not_enough(candidate: float, outcome: str) -> None:
    assert judge_patch(POLICY, evidence(EQUAL, [candidate] * 4)).outcome == outcome


def test_the_gain_that_decided_is_reported() -> None:
    policy = POLICY.training
    clock = lambda other: {"baseline_seconds": QUIET, "candidate_seconds": [other] * 6}
    told = {"device": "cpu", "cpu": {"tree": clock(0.8), "thread": clock(0.7)}}
    of = lambda found: find_measured_gain(policy, found["stages"]["training"], 1)
    shown = [of(evidence(QUIET, FAST)), of(evidence(QUIET, MIXED)), of(evidence(QUIET, MIXED, **told))]
    assert [found and round(found.ratio, 2) for found in shown] == [1.25, 1.17, 1.25]
    assert of(evidence(QUIET, FAST[:2])) is None and find_measured_gain(policy, {"state": "missing"}, 1) is None


def test_the_reasons_of_a_promotion_are_few_and_in_order() -> None:
    found = evidence(QUIET, FAST, new_code=True, long=LONG)
    found["stages"]["evals"]["gains"] = {"code": [0.0, 0.0], "docs": [-0.01, -0.012, -0.011], "chat": [0.1, 0.1]}
    told = judge_patch(POLICY, found).reasons
    assert codes(told) == ["patch.wall_gain", "patch.long_gain", "patch.worst_domain"]
    assert tells(told[:1], expect("patch.wall_gain", ratio=1.25, drift=0.01))
    assert tells(told[1:2], expect("patch.long_gain", ratio=1.2, steps=80))
    assert tells(told[2:], expect("patch.domain_change", domain="docs", change=0.011, documents=3))


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_that_does_not_pass_gives_its_reasons_or_its_name(name: str) -> None:
    for state, outcome in (("failed", "reject"), ("missing", "hold"), ("", "hold")):
        named = expect("gates.stage_failed" if state == "failed" else "gates.no_evidence", stage=name)
        because = Message("patch.test", "because").to_json()
        for reasons, expected in (([because], expect("patch.test")), (["because"], expect("")), (None, named)):
            found = evidence(EQUAL, [0.8] * 4)
            found["stages"][name] |= {"state": state, "reasons": reasons}
            verdict = judge_patch(POLICY, found)
            assert verdict.outcome == outcome and tells(verdict.reasons, expected) and len(verdict.reasons) == 1
            assert reasons is None or verdict.reasons[0] == "because"


# -- the interval --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("count", [3, 5, 9, 30])
@pytest.mark.parametrize("error", [0.05, 0.002])
def test_the_interval_ends_where_the_mixture_says_so(count: int, error: float) -> None:
    """The closed form against the process of its definition."""
    draw = np.random.default_rng(count)
    values = draw.normal(0.3, 0.1, count)
    found = compute_interval_of_rounds([list(values)], error)

    def evidence_against(mean: float) -> float:
        apart = values - mean
        whole, square = apart.sum(), (apart**2).sum()
        ratio = square / (square - whole**2 / (count + PRECISION))
        return math.sqrt(PRECISION / (count + PRECISION)) * ratio ** (count / 2)

    if math.isinf(compute_reach(count, error)):
        assert evidence_against(found.mean + 1e6) < 1 / error
        return
    for end in (found.low, found.high):
        assert evidence_against(end) == pytest.approx(1 / error, rel=1e-6)
    assert evidence_against(found.mean) < 1 < 1 / error
    assert found.deviation == pytest.approx(values.std())


@pytest.mark.parametrize("tail", ["normal", "heavy"])
def test_the_interval_holds_the_mean_at_every_moment(tail: str) -> None:
    """Of 2,000 simulated series, an ordinary t interval is wrong at some moment in a third; this one in at most one of twenty."""
    draw, error = np.random.default_rng(5), 0.05
    wrong = 0
    for _ in range(2000):
        values = draw.normal(size=40) if tail == "normal" else draw.standard_t(4, size=40)
        for count in range(2, 41):
            found = compute_interval_of_rounds([list(values[:count])], error)
            if not found.low <= 0 <= found.high:
                wrong += 1
                break
    assert wrong / 2000 <= error, wrong


def test_processes_that_differ_widen_the_interval() -> None:
    alike = compute_interval_of_rounds([[0.2, 0.21], [0.21, 0.2]], 0.05)
    apart = compute_interval_of_rounds([[0.25, 0.26], [0.15, 0.16]], 0.05)
    assert alike.mean == pytest.approx(apart.mean) and apart.deviation == pytest.approx(0.1)
    assert apart.high - apart.low > 5 * (alike.high - alike.low)


def test_a_gain_has_the_bounds_of_its_interval() -> None:
    a, b = [1.0, 1.1, 0.9, 1.05], [0.8, 0.85, 0.81, 0.83]
    found = evidence(a, b)["stages"]["training"]
    for tries in (1, 3):
        shown = compute_step_gain(POLICY.training, found, found, tries)
        ratios = [math.log(x / y) for x, y in zip(a, b, strict=True)]
        expected = compute_interval_of_rounds([ratios[:2], ratios[2:]], (1 - POLICY.training.confidence) / tries)
        assert shown is not None
        assert [math.log(x) for x in (shown.ratio, shown.lower, shown.upper)] == pytest.approx(
            [expected.mean, expected.low, expected.high]
        )
        assert shown.to_json() == {name: getattr(shown, name) for name in ("ratio", "lower", "upper", "noise")}
    extreme = evidence([1e300] * 4, [1e-300] * 4)["stages"]["training"]
    shown = compute_step_gain(POLICY.training, extreme, extreme, 1)
    assert shown is not None and shown.ratio == shown.lower == math.exp(700)


def test_a_twentieth_try_needs_more_proof_than_the_first() -> None:
    found = evidence([1.0, 1.02, 0.98] * 2, [0.91, 0.95, 0.93] * 2)
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
    st.lists(st.tuples(st.floats(0.5, 2), st.floats(0.5, 2)), min_size=4, max_size=8),
    st.floats(1, 3),
)
def test_a_slower_candidate_is_never_judged_better(pairs: list[tuple[float, float]], slower: float) -> None:
    baseline, candidate = ([pair[side] for pair in pairs] for side in (0, 1))
    rank = {"reject": 0, "hold": 1, "promote": 2}
    before = judge_patch(POLICY, evidence(baseline, candidate)).outcome
    after = judge_patch(POLICY, evidence(baseline, [s * slower for s in candidate])).outcome
    assert rank[after] <= rank[before]
    found = evidence(baseline, candidate)["stages"]["training"]
    shown = compute_step_gain(POLICY.training, found, found, 1)
    assert shown is not None and shown.lower <= shown.ratio <= shown.upper and shown.noise >= 1


@pytest.mark.parametrize(
    ("share", "degrees", "value"), [(0.975, 1, 12.7062), (0.95, 1, 6.3138), (0.975, 30, 2.0423), (0.95, 30, 1.6973)]
)
def test_t_quantiles_are_those_of_the_table(share: float, degrees: int, value: float) -> None:
    assert compute_t_quantile(share, degrees) == pytest.approx(value, abs=1e-4)
