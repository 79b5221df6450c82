"""The paired bootstrap against hand counts, independent formulas and simulated A/A tests."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest

from factory.evals.statistics import CLOZE, compare, expanded, holm
from factory.evals.tasks import EvalItem

SUITE = "ab" * 32


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
    target, guards = compare(ours, theirs, {}, SUITE, 0.05)
    assert guards["code"].gain == pytest.approx(0.1 / math.log(2))
    assert guards["code"].low95 == pytest.approx(guards["code"].high95)  # no spread between documents
    assert guards["docs"].gain == 0 and guards[CLOZE].gain == pytest.approx(0.1)
    assert target.gain == pytest.approx(0.05 / math.log(2))
    assert compare(ours, theirs, {"docs": 1.0}, SUITE, 0.05)[0].gain == 0
    assert set(guards["code"].lower) == {1, 2, 3} and guards[CLOZE].lower[3] <= guards[CLOZE].lower[1]


def test_different_items_are_not_compared() -> None:
    ours = items({"code": [100.0] * 10})
    assert compare(ours, ours[:-1], {}, SUITE, 0.05) is None
    assert compare([], [], {}, SUITE, 0.05) is None
    assert compare(ours, ours, {"law": 1.0}, SUITE, 0.05) is None


def test_same_suite_same_numbers() -> None:
    rng = np.random.default_rng(0)
    ours, theirs = items({"code": list(rng.normal(100, 9, 30))}), items({"code": list(rng.normal(101, 9, 30))})
    first = compare(ours, theirs, {}, SUITE, 0.05)
    assert first == compare(list(reversed(ours)), theirs, {}, SUITE, 0.05)
    assert first != compare(ours, theirs, {}, "cd" * 32, 0.05)


def test_interval_of_many_documents_is_the_normal_one() -> None:
    rng = np.random.default_rng(1)
    differences = rng.normal(2.0, 8.0, 400)
    target, _ = compare(items({"code": [100.0] * 400}), items({"code": list(100 + differences)}), {}, SUITE, 0.025)
    error = differences.std(ddof=1) / math.sqrt(400) / 100 / math.log(2)
    z = NormalDist().inv_cdf(0.975)
    assert target.lower[1] == pytest.approx(target.gain - z * error, abs=0.1 * error)
    assert target.upper[1] == pytest.approx(target.gain + z * error, abs=0.1 * error)


def test_a_cluster_counts_once_however_many_items_it_has() -> None:
    ours = [EvalItem("bpb", f"{i}", "code", f"source{i % 4}", 100.0, 100.0) for i in range(400)]
    theirs = [EvalItem("bpb", f"{i}", "code", f"source{i % 4}", 100.0 + (i % 4), 100.0) for i in range(400)]
    target, guards = compare(ours, theirs, {}, SUITE, 0.025)
    assert target.clusters == guards["code"].clusters == 4
    assert target.lower[1] <= 0.001  # one of the four sources shows no gain, and four are few


def test_equal_models_differ_no_more_often_than_alpha() -> None:
    rng = np.random.default_rng(2)
    better = 0
    for trial in range(120):
        noise = rng.standard_t(4, (2, 12)) * 5
        target, _ = compare(
            items({"code": list(100 + noise[0])}), items({"code": list(100 + noise[1])}), {}, f"{trial:064x}", 0.05
        )
        better += target.lower[1] > 0
    assert better <= 13  # 6 expected; P(more than 13 | rate 0.05) is 0.3 %


def test_expanded_percentile_widens_for_few_clusters() -> None:
    assert expanded(0.025, 10_000) == pytest.approx(0.025, rel=0.01)
    # t(0.025, 9) = 2.2622: Phi(-2.2622 * sqrt(10 / 9)) = 0.00855
    assert expanded(0.025, 10) == pytest.approx(0.00855, rel=1e-3)
    # t(0.025, 2) = 4.3027: Phi(-4.3027 * sqrt(3 / 2)) = 6.8e-8
    assert expanded(0.025, 3) == pytest.approx(6.8e-8, rel=0.02)
    assert expanded(0.025, 1) == 0


def test_holm_equals_its_textbook_form_on_p_values() -> None:
    rng = np.random.default_rng(3)
    for _ in range(300):
        estimates = dict(zip("abcde", rng.normal(1.5, 1.2, 5)))
        lower = {n: {k: e + NormalDist().inv_cdf(0.05 / k) for k in range(1, 6)} for n, e in estimates.items()}
        expected = dict.fromkeys(estimates, False)
        for rank, (name, estimate) in enumerate(sorted(estimates.items(), key=lambda pair: -pair[1])):
            if 1 - NormalDist().cdf(estimate) >= 0.05 / (5 - rank):
                break
            expected[name] = True
        assert holm(lower, dict.fromkeys(estimates, 0.0)) == expected
