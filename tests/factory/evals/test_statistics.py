"""The paired comparison, checked against counts by hand, independent formulas and simulated A/A tests."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest

from factory.evals.statistics import CLOZE, Gain, compare_items, run_holm_step_down, subtract_gains
from factory.evals.tasks import EvalItem


def items(nats: dict[str, list[float]], cloze: list[float] | None = None) -> list[EvalItem]:
    rows = [
        EvalItem("bpb", f"{d}{i}", d, f"source{i}", n, 100.0)
        for d, values in nats.items()
        for i, n in enumerate(values)
    ]
    return rows + [EvalItem("cloze", f"c{i}", "code", f"source{i}", value, 1.0) for i, value in enumerate(cloze or [])]


def test_gain_is_champion_minus_candidate_in_bits_per_byte_and_cloze_the_other_way() -> None:
    ours = items({"code": [100.0] * 10, "docs": [90.0] * 10}, [1.0] * 6 + [0.0] * 4)
    theirs = items({"code": [110.0] * 10, "docs": [90.0] * 10}, [1.0] * 5 + [0.0] * 5)
    target, guards = compare_items(ours, theirs, {})
    assert guards["code"].gain == pytest.approx(0.1 / math.log(2))
    assert guards["code"].error == pytest.approx(0, abs=1e-12)  # no spread between documents
    assert guards["docs"].gain == 0 and guards[CLOZE].gain == pytest.approx(0.1)
    assert target.gain == pytest.approx(0.05 / math.log(2))
    assert compare_items(ours, theirs, {"docs": 1.0})[0].gain == 0
    assert (
        guards[CLOZE].compute_confidence_bound(0.05 / 3)
        < guards[CLOZE].compute_confidence_bound(0.05)
        < 0.1
        < guards[CLOZE].compute_confidence_bound(0.05, upper=True)
    )


def test_different_items_are_not_compared() -> None:
    ours = items({"code": [100.0] * 10})
    assert compare_items(ours, ours[:-1], {}) is None
    assert compare_items([], [], {}) is None
    assert compare_items(ours, ours, {"law": 1.0}) is None


def test_the_order_of_items_does_not_matter() -> None:
    rng = np.random.default_rng(0)
    ours, theirs = items({"code": list(rng.normal(100, 9, 30))}), items({"code": list(rng.normal(101, 9, 30))})
    assert compare_items(ours, theirs, {}) == compare_items(list(reversed(ours)), theirs, {})


def test_the_interval_of_many_documents_is_that_of_the_normal_distribution() -> None:
    rng = np.random.default_rng(1)
    differences = rng.normal(2.0, 8.0, 400)
    target, _ = compare_items(items({"code": [100.0] * 400}), items({"code": list(100 + differences)}), {})
    error = differences.std(ddof=1) / math.sqrt(400) / 100 / math.log(2)
    z = NormalDist().inv_cdf(0.975)
    assert target.error == pytest.approx(error, rel=0.01)
    assert target.compute_confidence_bound(0.025) == pytest.approx(target.gain - z * error, abs=0.02 * error)
    assert target.compute_confidence_bound(0.025, upper=True) == pytest.approx(
        target.gain + z * error, abs=0.02 * error
    )


def test_a_cluster_counts_once_however_many_items_it_has() -> None:
    ours = [EvalItem("bpb", f"{i}", "code", f"source{i % 4}", 100.0, 100.0) for i in range(400)]
    theirs = [EvalItem("bpb", f"{i}", "code", f"source{i % 4}", 100.0 + (i % 4), 100.0) for i in range(400)]
    target, guards = compare_items(ours, theirs, {})
    assert target.clusters == guards["code"].clusters == 4
    assert target.effective == pytest.approx(4)
    assert target.compute_confidence_bound(0.025) <= 0.001  # one of the four sources shows no gain, and four are few


def test_equal_models_differ_no_more_often_than_alpha() -> None:
    rng = np.random.default_rng(2)
    better = 0
    for _ in range(120):
        noise = rng.standard_t(4, (2, 12)) * 5
        target, _ = compare_items(items({"code": list(100 + noise[0])}), items({"code": list(100 + noise[1])}), {})
        better += target.compute_confidence_bound(0.05) > 0
    assert better <= 13  # 6 expected; P(more than 13 | rate 0.05) is 0.3 %


def test_a_source_with_half_of_the_bytes_lowers_the_effective_number_of_sources() -> None:
    rng = np.random.default_rng(4)
    sizes = [900.0] + [100.0] * 9
    make = lambda values: [
        EvalItem("bpb", f"{i}", "code", f"s{i}", v, w) for i, (v, w) in enumerate(zip(values, sizes))
    ]
    target, _ = compare_items(make(rng.normal(sizes, 5)), make(rng.normal(sizes, 5)), {})
    assert target.clusters == 10 and target.effective == pytest.approx(1 / (0.5**2 + 9 * (1 / 18) ** 2))


def test_one_source_has_no_confidence_bound() -> None:
    one = [EvalItem("bpb", f"{i}", "code", "only", 100.0, 100.0) for i in range(5)]
    target, _ = compare_items(one, one, {})
    assert target.compute_confidence_bound(0.05) is None
    assert (
        Gain().compute_confidence_bound(0.05) is None and Gain(0.1, 0.0, 2, 2.0).compute_confidence_bound(0.0) is None
    )


def test_a_difference_from_one_source_has_no_error() -> None:
    many, one = Gain(0.3, 0.03, 9, 9.0), Gain(0.1, 0.04, 1, 1.0)
    for found, gain in (
        (subtract_gains(many, one), 0.2),
        (subtract_gains(one, many), -0.2),
        (subtract_gains(one, one), 0.0),
    ):
        assert (found.error, found.effective, found.compute_confidence_bound(0.05)) == (None, None, None)
        assert found.gain == pytest.approx(gain) and found.clusters in (10, 2)
    two = subtract_gains(many, Gain(0.1, 0.04, 2, 2.0))
    assert two.error == pytest.approx(0.05) and two.effective == pytest.approx(1 + 0.05**4 / (0.03**4 / 8 + 0.04**4))
    assert subtract_gains(Gain(0.3, 0.0, 9, 9.0), Gain(0.1, 0.0, 3, 2.5)) == Gain(pytest.approx(0.2), 0.0, 12, 10.5)
    for part in ({"gain": None}, {"error": math.nan}, {"effective": math.inf}):
        assert subtract_gains(many, replace(many, **part)) == subtract_gains(replace(many, **part), many) == Gain()


def test_holm_equals_its_textbook_form_on_p_values() -> None:
    rng = np.random.default_rng(3)
    for _ in range(300):
        estimates = dict(zip("abcde", rng.normal(1.5, 1.2, 5)))
        shown = lambda name, k, found=estimates: found[name] + NormalDist().inv_cdf(0.05 / k) > 0
        expected = dict.fromkeys(estimates, False)
        for rank, (name, estimate) in enumerate(sorted(estimates.items(), key=lambda pair: -pair[1])):
            if 1 - NormalDist().cdf(estimate) >= 0.05 / (5 - rank):
                break
            expected[name] = True
        assert run_holm_step_down(list(estimates), shown) == expected
