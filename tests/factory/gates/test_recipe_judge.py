"""The judge of recipe changes as a pure function: which evidence promotes, which does not, and which evidence it does not accept."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from factory.core.errors import ConfigError
from factory.core.workspace import find_checkout_root
from factory.gates.recipe.judge import STAGES, MeanWithBounds, RecipeComparison, _decide, compare_recipes, judge_recipe
from factory.gates.recipe.policy import RecipePolicy
from tests.support.gates.reasons import Expected, expect, tells

POLICY = RecipePolicy.load(find_checkout_root() / "policies" / "gates" / "recipe.yaml")
SEEDS = [2.000, 2.004, 1.997, 2.001]  # the baseline's score under four seeds: their mean moves by 0.002
NOISE = float(np.std(SEEDS, ddof=1)) * math.sqrt(2 / 4)


def evidence(gains: list[float], docs: list[float] | None = None, **runs: Any) -> dict[str, Any]:
    """``gains`` of the domain code, a seed each; ``docs``: of docs, the same by default."""
    docs = gains if docs is None else docs
    stages: dict[str, Any] = {name: {"state": "passed", "reasons": [name]} for name in STAGES}
    stages["runs"] |= {
        "baseline": [{"code": score, "docs": score} for score in SEEDS],
        "candidate": [{"code": s - c, "docs": s - d} for s, c, d in zip(SEEDS, gains, docs, strict=True)],
        "baseline_tokens_per_s": [100.0, 101.0, 99.0, 100.0],
        "candidate_tokens_per_s": [99.0, 100.0, 101.0, 100.0],
        "baseline_memory": 1e9,
        "candidate_memory": 1e9,
    }
    stages["runs"] |= runs
    return {"stages": stages, "tries": 1}


GOOD = evidence([0.03, 0.031, 0.029, 0.03])
SLOW = {"candidate_tokens_per_s": [80.0, 81.0, 79.0, 80.0]}


@pytest.mark.parametrize(
    ("found", "outcome", "expected"),
    [
        (GOOD, "promote", expect("recipe.gain", gain=0.03)),
        (evidence([0.0] * 4), "reject", expect("recipe.no_gain")),
        # a change of no size has one sign under every seed: shown by the pairs, and still nothing
        (evidence([1e-5, 1.1e-5, 0.9e-5, 1e-5]), "reject", expect("recipe.no_gain")),
        (evidence([-0.03, -0.031, -0.029, -0.03]), "reject", expect("recipe.worse", gain=-0.03)),
        (evidence([0.05, -0.03, 0.04, 0.0]), "hold", expect("recipe.gain_likely")),
        (evidence([0.09] * 4, docs=[-0.03] * 4), "reject", expect("recipe.domains_worse", named=["docs −0.0300"])),
        (
            evidence([0.09] * 4, docs=[-0.03, 0.03, 0.01, -0.03]),
            "hold",
            expect("recipe.domains_unsure", domains=["docs"]),
        ),
        (evidence([0.03] * 4, **SLOW), "reject", expect("recipe.slower", slower=1.25)),
        (
            evidence([0.03] * 4, candidate_tokens_per_s=[70.0, 120.0, 60.0, 99.0]),
            "hold",
            expect("recipe.slower", most=1.1),
        ),
        (evidence([0.03] * 4, candidate_memory=1.3e9), "reject", expect("recipe.memory", memory=1.3, most=1.25)),
        (evidence([0.03] * 4, **SLOW, same_cost=True), "promote", expect("recipe.gain", gain=0.03)),
        (evidence([0.03] * 4, **SLOW, same_cost="True"), "reject", expect("recipe.slower", slower=1.25)),
    ],
)
def test_each_kind_of_evidence_gets_its_verdict(found: dict[str, Any], outcome: str, expected: Expected) -> None:
    verdict = judge_recipe(POLICY, found)
    assert verdict.outcome == outcome and tells(verdict.reasons[:1], expected), verdict


ROUND = POLICY.runs.model_copy(update={"min_gain": 0.25, "domain_margin": 0.125, "max_slower": 1.5, "max_memory": 2.0})
FINE: dict[str, Any] = {
    "gain": 0.5,
    "lower": 0.1,
    "noise": 0.1,
    "docs": 0.5,
    "least": 0.1,
    "slower": 1.0,
    "surely": 1.0,
    "memory": 1.0,
}


@pytest.mark.parametrize(
    ("shown", "outcome"),
    [
        ({}, "promote"),
        ({"gain": 0.25}, "reject"),
        ({"gain": 0.26}, "promote"),
        ({"noise": 0.5}, "reject"),
        ({"noise": 0.49}, "promote"),
        ({"gain": -0.25}, "reject"),
        ({"lower": 0.0}, "hold"),
        ({"lower": 0.001}, "promote"),
        ({"docs": -0.125}, "promote"),
        ({"docs": -0.126}, "reject"),
        ({"least": -0.125}, "hold"),
        ({"least": -0.124}, "promote"),
        ({"slower": 1.5}, "promote"),
        ({"slower": 1.51}, "hold"),
        ({"slower": 1.6, "surely": 1.5}, "hold"),
        ({"slower": 1.6, "surely": 1.51}, "reject"),
        ({"memory": 2.0}, "promote"),
        ({"memory": 2.01}, "reject"),
        ({"memory": 2.01, "slower": 1.6, "surely": 1.0}, "reject"),
    ],
)
def test_the_judge_decides_values_on_both_sides_of_each_threshold(shown: dict[str, Any], outcome: str) -> None:
    of = FINE | shown
    wide = lambda mean, lower: MeanWithBounds(mean, lower, 9.0)
    domains = {"code": wide(1.0, 1.0), "docs": wide(of["docs"], of["least"])}
    found = RecipeComparison(
        wide(of["gain"], of["lower"]), of["noise"], domains, wide(of["slower"], of["surely"]), of["memory"]
    )
    verdict = _decide(ROUND, found, same_cost=False)
    assert verdict.outcome == outcome, verdict
    costs = outcome != "promote" and shown.keys() & {"slower", "memory"}
    assert _decide(ROUND, found, same_cost=True).outcome == ("promote" if costs else outcome)


def test_the_comparison_has_the_means_of_the_measured_numbers() -> None:
    runs = evidence([0.03, 0.01, 0.02, 0.04], docs=[0.01, 0.01, 0.02, 0.02])["stages"]["runs"]
    runs |= {"baseline_memory": 2.0, "candidate_memory": 3.0, "candidate_tokens_per_s": [50.0, 50.5, 49.5, 50.0]}
    found = compare_recipes(POLICY.runs, runs, 1)
    assert found is not None and found.memory == 1.5 and found.slower.mean == pytest.approx(2.0)
    assert found.slower.lower == pytest.approx(2.0) and (found.domains["code"].mean, found.domains["docs"].mean) == (
        pytest.approx(0.025), pytest.approx(0.015))  # fmt: skip
    assert found.target.mean == pytest.approx(0.02)
    bounds = lambda of: {"mean": of.mean, "lower": of.lower, "upper": of.upper}
    assert found.to_json() == {
        "bits_per_byte": found.target.mean, "lower": found.target.lower, "upper": found.target.upper, "noise": found.noise,
        "domains": {name: bounds(of) for name, of in found.domains.items()}, "slower": found.slower.mean, "memory": 1.5,
    }  # fmt: skip
    weighted = POLICY.runs.model_copy(update={"domain_weights": {"code": 3.0, "docs": 1.0}})
    shown = compare_recipes(weighted, runs, 1)
    assert shown is not None and shown.target.mean == pytest.approx(0.0225)
    for name, value in (("baseline_memory", 0.0), ("candidate_memory", -1.0)):
        assert compare_recipes(POLICY.runs, runs | {name: value}, 1) is None
    assert compare_recipes(POLICY.runs, runs | {"candidate_tokens_per_s": [1.0, 1.0, 1.0, 0.0]}, 1) is None
    assert compare_recipes(POLICY.runs, runs | {"candidate_tokens_per_s": [1.0] * 5}, 1) is None


def test_bounds_follow_a_paired_t_test_corrected_for_the_number_of_tries() -> None:
    gains = [0.012, 0.004, 0.009, 0.007]
    found = compare_recipes(POLICY.runs, evidence(gains)["stages"]["runs"], tries=2)
    assert found is not None
    t_975_of_3 = 3.18244630528  # published tables
    reach = t_975_of_3 * float(np.std(gains, ddof=1)) / 2
    assert found.target.mean == pytest.approx(0.008)
    assert found.target.lower == pytest.approx(0.008 - reach) and found.target.upper == pytest.approx(0.008 + reach)
    assert found.noise == pytest.approx(NOISE)
    assert found.domains["docs"].lower == pytest.approx(0.008 - 2.35336343480 * float(np.std(gains, ddof=1)) / 2)


def test_a_gain_that_one_try_shows_is_not_shown_after_many() -> None:
    once = evidence([0.012, 0.004, 0.009, 0.007])
    assert judge_recipe(POLICY, once).outcome == "promote"
    assert judge_recipe(POLICY, once | {"tries": 10}).outcome == "hold"


def test_a_gain_below_the_noise_of_the_seeds_is_rejected() -> None:
    below, above = (evidence([NOISE * share] * 4) for share in (0.99, 1.01))
    assert POLICY.runs.min_gain < NOISE
    assert [judge_recipe(POLICY, found).outcome for found in (below, above)] == ["reject", "promote"]


def test_scores_that_are_equal_for_all_seeds_hold() -> None:
    same = copy.deepcopy(GOOD)
    same["stages"]["runs"]["baseline"] = [{"code": 2.0, "docs": 2.0}] * 4
    same["stages"]["runs"]["candidate"] = [{"code": 1.9, "docs": 1.9}] * 4
    verdict = judge_recipe(POLICY, same)
    assert verdict.outcome == "hold" and verdict.reasons[0].code == "recipe.no_noise"


def test_the_target_follows_the_policys_weights() -> None:
    weighted = POLICY.model_copy(
        update={"runs": POLICY.runs.model_copy(update={"domain_weights": {"docs": 1.0}, "domain_margin": 1.0})}
    )
    found = evidence([0.05] * 4, docs=[-0.02] * 4)
    verdict = judge_recipe(weighted, found)
    assert verdict.outcome == "reject" and verdict.reasons[0].code == "recipe.worse"
    of_none = POLICY.runs.model_copy(update={"domain_weights": {"elsewhere": 1.0}})
    assert compare_recipes(of_none, found["stages"]["runs"], 1) is None


HOSTILE: list[Any] = [None, math.nan, math.inf, -math.inf, "0.1", "", True, [], {}, 1e18, 1e300]


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize("place", ["score", "run", "runs", "speed", "speeds", "memory"])
def test_a_missing_or_odd_number_never_promotes(place: str, value: Any) -> None:
    for sides in (("baseline",), ("candidate",), ("baseline", "candidate")):
        _no_promotion(copy.deepcopy(GOOD), sides, place, value)


def _no_promotion(found: dict[str, Any], sides: tuple[str, ...], place: str, value: Any) -> None:
    runs = found["stages"]["runs"]
    for side in sides:
        if place == "score":
            runs[side][2]["docs"] = value
        elif place == "run":
            runs[side][2] = value
        elif place == "runs":
            runs[side] = value
        elif place == "speed":
            runs[f"{side}_tokens_per_s"][0] = value
        elif place == "speeds":
            runs[f"{side}_tokens_per_s"] = value
        else:
            runs[f"{side}_memory"] = value
        assert judge_recipe(POLICY, found).outcome == "hold"


def test_too_few_seeds_or_differing_domains_hold() -> None:
    few, lost, uneven = (copy.deepcopy(GOOD) for _ in range(3))
    runs = few["stages"]["runs"]
    few["stages"]["runs"] = {key: value[:3] if isinstance(value, list) else value for key, value in runs.items()}
    few["stages"]["runs"] |= {"state": "passed", "reasons": ["x"]}
    for run in lost["stages"]["runs"]["candidate"]:
        del run["docs"]
    uneven["stages"]["runs"]["candidate"].append({"code": 0.1, "docs": 0.1})
    for found in (few, lost, uneven):
        assert judge_recipe(POLICY, found).outcome == "hold"


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize(
    ("state", "outcome"), [("failed", "reject"), ("missing", "hold"), ("", "hold"), (None, "hold")]
)
def test_every_stage_must_have_passed(name: str, state: str | None, outcome: str) -> None:
    found = copy.deepcopy(GOOD)
    found["stages"][name]["state"] = state
    assert judge_recipe(POLICY, found).outcome == outcome
    assert judge_recipe(POLICY, found).reasons == (name,)
    found["stages"][name]["reasons"] = None
    (reason,) = judge_recipe(POLICY, found).reasons
    assert reason.code == ("gates.stage_failed" if state == "failed" else "gates.no_evidence")
    assert reason.data == {"stage": name}
    del found["stages"][name]
    assert judge_recipe(POLICY, found).outcome == "hold"


@pytest.mark.parametrize("tries", [0, -1, True, "1", None, 1.5])
def test_an_unknown_number_of_tries_holds(tries: Any) -> None:
    assert judge_recipe(POLICY, GOOD | {"tries": tries}).outcome == "hold"


@given(st.lists(st.floats(-0.1, 0.1), min_size=4, max_size=4), st.floats(0, 0.05), st.integers(1, 30))
def test_a_better_candidate_is_never_judged_worse(gains: list[float], more: float, tries: int) -> None:
    order = ["reject", "hold", "promote"]
    before, after = (
        order.index(judge_recipe(POLICY, evidence([g + by for g in gains]) | {"tries": tries}).outcome)
        for by in (0.0, more)
    )
    assert after >= before


WORDS = st.sampled_from(["state", "reasons", "passed", "failed", "baseline", "candidate", ""])


@given(st.dictionaries(st.sampled_from([*STAGES, "x"]), st.none() | st.dictionaries(WORDS, WORDS)))
def test_no_odd_evidence_promotes(stages: dict[str, Any]) -> None:
    assert judge_recipe(POLICY, {"stages": stages, "tries": 1}).outcome != "promote"


def test_the_policy_says_which_keys_may_change() -> None:
    assert (
        POLICY.allows_change_of_key("optimizer.lr")
        and POLICY.allows_change_of_key("mixture.weights.code")
        and POLICY.allows_change_of_key("mixture.weights")
    )
    closed = (
        "model.d_model",
        "seed",
        "optimizer.name",
        "mixture.max_epochs",
        "mixture.weightsx",
        "precision",
        "mixture",
    )
    assert not any(POLICY.allows_change_of_key(key) for key in closed)


def test_a_policy_with_a_wrong_key_names_the_nearest(tmp_path: Any) -> None:
    (tmp_path / "recipe.yaml").write_text("changes: [optimizer.lr]\nruns: {seedz: 4}\n")
    with pytest.raises(ConfigError, match="did you mean 'seeds'"):
        RecipePolicy.load(tmp_path / "recipe.yaml")
