"""The release judge: a table of evidence and verdicts."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from factory.core.errors import ConfigError
from factory.evals.probes.checks import CHECKS
from factory.evals.statistics import CLOZE, Gain
from factory.gates.release.evidence import ReleaseEvidence
from factory.gates.release.guards import count_groups_to_show_no_loss, list_unreliable_guards, make_promotion_bounds
from factory.gates.release.judge import judge
from factory.gates.release.policy import ReleasePolicy, TargetPolicy
from factory.gates.release.reasons import are_reasons_overridable, is_to_do_line
from factory.tasks.comparing import TaskEvidence
from tests.support.gates.reasons import Expected, expect, has, tells
from tests.support.gates.release_evidence import DOMAINS, FIRST, POLICY, changed, evidence, gain
from tests.support.messages import codes


def small(cloze: Gain | None = None) -> ReleaseEvidence:
    """Better, with 24 cloze items, which hold too many of equally good models."""
    base = replace(evidence(), cloze_items=24)
    return replace(base, guards={**base.guards, "cloze": cloze or Gain(0.0, None, None, None)})


def said(code: str, /, **data: Any) -> Expected:
    return expect(f"release.{code}", **data)


CASES = [
    ("promote", FIRST, said("first_release")),
    ("reject", changed(FIRST, "bits_per_byte", "code", 2.7), said("above_trigram", domain="code", bits_per_byte=2.7, trigram=2.6, least=0.0)),
    ("reject", changed(FIRST, "bits_per_byte", "code", 4.5), said("above_ceiling", domain="code", bits_per_byte=4.5, most=4.0)),
    ("hold", changed(FIRST, "trigram_bits_per_byte", "docs", None), said("trigram_unknown", domain="docs")),
    ("hold", changed(FIRST, "documents", "docs", 3), said("few_documents", domain="docs", documents=3, least=8)),
    ("promote", replace(FIRST, trained_on={"code": 0.97, "law": 0.03}),
     said("unguarded", shares={"law": 0.03}, named=["law 3.0%"])),
    ("promote", replace(evidence(), trained_on={"law": 0.6, "code": 0.4}), said("unguarded", shares={"law": 0.6}, named=["law 60.0%"])),
    ("hold", replace(evidence(), trained_on={"law": 0.03}, anomalies=None), said("unguarded", shares={"law": 0.03})),
    ("promote", replace(evidence(), trained_on={f"d{n}": 0.1 for n in range(8)}),
     said("unguarded", named=[*(f"d{n} 10.0%" for n in range(5)), "3 more"])),
    ("reject", changed(FIRST, "checks", "stop", (False, "ran on")), said("check_failed", check="stop", detail="ran on")),
    ("hold", changed(FIRST, "checks", "smoke", (None, "no end after 600 s")), said("check_not_made", check="smoke", detail="no end after 600 s")),
    ("hold", ReleaseEvidence(), said("no_champion")),
    ("hold", replace(evidence(), releasable=None), said("licences_unknown")),
    ("hold", replace(evidence(), releasable=float("nan")), said("licences_unknown")),
    ("hold", replace(evidence(), releasable=1.5), said("licences_unknown")),
    ("hold", replace(evidence(), releasable=0.575, not_releasable={"CC-BY-NC-4.0": 0.3, "no licence": 0.125}),
     said("licences", share=0.425, most=0.0, named=["CC-BY-NC-4.0 30.0%", "no licence 12.5%"])),
    ("hold", replace(evidence(), releasable=0.5, not_releasable={"no licence": 0.5}, disputed=0.25),
     said("licences_disputed", share=0.25)),
    ("hold", replace(evidence(), anomalies=("loss_spike at step 4 of segment 2 (anomaly 1)",)),
     said("anomaly", anomaly="loss_spike at step 4 of segment 2 (anomaly 1)")),
    ("hold", replace(evidence(), anomalies=None), said("anomalies_unknown")),
    ("promote", evidence(), said("better", champion="candidate 1")),
    ("hold", evidence(target=0.005), said("not_better", champion="candidate 1")),
    ("reject", evidence(target=-0.05), said("worse", champion="candidate 1")),
    ("hold", evidence(code=-0.015), said("guard_not_shown", guard="code", guards=4)),
    ("promote", evidence(code=-0.005), said("guard_shown", name="code", before=1.92, after=1.84, change=0.005)),
    ("reject", evidence(code=-0.05), said("guard_violated", guard="code", loss=0.02)),
    ("reject", evidence(cloze=-0.2), said("guard_violated", guard="cloze", loss=0.15)),
    ("hold", replace(evidence(target=0.011), look=2), said("not_better", champion="candidate 1")),  # the first look would have shown it
    ("promote", evidence(target=0.011),
     said("detects_gain_beside_cloze", power=0.8, look=1, level=0.025, groups=40.0)),
    ("hold", changed(evidence(), "guards", "cloze", gain(0.05, 0.3) ),  # wide by what the candidate changed: that sets nothing aside
     said("guard_not_shown", guard="cloze", before=0.55, after=0.6)),
    ("hold", changed(evidence(), "guards", "cloze", Gain()), said("guard_not_compared", guard="cloze", why="release.groups_unknown")),
    ("hold", changed(evidence(), "guards", "code", Gain()), said("detects_no_gain", why="release.bound_unknown", guard="code", look=1)),
    ("hold", small(), said("guard_not_compared", guard="cloze")),
    ("promote", small(cloze=gain(-0.05, 0.2, 20)), said("aside", guard="cloze", items=24, most=20.0)),
    ("hold", small(cloze=gain(-0.2, 0.2, 20)), said("guard_loss_measured", guard="cloze", low=-0.407, high=0.007, margin=0.15)),
    ("reject", small(cloze=gain(-0.3, 0.1, 20)), said("guard_violated", guard="cloze", before=0.55, after=0.6, change=-0.3)),
    ("reject", replace(small(cloze=gain(-0.3, 0.1, 20)), target=gain(0.001)), said("aside", guard="cloze", items=24)),
    ("promote", small(cloze=gain(-0.3, 0.1, clusters=3)), said("aside_few_groups", guard="cloze", items=24, groups=3, least=8)),
    ("promote", small(cloze=Gain(0.0, math.nan, 1, 1.0)), said("aside_few_groups", guard="cloze", items=24, groups=1, least=8)),
    ("hold", small(cloze=Gain(0.0, None, 24, 24.0)), said("guard_not_compared", guard="cloze", why="release.number_unknown")),
    ("hold", changed(evidence(), "guards", "code", Gain(0.05, math.nan, 1, 1.0)), said("guard_few_groups", guard="code", why="release.one_group")),
    ("promote", replace(evidence(), replicas=3, replica_target=0.004),
     said("gain_beyond_order", noise=0.004, runs=3)),
    ("promote", replace(evidence(target=0.02), replicas=3, replica_target=0.02), said("gain_within_order", noise=0.02, runs=3)),
    ("promote", replace(evidence(code=-0.015), replicas=3, replica_noise={"code": 0.015}, replica_target=0.001), said("guard_shown", name="code")),
    ("hold", replace(evidence(code=-0.035), replicas=3, replica_noise={"code": 9.0}, replica_target=0.001),
     said("guard_not_shown", guard="code", loss=0.04)),
    ("reject",
     replace(changed(evidence(code=-0.015), "lost", "code", 0.04), replicas=3, replica_noise={"code": 0.015}),
      # replicas' noise is granted once in a line, not to each release
     said("guard_violated", guard="code", loss=0.002, lost=0.04)),
    ("reject", replace(evidence(target=-0.05), replicas=3, replica_noise={"chat": 0.004, "code": 0.015, "docs": math.nan}),
     said("noise", runs=3, named=["chat 0.0040", "code 0.0150", "docs ?"])),
    ("hold", replace(evidence(), champion_failed={"finite_loss": "1 of 60 documents have no finite loss, first a:7"}),
     said("champion_failed", champion="candidate 1", check="finite_loss", detail="1 of 60 documents have no finite loss, first a:7")),
    ("hold", replace(evidence(), watched=None), said("line_unknown")),
    ("hold", replace(evidence(), watched=4, rise_since=7, rise_dev=gain(0.1), rise_sealed=gain(0.01), rise_gap=gain(-0.09)),
     said("dev_alone", since="candidate 7", dev=0.1, sealed=0.01)),
    ("promote", replace(evidence(), watched=4, rise_since=7, rise_dev=gain(0.1), rise_sealed=gain(0.09), rise_gap=gain(-0.01)),
     said("better", champion="candidate 1")),
    ("hold", replace(evidence(), look=None), said("look_unknown", champion="candidate 1")),
    ("hold", changed(evidence(code=-0.005), "lost", "code", 0.015), said("guard_not_shown", guard="code", loss=0.005, lost=0.015)),
    ("hold", changed(evidence(), "lost", "code", None), said("lost_unknown", guard="code")),
    ("hold", changed(evidence(), "noise_floor", "code", 0.5), said("noise_floor", domain="code", noise=0.5, most=0.02)),
    ("promote", changed(evidence(code=-0.015), "noise_floor", "code", 0.0199), said("guard_shown", name="code")),  # delta is twice the noise floor
    ("hold", changed(evidence(), "guards", "code", gain(0.05, clusters=3)), said("guard_few_groups", guard="code", groups=3, least=8)),
    ("hold", replace(evidence(), target=gain(math.nan)), said("target_not_measured", why="release.number_unknown")),
    ("hold", replace(evidence(), target=None), said("target_not_measured", why="release.no_common_items")),
    ("hold", replace(evidence(target=0.64), on_dev=gain(0.01), halves_gap=gain(0.63)),
     said("sealed_seen", sealed=0.64, dev=0.01)),
    ("hold", replace(evidence(), on_dev=gain(0.2), halves_gap=gain(-0.12)),
     said("dev_fitted", dev=0.2)),
    ("promote", replace(evidence(), halves_gap=gain(0.03, 0.05)), said("better", champion="candidate 1")),
    ("hold", replace(evidence(), halves_gap=None), said("halves_not_compared")),
    ("hold", replace(evidence(), on_fresh=gain(-0.1), fresh_gap=gain(-0.18)),
     said("by_heart", fresh=-0.1, older=0.08)),
    ("promote", replace(evidence(target=0.3), on_sealed=gain(0.3), on_dev=gain(0.3), on_fresh=gain(0.1), fresh_gap=gain(-0.2)),
     said("better", champion="candidate 1")),
    ("promote", replace(evidence(), on_fresh=None, fresh_gap=None, fresh_documents=3), said("better", champion="candidate 1")),
    ("hold", replace(evidence(), sealed_looks=None), said("looks_unknown")),
    ("hold", replace(evidence(), sealed_looks=200.0),
     said("sealed_spent", looks=200.0, most=200.0)),
    ("reject", changed(evidence(), "checks", "logits", (False, "0.3 apart")), said("check_failed", check="logits")),
    ("hold", changed(evidence(), "checks", "new", (True, "")), said("check_unknown", check="new")),
    ("hold", replace(evidence(), checks={}), said("checks_missing", missing=len(CHECKS), known=len(CHECKS), checks=sorted(CHECKS))),
    # borders
    ("promote", replace(evidence(), sealed_looks=0.0), said("better", champion="candidate 1")),
    ("promote", replace(evidence(), sealed_looks=199.9), said("better", champion="candidate 1")),
    ("hold", replace(evidence(), sealed_looks=-0.1), said("looks_unknown")),
    ("promote", replace(FIRST, documents=dict.fromkeys(DOMAINS, 8)), said("first_release")),
    ("hold", replace(FIRST, documents=dict.fromkeys(DOMAINS, 7)), said("to_do", domain="chat", more=1)),
    ("hold", replace(FIRST, domains=()), said("no_domain")),
    ("hold", changed(FIRST, "documents", "law", 9), said("other_domain", domain="law")),
    ("hold", changed(FIRST, "bits_per_byte", "law", 2.0), said("other_domain", domain="law")),
    ("hold", changed(FIRST, "bits_per_byte", "code", None), said("bits_per_byte_unknown", domain="code")),
    ("hold", changed(FIRST, "documents", "code", None), said("documents_unknown", domain="code")),
    ("hold", replace(FIRST, cloze_items=None), said("cloze_unknown")),
    ("hold", replace(evidence(), releasable=-0.1), said("licences_unknown")),
    ("hold", replace(evidence(), releasable=0.0), said("licences", share=1.0)),
    ("reject", changed(FIRST, "bits_per_byte", "code", 2.6), said("above_trigram", change=0.0)),
    ("reject", changed(changed(FIRST, "bits_per_byte", "code", 4.01), "trigram_bits_per_byte", "code", 9.0),
     said("above_ceiling", bits_per_byte=4.01, most=4.0)),
    ("promote", changed(changed(FIRST, "bits_per_byte", "code", 4.0), "trigram_bits_per_byte", "code", 9.0), said("first_release")),
    ("hold", replace(evidence(), look=0), said("look_unknown", champion="candidate 1")),
    ("hold", replace(evidence(), fresh_documents=None), said("fresh_unknown")),
    ("hold", replace(evidence(), older_documents=None), said("fresh_unknown")),
    ("hold", replace(evidence(), on_fresh=None, fresh_documents=8), said("fresh_not_compared", documents=8)),
    ("promote", replace(evidence(), on_fresh=None, older_documents=7), said("better", champion="candidate 1")),
    ("hold", replace(evidence(), on_sealed=None), said("halves_not_compared")),
    ("hold", replace(evidence(), on_dev=None), said("halves_not_compared")),
    ("hold", changed(evidence(), "guards", "law", gain(0.1)), said("guard_unknown", guard="law")),
    ("hold", changed(evidence(), "noise_floor", "code", None), said("noise_unknown", domain="code")),
    ("promote", changed(evidence(), "noise_floor", "code", 0.0), said("better", champion="candidate 1")),
    ("hold", changed(evidence(), "lost", "code", -0.1), said("lost_unknown", guard="code")),
    ("hold", replace(evidence(), champion_bits_per_byte={}), said("guard_not_compared", guard="code", why="release.number_unknown")),
    ("promote", replace(evidence(), replicas=1, replica_target=0.004), said("order_unknown")),
    ("promote", replace(evidence(), replicas=2, replica_target=0.0), said("gain_beyond_order", runs=2, noise=0.0)),
    ("hold", evidence(target=0.0), said("to_do", remedy="release.remedy_no_gain", known="release.detects")),
    ("hold", replace(evidence(), target=gain(0.08, clusters=7)), said("target_few_groups", groups=7, least=8)),
    ("promote", replace(evidence(), target=gain(0.08, clusters=8)), said("better", champion="candidate 1")),
    ("hold", replace(evidence(), releasable=True), said("licences_unknown")),
    ("hold", replace(evidence(), sealed_looks=True), said("looks_unknown")),
    ("promote", replace(evidence(), halves_gap=Gain(-0.02, 0.0, 40, 40.0)), said("better", champion="candidate 1")),
    ("promote", replace(evidence(), halves_gap=Gain(0.02, 0.0, 40, 40.0)), said("better", champion="candidate 1")),
    ("promote", replace(evidence(), halves_gap=gain(0.07, 0.0404)), said("better", champion="candidate 1")),  # at 1 %, both ends together
    ("promote", replace(evidence(), halves_gap=gain(-0.07, 0.0404)), said("better", champion="candidate 1")),
    ("promote", replace(evidence(), on_fresh=gain(-0.1), fresh_gap=gain(-0.15, 0.0404)), said("better", champion="candidate 1")),
    ("promote", replace(evidence(), on_fresh=gain(-0.1), fresh_gap=Gain(-0.1, 0.0, 40, 40.0)), said("better", champion="candidate 1")),
    ("hold", replace(evidence(), on_fresh=Gain(0.0, 0.0, 40, 40.0), fresh_gap=gain(-0.3)), said("by_heart")),
    ("hold", replace(evidence(), on_fresh=gain(0.05, 0.0404), fresh_gap=gain(-0.3)), said("by_heart")),
    ("promote",
     replace(evidence(), watched=4, rise_since=7, rise_dev=gain(0.1), rise_sealed=gain(0.0), rise_gap=gain(-0.08, 0.0404) ),
      # 1 % is shared by the four
     said("better", champion="candidate 1")),
    ("promote", replace(evidence(), watched=1, rise_since=7, rise_dev=gain(0.02), rise_sealed=gain(0.0), rise_gap=Gain(-0.02, 0.0, 40, 40.0)),
     said("better", champion="candidate 1")),
    ("hold", replace(evidence(), target=Gain(0.0, 0.0, 40, 40.0)), said("not_better", champion="candidate 1")),
    ("promote", changed(evidence(), "noise_floor", "code", 0.02), said("better", champion="candidate 1")),
    ("hold", changed(evidence(), "noise_floor", "code", -0.1), said("noise_unknown", domain="code")),
    ("hold", changed(evidence(), "guards", "code", Gain(-0.02, 0.0, 40, 40.0)), said("guard_not_shown", guard="code", guards=4)),
]  # fmt: skip


@pytest.mark.parametrize(("outcome", "given_", "expected"), CASES)
def test_each_evidence_gets_its_outcome_and_reason(outcome: str, given_: ReleaseEvidence, expected: Expected) -> None:
    verdict = judge(POLICY, given_)
    assert verdict.outcome == outcome, verdict.reasons
    assert tells(verdict.reasons, expected), [reason.to_json() for reason in verdict.reasons]
    assert judge(POLICY, copy.deepcopy(given_)) == verdict


def test_the_judge_is_pure_and_each_reason_has_a_code_of_its_own() -> None:
    given = [*(one for _, one, _ in CASES), *NOT_BY_A_PERSON.values()]
    judged = [(POLICY, replace(one, candidate=7), None) for one in given]
    judged += [
        (POLICY, replace(one, anomalies=None, releasable=None), None) for one in given
    ]  # where others are missing, too
    judged += [(policy, evidence(), None) for policy in OTHER_POLICIES]
    judged += [
        (POLICY, one, task) for one in (evidence(), evidence(code=-0.05), evidence(target=0.005)) for task in TASKS
    ]
    for policy, one, task in judged:
        verdict, again = (judge(policy, copy.deepcopy(one), task) for _ in range(2))
        assert [reason.to_json() for reason in verdict.reasons] == [reason.to_json() for reason in again.reasons]
        assert all(reason.code for reason in verdict.reasons if not reason.startswith("Task "))
        assert json.dumps([reason.to_json() for reason in verdict.reasons], allow_nan=False)


def test_messages_show_the_change_not_the_gain() -> None:
    reasons = judge(POLICY, changed(evidence(), "guards", "code", gain(0.08, 0.02))).reasons
    change = next(one.data["change"] for one in reasons if has(one, "name", "code"))
    assert [change.data[name] for name in ("change", "low", "high")] == pytest.approx([-0.08, -0.1, -0.06], abs=5e-4)
    assert "1.920 → 1.840" in change and "(change −0.080, " in change


def test_a_target_domain_without_held_out_documents_holds_the_candidate() -> None:
    verdict = judge(ReleasePolicy(target=TargetPolicy(weights={"law": 1.0})), evidence())
    assert verdict.outcome == "hold" and verdict.reasons[0].code == "release.to_do"
    assert verdict.reasons[0].data["remedy"].code == "release.remedy_target_domain"
    assert has(verdict.reasons[0], "domain", "law")


@pytest.mark.parametrize("given_", [given_ for outcome, given_, _ in CASES if outcome == "hold"])
def test_the_reasons_of_a_hold_begin_with_the_remedies(given_: ReleaseEvidence) -> None:
    verdict = judge(POLICY, replace(given_, candidate=7))
    held_by = verdict.found.missing
    todo = [reason for reason in verdict.reasons if is_to_do_line(reason)]
    assert todo and list(verdict.reasons[: len(todo)]) == todo and todo[0].code == "release.to_do"
    assert "'factory " in " ".join(todo) or "gates/release.yaml" in " ".join(todo)
    assert ("release.override" in codes(todo)) == are_reasons_overridable(held_by)
    if are_reasons_overridable(held_by):
        assert todo[-1].data["candidate"] == 7 and "releases override 7 --reason" in todo[-1]
        remedies = codes(one.data["remedy"] for one in todo[:-1])
        assert "release.remedy_evaluate" not in remedies, "the same items say the same"


TASKS = [
    TaskEvidence({"t/acc": one}, {"t/acc": 0.1}, items={"t/acc": 400}, variances={"t/acc": 0.25})
    for one in (gain(0.05), gain(-0.1, 0.05), gain(-0.3), Gain(0.0, None, 40, 40.0))
] + [TaskEvidence.from_problem("Task t: it was not measured.", "mend it.")]
OTHER_POLICIES = [
    ReleasePolicy(target=TargetPolicy(weights={"law": 1.0, "notes": 0.0})),
    ReleasePolicy(target=TargetPolicy(alpha=0.001)),
    ReleasePolicy(clusters_min=41),
]
NOT_BY_A_PERSON = {
    "check_not_made": changed(evidence(), "checks", "smoke", (None, "no end after 600 s")),
    "licences": replace(evidence(), releasable=0.5, not_releasable={"no licence": 0.5}),
    "licences_unknown": replace(evidence(), releasable=None),
    "anomaly": replace(evidence(), anomalies=("loss_spike at step 4 of segment 2 (anomaly 1)",)),
    "sealed_seen": replace(evidence(target=0.64), on_dev=gain(0.01), halves_gap=gain(0.63)),
    "halves_not_compared": replace(evidence(), halves_gap=None),
    "sealed_spent": replace(evidence(), sealed_looks=200.0),
    "look_unknown": replace(evidence(), look=None),
}


@pytest.mark.parametrize("code", NOT_BY_A_PERSON)
def test_some_reasons_cannot_be_overridden_by_a_person(code: str) -> None:
    found = judge(POLICY, NOT_BY_A_PERSON[code]).found.missing
    assert f"release.{code}" in [reason.code for reason in found] and not are_reasons_overridable(found)
    beside = judge(POLICY, replace(NOT_BY_A_PERSON[code], target=gain(0.005))).found.missing
    assert not are_reasons_overridable(beside), "nor where something else holds it too"


def test_a_remedy_names_the_number_of_document_groups_that_are_needed() -> None:
    remedy = lambda given_: judge(POLICY, given_).reasons[0].data["remedy"]
    bring = remedy(evidence(target=0.005))
    assert bring.code == "release.remedy_train_on_or_bring" and bring.data["times"] > 1 and bring.data["gain"] == 0.005
    lost = remedy(evidence(code=-0.015))
    assert lost.code == "release.remedy_domain" and lost.data["domain"] == "code"
    few = remedy(changed(evidence(), "guards", "code", gain(0.0, 0.05, 8)))
    assert few.code == "release.remedy_groups" and has(few, "groups", 8) and few.data["more"].data["needed"] > 8
    assert "--domain code --group document" in few


@pytest.mark.parametrize("width", [0.0, 0.05, 0.15, 0.5, 2.0, 1e6])
@pytest.mark.parametrize("middle", [-0.4, -0.1, 0.0, 0.3])
def test_a_candidate_that_changes_many_items_sets_no_guard_aside(middle: float, width: float) -> None:
    for items, stands in ((24, False), (96, True)):
        given_ = replace(changed(evidence(), "guards", "cloze", gain(middle, width, 20)), cloze_items=items)
        assert (CLOZE in list_unreliable_guards(POLICY, given_)) is not stands
        assert make_promotion_bounds(POLICY, given_).guards.keys() == {*DOMAINS, *([CLOZE] if stands else [])}
    told = judge(POLICY, given_)
    assert (told.outcome == "promote") == (middle - 1.729 * width / 2.02 > -0.15), (
        told.reasons
    )  # t of 19 degrees of freedom


@pytest.mark.parametrize("given_", [evidence(), small(gain(0.0, 0.1, 20)), FIRST])
def test_bits_per_byte_of_a_domain_are_never_set_aside(given_: ReleaseEvidence) -> None:
    for groups in (1, 2, 8, 40):
        few = replace(given_, guards=given_.guards | dict.fromkeys(DOMAINS, gain(0.0, 0.5, groups)))
        assert not set(list_unreliable_guards(POLICY, few)) & set(DOMAINS)


def test_earlier_losses_set_no_guard_aside() -> None:
    """Else a line of releases that each lose a little would take the guard away that counts them."""
    lost = changed(replace(evidence(), cloze_items=96), "lost", "cloze", 0.149)
    assert (
        not list_unreliable_guards(POLICY, lost)
        and judge(POLICY, changed(lost, "guards", "cloze", gain(-0.003))).outcome == "hold"
    )


def test_the_policy_refuses_a_minimum_of_one_document_group(tmp_path: Path) -> None:
    assert ReleasePolicy(clusters_min=2).clusters_min == 2
    (tmp_path / "release.yaml").write_text("clusters_min: 1\n")
    with pytest.raises(ConfigError, match="key 'clusters_min'") as error:
        ReleasePolicy.load(tmp_path / "release.yaml")
    assert "at least 2" in str(error.value) and "\n" not in str(error.value)


def test_only_domains_that_the_candidate_was_trained_on_are_reported_as_unguarded() -> None:
    for trained_on in ({}, dict.fromkeys(DOMAINS, 1 / 3), {"law": 0.0}, {"law": None}, {"law": math.nan}):
        verdict = judge(POLICY, replace(evidence(), trained_on=trained_on))
        assert verdict == judge(POLICY, evidence()), "and older evidence is judged as it was"


@pytest.mark.parametrize(
    ("groups", "error", "floor", "needed"),
    [(8.0, 0.015, -0.02, 31), (1.0, 0.015, -0.02, None), (0.5, 0.015, -0.02, None), (1.5, 0.015, -0.02, 9), (8.0, 0.0, -0.02, 1),
     (8.0, 0.015, 0.0, None), (8.0, None, -0.02, None), (None, 0.015, -0.02, None)],
)  # fmt: skip
def test_the_number_of_groups_that_show_no_loss_is_computed(
    groups: float | None, error: float | None, floor: float, needed: int | None
) -> None:
    assert count_groups_to_show_no_loss(Gain(0.0, error, 8, groups), 0.05, floor) == needed
