"""The judge: a table of cases."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest

from factory.evals.statistics import Gain
from factory.gates.release.evidence import ReleaseEvidence
from factory.gates.release.judge import judge
from factory.gates.release.policy import ReleasePolicy, Target
from tests.support.gates.release_evidence import DOMAINS, FIRST, POLICY, changed, evidence, gain

CASES = [
    ("promote", FIRST, "first release"),
    (
        "reject",
        changed(FIRST, "bits_per_byte", "code", 2.7),
        "code: 2.700 bits per byte, byte trigram 2.600 (+0.100): it must be below.",
    ),
    ("reject", changed(FIRST, "bits_per_byte", "code", 4.5), "above the ceiling"),
    ("hold", changed(FIRST, "trigram_bits_per_byte", "docs", None), "docs: the byte-trigram baseline was not measured"),
    ("hold", changed(FIRST, "documents", "docs", 3), "docs: 3 held-out documents, at least 8 are needed"),
    (
        "hold",
        changed(FIRST, "documents", "docs", 3),
        "If none will come, take it out of the suite: 'factory data remove --document ID' for each of them, or '--source NAME'",
    ),
    (
        "promote",
        replace(FIRST, trained_on={"code": 0.97, "law": 0.03}),
        "Not guarded: law (3.0% of the supervised tokens): trained on, and no sealed document is held out",
    ),
    ("promote", replace(evidence(), trained_on={"law": 0.6, "code": 0.4}), "Not guarded: law (60.0% of the supervised"),
    ("hold", replace(evidence(), trained_on={"law": 0.03}, anomalies=None), "Not guarded: law (3.0%"),
    (
        "promote",
        replace(evidence(), trained_on={f"d{n}": 0.1 for n in range(8)}),
        "d4 (10.0%) and 3 more: trained on, and no sealed document is held out",
    ),
    ("reject", changed(FIRST, "checks", "stop", (False, "ran on")), "Check stop failed: ran on."),
    ("hold", changed(FIRST, "checks", "smoke", (None, "no end after 600 s")), "Check smoke could not be made: no end"),
    ("hold", ReleaseEvidence(), "does not say which champion"),
    ("hold", replace(evidence(), releasable=None), "The licences of what it was trained on are not known"),
    ("hold", replace(evidence(), releasable=float("nan")), "The licences of what it was trained on are not known"),
    ("hold", replace(evidence(), releasable=1.5), "The licences of what it was trained on are not known"),
    (
        "hold",
        replace(evidence(), releasable=0.575, not_releasable={"CC-BY-NC-4.0": 0.3, "no licence": 0.125}),
        "42.5% of the supervised tokens that it was trained on are of documents whose licence does not allow the release of a model, at most 0.0% "
        "is allowed: CC-BY-NC-4.0 30.0%, no licence 12.5%. If you have the right",
    ),
    (
        "hold",
        replace(evidence(), releasable=0.5, not_releasable={"no licence": 0.5}, disputed=0.25),
        "25.0% came under a licence that allows it, too: the strictest counts until 'factory data settle LICENCE --document ID' says which",
    ),
    (
        "hold",
        replace(evidence(), anomalies=("loss_spike at step 4 of segment 2 (anomaly 1)",)),
        "Its training went wrong: loss_spike at step 4",
    ),
    ("hold", replace(evidence(), anomalies=None), "was not looked up"),
    ("promote", evidence(), "Better than candidate 1"),
    ("hold", evidence(target=0.005), "Not shown to be better"),
    ("reject", evidence(target=-0.05), "Worse than candidate 1"),
    ("reject", evidence(target=-0.05), "in every domain would have been seen with 80 %"),
    ("hold", evidence(code=-0.015), "Guard not shown to hold: code"),
    ("promote", evidence(code=-0.005), "code: 1.920 → 1.840 bits per byte (+0.005"),
    ("reject", evidence(code=-0.05), "Guard violated: code"),
    ("reject", evidence(cloze=-0.2), "Guard violated: cloze"),
    ("hold", replace(evidence(target=0.011), look=2), "Not shown to be better"),  # the first look would have shown it
    (
        "promote",
        evidence(target=0.011),
        "in every domain would have been seen with 80 %, all guards passed (look 1 against this champion",
    ),
    (
        "promote",
        changed(evidence(), "guards", "cloze", gain(0.05, 0.14)),
        "A gain of 0.016 in every domain would have been seen with 80 %, cloze aside: a gain in bits per byte is not counted on to move it, and its "
        "90 items tell too little of how often it holds a candidate that is as good as the champion there (about 68 % pass by their standard error, "
        "0.069; at least 58 % do, with 95 %; a loss of 0.150 must be excluded) (look 1 against",
    ),
    (
        "promote",
        replace(changed(evidence(), "guards", "cloze", gain(0.0, 0.0)), cloze_items=24),
        "in every domain would have been seen with 80 %, cloze aside",  # none changed sides here, which is no proof that none will
    ),
    (
        "promote",
        replace(changed(evidence(), "guards", "cloze", gain(0.0, 0.0)), cloze_items=96),
        "in every domain would have been seen with 80 %, all guards passed (look 1",
    ),
    (
        "hold",
        changed(evidence(), "guards", "cloze", Gain()),
        "Of no gain in bits per byte, however large, can it be said that 80 % are promoted: cloze could not be compared (look 1",
    ),
    (
        "hold",
        changed(evidence(), "guards", "code", Gain()),
        "Of no gain in bits per byte, however large, can it be said that 80 % are promoted: code could not be compared (look 1",
    ),
    (
        "promote",
        evidence(),
        "How far another order of the same data moves a model was not measured",
    ),
    (
        "promote",
        replace(evidence(), replicas=3, replica_target=0.004),
        "moves the target by 0.0040 bits per byte (standard deviation of 3 trainings): the gain is beyond that",
    ),
    ("promote", replace(evidence(target=0.02), replicas=3, replica_target=0.02), "the gain is within that noise"),
    (
        "promote",
        replace(evidence(code=-0.015), replicas=3, replica_noise={"code": 0.015}, replica_target=0.001),
        "code",
    ),
    (
        "hold",
        replace(evidence(code=-0.035), replicas=3, replica_noise={"code": 9.0}, replica_target=0.001),
        "loss of at most 0.040",
    ),
    (
        "reject",
        replace(changed(evidence(code=-0.015), "lost", "code", 0.04), replicas=3, replica_noise={"code": 0.015}),
        "a loss of at most 0.002 is allowed",
    ),  # replicas' noise is granted once in a line, not to each release
    (
        "hold",
        evidence(target=0.005),
        "Noise of the measurement, bits per byte: chat 0.0010, code 0.0010, docs 0.0010; of another order of the same data: none, as no replicas",
    ),
    (
        "reject",
        replace(evidence(target=-0.05), replicas=3, replica_noise={"chat": 0.004, "code": 0.015, "docs": math.nan}),
        "of another order of the same data, by 3 trainings: chat 0.0040, code 0.0150, docs ?.",
    ),
    ("promote", FIRST, "judged by absolute floors, which no noise widens"),
    (
        "hold",
        replace(evidence(), champion_failed={"finite_loss": "1 of 60 documents have no finite loss, first a:7"}),
        "Nothing can be compared with the champion, candidate 1: check finite_loss failed: 1 of 60 documents have no finite loss, first a:7. "
        "'factory release --rollback N'",
    ),
    ("hold", replace(evidence(), watched=None), "rose alone over the line of candidates was not looked up"),
    (
        "hold",
        replace(evidence(), watched=4, rise_since=7, rise_dev=gain(0.1), rise_sealed=gain(0.01), rise_gap=gain(-0.09)),
        "Since candidate 7 the dev half, by which candidates are chosen, gained +0.100 bits per byte and the sealed half +0.010",
    ),
    (
        "promote",
        replace(evidence(), watched=4, rise_since=7, rise_dev=gain(0.1), rise_sealed=gain(0.09), rise_gap=gain(-0.01)),
        "Better than candidate 1",
    ),
    ("hold", replace(evidence(), look=None), "How many candidates were judged against candidate 1 before is not known"),
    (
        "hold",
        changed(evidence(code=-0.005), "lost", "code", 0.015),
        "a loss of at most 0.005 is allowed, as releases since the best one lost 0.015",
    ),
    ("hold", changed(evidence(), "lost", "code", None), "code: what earlier releases lost there is not known"),
    ("hold", changed(evidence(), "noise_floor", "code", 0.5), "code: the noise floor is 0.5000"),
    (
        "promote",
        changed(evidence(code=-0.015), "noise_floor", "code", 0.0199),
        "code",
    ),  # delta is twice the noise floor
    (
        "hold",
        changed(evidence(), "guards", "code", gain(0.05, clusters=3)),
        "3 source documents, at least 8 are needed",
    ),
    ("hold", replace(evidence(), target=gain(math.nan)), "could not be measured: a number is missing or not finite"),
    ("hold", replace(evidence(), target=None), "could not be measured"),
    (
        "hold",
        replace(evidence(target=0.64), on_dev=gain(0.01), halves_gap=gain(0.63)),
        "It gains +0.640 bits per byte on the sealed half and +0.010 on the dev half, which are drawn alike: it has seen the sealed documents.",
    ),
    (
        "hold",
        replace(evidence(), on_dev=gain(0.2), halves_gap=gain(-0.12)),
        "and +0.200 on the dev half, which are drawn alike: it was fitted to the dev half.",
    ),
    ("promote", replace(evidence(), halves_gap=gain(0.03, 0.05)), "Better than candidate 1"),
    ("hold", replace(evidence(), halves_gap=None), "The gains on the sealed half and on the dev half"),
    (
        "hold",
        replace(evidence(), on_fresh=gain(-0.1), fresh_gap=gain(-0.18)),
        "It gains −0.100 bits per byte on documents that arrived after its training and +0.080 on the others",
    ),
    (
        "promote",
        replace(evidence(target=0.3), on_sealed=gain(0.3), on_dev=gain(0.3), on_fresh=gain(0.1), fresh_gap=gain(-0.2)),
        "Better than candidate 1",
    ),
    ("promote", replace(evidence(), on_fresh=None, fresh_gap=None, fresh_documents=3), "Better than candidate 1"),
    ("hold", replace(evidence(), sealed_looks=None), "How often the sealed half was read before is not known"),
    (
        "hold",
        replace(evidence(), sealed_looks=200.0),
        "The sealed half of what is held out was read by 200 candidates before, at most 200 are allowed: nothing was measured.",
    ),
    ("reject", changed(evidence(), "checks", "logits", (False, "0.3 apart")), "Check logits failed"),
]


@pytest.mark.parametrize(("outcome", "given_", "words"), CASES)
def test_table(outcome: str, given_: ReleaseEvidence, words: str) -> None:
    verdict = judge(POLICY, given_)
    assert verdict.outcome == outcome, verdict.reasons
    assert any(words in reason for reason in verdict.reasons), verdict.reasons
    assert judge(POLICY, copy.deepcopy(given_)) == verdict


def test_a_person_reads_the_change_not_the_gain() -> None:
    reasons = judge(POLICY, changed(evidence(), "guards", "code", gain(0.08, 0.02))).reasons
    assert "code: 1.920 → 1.840 bits per byte (−0.080, 95 % between −0.100 and −0.060)." in reasons


def test_a_target_domain_of_which_nothing_is_held_out_holds() -> None:
    verdict = judge(ReleasePolicy(target=Target(weights={"law": 1.0})), evidence())
    assert verdict.outcome == "hold" and "law" in verdict.reasons[0]


def test_only_domains_that_it_was_trained_on_are_named_as_not_guarded() -> None:
    for trained_on in ({}, dict.fromkeys(DOMAINS, 1 / 3), {"law": 0.0}, {"law": None}, {"law": math.nan}):
        verdict = judge(POLICY, replace(evidence(), trained_on=trained_on))
        assert verdict == judge(POLICY, evidence()), "and older evidence is judged as it was"
