"""The gate counts the comparisons with one champion, and adds up the losses along the line of releases."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from factory.core.errors import InputError
from factory.core.workspace import Workspace
from factory.diagnosis.remedies import accept_diagnosis
from factory.evals.evaluator import load_current_suite
from factory.evals.statistics import Gain
from factory.gates.release.evidence import ReleaseEvidence
from factory.gates.release.gate import judge_candidate
from factory.gates.release.overfitting import find_gain_on_dev_half_only
from factory.gates.release.policy import ReleasePolicy
from factory.gates.release.release_line import compute_guard_losses_since_best_release, find_ordinal_of_comparison
from factory.gates.release.reward_hacking import (
    JudgedCandidate,
    add_dev_only_gain_evidence,
    compute_gain_between_candidates,
)
from factory.ledger.anomalies import GAIN_ON_DEV_ONLY, list_anomalies
from factory.ledger.ledger import Ledger, eval_items, releases, verdicts
from factory.ledger.plant import Plant
from factory.ledger.rows import VerdictRow
from factory.ledger.status import _anomaly_lines
from tests.support.factory.exports import save_export, tiny_model
from tests.support.messages import codes
from tests.support.plants.release_scene import add_candidate, add_verdict
from tests.support.plants.released_plant import evaluated, released_plant


def judged(
    ledger: Ledger, candidate: int, suite: str, against: int | None, gains: dict[str, float] | None = None
) -> int:
    number = add_verdict(ledger, candidate, against=against)
    guards = {name: {"gain": gain} for name, gain in (gains or {}).items()}
    with ledger.begin() as tx:
        evidence = {"suite_sha256": suite, "guards": guards}
        tx.execute(verdicts.update().where(verdicts.c.id == number).values(evidence=evidence))
    return number


def released(ledger: Ledger, number: int, candidate: int, verdict: int) -> None:
    with ledger.begin() as tx:
        tx.execute(
            releases.insert().values(
                number=number, candidate=candidate, verdict=verdict, state="published", approved_by="policy", created_at=float(number)
            )
        )  # fmt: skip


def test_each_pair_of_candidate_and_suite_counts_as_one_comparison(workspace: Workspace, ledger: Ledger) -> None:
    first, second, third = (add_candidate(workspace, ledger) for _ in range(3))
    assert find_ordinal_of_comparison(ledger, first, second, "a") == 1
    judged(ledger, second, "a", first)
    assert find_ordinal_of_comparison(ledger, first, second, "a") == 1  # the same look, judged again
    assert (
        find_ordinal_of_comparison(ledger, first, second, "b")
        == find_ordinal_of_comparison(ledger, first, third, "a")
        == 2
    )
    judged(ledger, third, "b", first)
    judged(ledger, third, "b", first)  # by another policy
    assert (
        find_ordinal_of_comparison(ledger, first, third, "b") == 2
        and find_ordinal_of_comparison(ledger, first, second, "b") == 3
    )
    assert find_ordinal_of_comparison(ledger, second, third, "b") == 1  # another champion


def test_small_losses_add_up_from_the_best_release(workspace: Workspace, ledger: Ledger) -> None:
    line = [add_candidate(workspace, ledger) for _ in range(4)]
    gains = [None, {"code": 0.1, "docs": -0.01}, {"code": -0.02, "docs": -0.01}, {"code": -0.01, "docs": 0.05}]
    for number, (candidate, gained) in enumerate(zip(line, gains), 1):
        against = line[number - 2] if number > 1 else None
        released(ledger, number, candidate, judged(ledger, candidate, "a", against, gained))
    lost = compute_guard_losses_since_best_release(ledger, line[-1], ["code", "docs", "new"])
    assert lost == pytest.approx({"code": 0.03, "docs": 0.0, "new": 0.0})
    assert compute_guard_losses_since_best_release(ledger, line[2], ["docs"]) == pytest.approx(
        {"docs": 0.02}
    )  # made champion again


def test_a_rolled_back_release_does_not_count(workspace: Workspace, ledger: Ledger) -> None:
    first, second, third, fourth = (add_candidate(workspace, ledger) for _ in range(4))
    released(ledger, 1, first, judged(ledger, first, "a", None))
    released(ledger, 2, second, judged(ledger, second, "a", first, {"code": -0.018, "docs": 0.1}))
    assert compute_guard_losses_since_best_release(ledger, second, ["code", "docs"]) == pytest.approx(
        {"code": 0.018, "docs": 0.0}
    )
    assert compute_guard_losses_since_best_release(ledger, first, ["code", "docs"]) == {
        "code": 0.0,
        "docs": 0.0,
    }  # a rollback to 1
    released(ledger, 3, third, judged(ledger, third, "a", first, {"code": 0.001, "docs": -0.01}))
    assert compute_guard_losses_since_best_release(ledger, third, ["code", "docs"]) == pytest.approx(
        {"code": 0.0, "docs": 0.01}
    )
    released(ledger, 4, fourth, judged(ledger, fourth, "a", second, {"code": 0.02}))
    assert compute_guard_losses_since_best_release(ledger, second, ["code"]) == pytest.approx(
        {"code": 0.018}
    )  # 4 regained it: a rollback to 2


def test_small_gains_on_the_dev_half_alone_are_added_up_and_noticed(workspace: Workspace, ledger: Ledger) -> None:
    """Candidates 2 to 7 against champion 1: each gains a little more on dev than the one before, and nothing on sealed."""
    policy = ReleasePolicy()
    line = [add_candidate(workspace, ledger) for _ in range(7)]
    judged(ledger, line[0], "a", None)
    found = []
    for number, candidate in enumerate(line[1:]):
        dev, sealed = Gain(0.01 * number, 0.002, 40, 40.0), Gain(0.0, 0.002, 40, 40.0)
        gap = Gain(-0.01 * number, 0.003, 80, 80.0)
        before = ReleaseEvidence(on_dev=dev, on_sealed=sealed, halves_gap=gap)
        seen = add_dev_only_gain_evidence(ledger, candidate, line[0], before)
        found.append(
            (seen.watched, seen.rise_since, bool(find_gain_on_dev_half_only(policy, replace(seen, halves_gap=None))))
        )
        verdict = judged(ledger, candidate, "a", line[0])
        evidence = {"on_dev": vars(dev), "on_sealed": vars(sealed), "halves_gap": vars(gap)}
        with ledger.begin() as tx:
            tx.execute(verdicts.update().where(verdicts.c.id == verdict).values(evidence=evidence))
    assert [watched for watched, _, _ in found] == [1, 2, 3, 4, 5, 6]
    assert [hacked for _, _, hacked in found] == [False, False, False, True, True, True]
    assert found[-1][1] in (line[0], line[1])


def test_gains_along_the_line_of_champions_add_up_with_their_errors() -> None:
    """Their gains and the squares of their errors; degrees of freedom by Welch and Satterthwaite."""
    at = lambda number, against, *of: JudgedCandidate(number, against, {"on_dev": Gain(*of)})
    line = [
        at(2, 1, 0.01, 0.003, 20, 20.0),
        at(3, 1, 0.0, 0.004, 10, 10.0),
        at(4, 3, 0.05, 0.0, 5, 5.0),
        at(9, 8, 0.5, 0.1, 9, 9.0),
    ]
    rise = compute_gain_between_candidates(line[0], line[2], line)["on_dev"]  # 4 over 3 and 3 over 1, less 2 over 1
    assert (rise.gain, rise.error, rise.clusters) == (pytest.approx(0.04), pytest.approx(0.005), 35)
    assert rise.effective == pytest.approx(25e-6**2 / (9e-6**2 / 19 + 16e-6**2 / 9) + 1)
    still = compute_gain_between_candidates(line[1], line[2], line)["on_dev"]
    assert still == Gain(0.05, 0.0, 5, math.inf), "no spread at all"
    assert compute_gain_between_candidates(line[3], line[2], line)["on_dev"] == Gain(), "no common champion is known"
    few = [*line[:2], at(4, 3, 0.05, 0.002, 1, 1.0)]
    assert compute_gain_between_candidates(few[0], few[2], few)["on_dev"] == Gain(), (
        "one group has no spread that is known"
    )


def test_a_candidate_fitted_to_the_dev_half_is_held_and_recorded_as_an_anomaly(tmp_path: Path) -> None:
    plant = released_plant(tmp_path)
    suite = load_current_suite(Plant(plant.workspace, plant.ledger))
    export = save_export(tiny_model(3), plant.workspace.exports / "fitted", plant.tokenizer)
    candidate = plant.add_candidate(export)
    evaluated(plant, candidate, 2.6)
    sealed = {document.key for document in suite.documents}
    with plant.ledger.begin() as tx:  # on the sealed half it is only 0.05 bits per byte better than the champion
        own = (eval_items.c.evaluation == candidate) & (eval_items.c.task == "bpb") & eval_items.c.item.in_(sealed)
        tx.execute(
            eval_items.update().where(own).values(value=eval_items.c.value + 0.15 * math.log(2) * eval_items.c.weight)
        )
    number = judge_candidate(Plant(plant.workspace, plant.ledger), candidate)
    verdict = VerdictRow.get(plant.ledger, number)
    assert verdict.outcome == "hold" and "release.dev_alone" in codes(verdict.reasons), verdict.reasons
    rows = [row for row in list_anomalies(plant.ledger) if row["kind"] == GAIN_ON_DEV_ONLY]
    assert [row["state"] for row in rows] == ["open"]
    assert judge_candidate(Plant(plant.workspace, plant.ledger), candidate) == number
    assert len(list_anomalies(plant.ledger)) == 1
    lines = _anomaly_lines({"anomalies": list_anomalies(plant.ledger), "marked_releases": []})
    assert any(f"anomaly {rows[0]['id']} {GAIN_ON_DEV_ONLY}" in line for line in lines), lines
    assert accept_diagnosis(plant.ledger, rows[0]["id"], "ada").code == "diagnosis.noted"
    assert [(row["state"], row["how"]) for row in list_anomalies(plant.ledger)] == [("closed", "accepted")]
    with pytest.raises(InputError, match="is closed: accepted by ada"):
        accept_diagnosis(plant.ledger, rows[0]["id"], "ada")
    assert judge_candidate(Plant(plant.workspace, plant.ledger), candidate) == number
