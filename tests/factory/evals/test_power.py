"""The detectable gain, compared with the normal and the noncentral t distribution, and with simulated comparisons."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
from scipy.special import stdtrit
from scipy.stats import nct

from factory.evals.power import (
    POWER,
    TAILS,
    TOGETHER,
    RequiredBound,
    ScoredGuard,
    assign_holm_levels,
    find_group_growth_to_detect,
    find_smallest_detectable_gain,
)
from factory.evals.statistics import Gain

MANY = Gain(0.0, 0.01, 100_000, 100_000.0)


def test_the_detectable_gain_of_many_documents_is_that_of_the_normal_distribution() -> None:
    normal = NormalDist()
    expected = (normal.inv_cdf(0.975) + normal.inv_cdf(POWER)) * 0.01
    assert find_smallest_detectable_gain([RequiredBound(MANY, 0.025)]) == pytest.approx(expected, rel=0.015)
    of_three = (normal.inv_cdf(0.975) + normal.inv_cdf(POWER ** (1 / 3))) * 0.01
    assert find_smallest_detectable_gain([RequiredBound(MANY, 0.025)] * 3) == pytest.approx(of_three, rel=0.015)


def test_the_pass_probability_is_close_to_the_noncentral_t_of_a_known_error() -> None:
    """A floor far below: the shift's own error is what is left out, so the tested error alone scatters."""
    freedom, level, shift = 9.0, 0.025, 3.0
    few = Gain(0.0, 1.0, 10, freedom + 1)
    known = float(nct.sf(nct.isf(level, freedom, 0), freedom, shift))
    told = RequiredBound(few, level).compute_pass_probability(shift)
    assert told < known < told + 0.1, "an error that is estimated makes the chance smaller, not much"


@pytest.mark.parametrize("sources", [8, 20, 60])
def test_the_detectable_gain_is_detected_in_80_percent_of_heavy_tailed_draws(sources: int) -> None:
    rng = np.random.default_rng(sources)
    seen, rounds = 0, 2000
    draws = 0.03 * rng.standard_t(5, (rounds, 2, sources))
    errors = draws.std(axis=2, ddof=1) / math.sqrt(sources)
    for (_, other), (told, tested) in zip(draws.mean(axis=2), errors, strict=True):
        gain = find_smallest_detectable_gain(
            [RequiredBound(Gain(0.0, float(told), sources, float(sources)), 0.025, tails=TAILS)]
        )
        assert gain is not None
        bound = Gain(gain + float(other), float(tested), sources, float(sources)).compute_confidence_bound(0.025)
        seen += bound is not None and bound > 0
    assert 0.79 <= seen / rounds <= 0.93  # more where sources are few; a formula that takes the error as known: 0.75


def test_no_gain_is_detectable_with_a_guard_that_is_too_uncertain() -> None:
    cloze = Gain(0.0, 0.1, 40, 40.0)
    assert (
        find_smallest_detectable_gain([RequiredBound(MANY, 0.025), RequiredBound(cloze, 0.0125, -0.15, moves=False)])
        is None
    )
    assert find_smallest_detectable_gain([RequiredBound(MANY, 0.025), RequiredBound(Gain(), 0.05)]) is None, (
        "what was not measured"
    )
    sure = find_smallest_detectable_gain(
        [RequiredBound(MANY, 0.025), RequiredBound(Gain(0.0, 0.01, 40, 40.0), 0.0125, -0.15, moves=False)]
    )
    assert sure == pytest.approx(find_smallest_detectable_gain([RequiredBound(MANY, 0.025)]), rel=0.02)


def test_holm_tests_guards_that_a_large_gain_moves_first() -> None:
    """Holm's steps: a guard that it does not move is then tested last, at the whole level, not at a part of it."""
    code, cloze = Gain(0.0, 0.01, 40, 40.0), Gain(0.0, 0.055, 40, 40.0)
    guards = {"code": RequiredBound(code, 0.06, -0.02), "cloze": RequiredBound(cloze, 0.06, -0.15, moves=False)}
    assert [(name, one.level) for name, one in assign_holm_levels(guards, 0.0).items()] == [
        ("cloze", 0.03),
        ("code", 0.06),
    ]
    assert [(name, one.level) for name, one in assign_holm_levels(guards, 0.1).items()] == [
        ("code", 0.03),
        ("cloze", 0.06),
    ]
    target = RequiredBound(MANY, 0.025)
    gain = find_smallest_detectable_gain([target], 0.0, guards)
    assert gain is not None and gain > 0.02, "enough for code to be surer than cloze"
    passed = [one.compute_pass_probability(gain) for one in (target, *assign_holm_levels(guards, gain).values())]
    assert (
        math.prod(passed)
        >= POWER
        > math.prod(one.compute_pass_probability(8.0) for one in assign_holm_levels(guards, 0.0).values())
    )


@pytest.mark.parametrize(("items", "right"), [(24, 0.3), (36, 0.5), (60, 0.5), (120, 0.6), (400, 0.1)])
def test_the_predicted_share_of_equally_good_models_passes(items: int, right: float) -> None:
    """Against drawn pairs: an item is as easy for both, with the correlation that is assumed."""
    rng = np.random.default_rng(items)
    guard = ScoredGuard(items, float(items), right * (1 - right), 0.15, 0.05)
    both = right * (1 - right) * TOGETHER + right**2  # chance that both are right
    only = right - both
    change = rng.choice((-1.0, 0.0, 1.0), p=(only, 1 - 2 * only, only), size=(4000, items))
    assert np.mean(change**2) == pytest.approx(2 * right * (1 - right) * (1 - TOGETHER), rel=0.05)
    error = change.std(axis=1, ddof=1) / math.sqrt(items)
    passed = change.mean(axis=1) - stdtrit(items - 1, 0.95) * error > -0.15
    assert np.mean(passed) == pytest.approx(guard.pass_rate_of_equal_models, abs=0.05)


def test_a_guard_is_reliable_from_the_number_of_items_that_it_needs() -> None:
    for variance, margin in ((0.25, 0.15), (0.05, 0.02), (0.25, 0.02)):
        small = ScoredGuard(30, 30.0, variance, margin, 0.05)
        needed = small.find_items_needed()
        assert not small.is_reliable and needed is not None
        assert [ScoredGuard(n, float(n), variance, margin, 0.05).is_reliable for n in (needed - 1, needed)] == [
            False,
            True,
        ]
    assert ScoredGuard(30, 30.0, 0.25, 0.0, 0.05).find_items_needed() is None
    assert ScoredGuard(30, 1.0, 0.0, 0.15, 0.05).pass_rate_of_equal_models == 0.0, "one group has no spread"


def test_the_predicted_number_of_groups_detects_the_gain() -> None:
    few = Gain(0.005, 0.01, 20, 20.0)
    times = find_group_growth_to_detect(0.005, [RequiredBound(few, 0.025)])
    assert times is not None and times > 1
    more = Gain(0.0, 0.01 / math.sqrt(times), 20, 20.0 * times)
    assert find_smallest_detectable_gain([RequiredBound(more, 0.025)]) == pytest.approx(0.005, rel=0.05)
    assert (
        find_group_growth_to_detect(0.0, [RequiredBound(few, 0.025)]) is None
        and (find_group_growth_to_detect(0.1, [RequiredBound(few, 0.025)]) or 9) <= 1
    )


def test_a_guard_that_is_set_aside_keeps_its_holm_step() -> None:
    code, cloze = Gain(0.0, 0.01, 40, 40.0), Gain(0.0, 0.1, 40, 40.0)
    guards = {"code": RequiredBound(code, 0.06, -0.005), "cloze": RequiredBound(cloze, 0.06, -0.15, moves=False)}
    target = [RequiredBound(MANY, 0.025)]
    assert find_smallest_detectable_gain(target, 0.0, guards) is None
    aside, alone = (
        find_smallest_detectable_gain(target, 0.0, guards, guard_set_aside="cloze"),
        find_smallest_detectable_gain(target, 0.0, {"code": guards["code"]}),
    )
    assert aside is not None and alone is not None and aside > alone, "code is tested at half the level"


def test_a_tighter_floor_raises_the_detectable_gain() -> None:
    told = [
        find_smallest_detectable_gain([RequiredBound(MANY, 0.025), RequiredBound(Gain(0.0, 0.02, 20, 20.0), 0.05, -d)])
        for d in (0.1, 0.03, 0.0)
    ]
    assert None not in told and told == sorted(told) and told[0] < told[2]  # type: ignore[type-var, operator]
