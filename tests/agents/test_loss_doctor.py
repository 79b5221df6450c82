"""The loss doctor on a made-up bench whose anomaly has a known cause: every row of the table, guilty documents, budgets, failures."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from agents.loss_doctor.arms import (
    AnomalyCase,
    ArmOutcome,
    DocumentScore,
    NewShardsComparison,
    ReplayArm,
    ReplayBudgetSpentError,
    Start,
)
from agents.loss_doctor.causes import TABLE, ArmFindings, choose_cause
from agents.loss_doctor.curves import StepMetrics, Symptom, find_anomaly_onset
from agents.loss_doctor.doctor import diagnose_anomaly
from agents.loss_doctor.suspects import find_smallest_masked_set
from tests.support.messages import the

AGAIN = {"same again": True, "same again, twice": True}
RECIPE = {
    "precision": "bf16", "optimizer": {"lr": 1e-3, "beta2": 0.99}, "stability": {"grad_clip": 1.0}, "batch": {"micro_sequences": 2},
    "schedule": {"warmup_steps": 30, "trunk_steps": {"first": 100, "later": 10}},
}  # fmt: skip
CALM = [StepMetrics(step, 2.0, 0.5) for step in range(40)]


# ArmFindings and their cause. Later findings meet the conditions of earlier rows of the table but one.
ROWS: list[tuple[dict[str, Any], tuple[str, ...] | None]] = [
    ({"repeatable": False}, ("hardware",)),
    ({"fires": {"same again": False}}, ("hardware",)),
    ({"fires": AGAIN | {"fp32": False, "reference kernels": False}}, ("numeric precision", "faulty kernel")),
    ({"fires": AGAIN | {"fp32": False, "reference kernels": True}}, ("numeric precision",)),
    ({"fires": AGAIN | {"fp32": False}, "kernels_are_reference": True}, ("numeric precision",)),
    ({"fires": AGAIN | {"fp32": False}}, None),
    ({"fires": AGAIN | {"fp32": True, "reference kernels": False}}, ("faulty kernel",)),
    ({"fires": {"same again": False}, "one_rank": True}, ("hardware", "layout")),
    ({"fires": AGAIN | {"all rows at once": False}}, ("layout",)),
    ({"fires": AGAIN | {"previous mixture": False}}, ("mixture shift or wrong label",)),
    ({"fires": AGAIN, "rate_clears": "rate as before"}, ("rate",)),
    ({"fires": AGAIN, "joined_clears": "loss mask"}, ("loss mask",)),
    ({"fires": AGAIN, "joined_clears": "mixture shift or wrong label"}, ("mixture shift or wrong label",)),
    ({"fires": AGAIN, "masked_clears": True, "guilty_share": 0.6}, None),
    ({"fires": AGAIN | {"other documents": False}, "masked_clears": True, "guilty_share": 0.6}, ("data order or packing",)),
    ({"fires": AGAIN | {"other documents": True}, "masked_clears": True, "guilty_share": 0.6}, ("new generation", "bad data")),
    ({"fires": AGAIN | {"other documents": False}, "masked_clears": False}, ("data order or packing",)),
    ({"fires": AGAIN, "masked_clears": True, "low": True, "older_fires": False}, ("contamination or repeated data",)),
    ({"fires": AGAIN, "masked_clears": True, "low": True, "older_fires": True}, ("bad data",)),
    ({"fires": AGAIN, "masked_clears": True, "low": True, "finished": True}, ("bad data", "contamination or repeated data")),
    ({"fires": AGAIN, "masked_clears": True, "guilty_share": 0.1, "older_fires": True}, ("bad data",)),
    ({"fires": AGAIN, "masked_clears": True, "guilty_share": 0.1, "older_fires": False}, ("data × state",)),
    ({"fires": AGAIN, "masked_clears": True, "guilty_share": 0.1}, None),
    ({"fires": AGAIN, "masked_clears": True, "finished": True}, ("bad data", "data × state")),
    ({"fires": AGAIN | {"earlier checkpoint": False}, "resumed": True}, ("state lost on resume",)),
    ({"fires": AGAIN | {"earlier checkpoint": False}}, ("state lost on resume", "hardware")),
    ({"fires": AGAIN | {"previous commit": False}}, ("code change",)),
    ({"fires": AGAIN | {"previous environment": False}}, ("code change",)),
    ({"fires": AGAIN, "finished": True, "environment": True}, ("code change", "unknown")),
    ({"fires": AGAIN | {"previous environment": True}, "finished": True, "environment": True}, ("unknown",)),
    ({"fires": AGAIN, "masked_clears": True, "shards_kind": True}, ("new generation", "bad data")),
    ({"fires": AGAIN, "masked_clears": True, "shards_kind": True, "learnt": True}, ("new generation",)),
    ({"fires": AGAIN, "masked_clears": True, "shards_kind": True, "learnt": True, "kind": "non_finite"}, ("new generation", "bad data")),
    ({"fires": AGAIN, "masked_clears": True, "shards_kind": True, "low": True, "older_fires": True}, ("new generation", "bad data")),
    ({"fires": AGAIN, "masked_clears": True, "shards_kind": True, "low": True, "older_fires": False}, ("contamination or repeated data",)),
    ({"fires": AGAIN, "masked_clears": True, "too_many": True, "low": True}, ("bad data", "contamination or repeated data")),
    ({"fires": AGAIN, "masked_clears": False, "rate_clears": "rate × 0.1"}, ("rate",)),
    ({"fires": AGAIN, "finished": True, "generation_begins": True}, ("new generation",)),
    ({"fires": AGAIN, "finished": True, "generation_begins": True, "kind": "non_finite"}, ("unknown",)),
    ({"fires": AGAIN, "finished": True, "generation_begins": True, "strange": True}, ("new generation", "bad data")),
    ({"fires": AGAIN, "finished": True, "generation_begins": True, "strange": True, "learnt": True}, ("new generation",)),
    ({"fires": AGAIN, "finished": True, "kind": "plateau"}, ("true plateau",)),
    ({"fires": AGAIN, "finished": True, "kind": "plateau", "failed": True}, ("unknown",)),
    ({"fires": AGAIN, "finished": True, "generation_begins": True, "failed": True}, ("unknown",)),
    ({"fires": AGAIN | {"fp32": None}, "finished": True}, ("unknown",)),
    ({"fires": AGAIN, "repeatable": True}, None),
]  # fmt: skip


@pytest.mark.parametrize(("findings", "causes"), ROWS, ids=lambda value: str(value))
def test_findings_lead_to_the_causes_of_the_table(findings: dict[str, Any], causes: tuple[str, ...] | None) -> None:
    named = choose_cause(ArmFindings(**{"kind": "loss_spike", "repeatable": True} | findings))
    assert (named and named.causes) == causes


def test_the_findings_of_the_tests_reach_every_row_of_the_table() -> None:
    seen = set()
    for findings, _ in ROWS:
        found = ArmFindings(**{"kind": "loss_spike", "repeatable": True} | findings)
        seen.add(next((i for i, (when, _, _) in enumerate(TABLE) if when(found)), None))
    assert seen - {None} == set(range(len(TABLE)))


@dataclass
class MadeUp:
    """A bench whose window has a spike if ``spikes`` is true for the arm."""

    spikes: Callable[[ReplayArm], bool]
    scored: Sequence[DocumentScore] = ()
    budget: int = 1000
    older: bool = True
    noisy: bool = False
    failing: str = ""
    joining: Sequence[NewShardsComparison] = ()
    live: float = 6.0
    height: float = 6.0  # of the spike in replays
    at_end: Sequence[DocumentScore] | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    ran: list[str] = field(default_factory=list)

    def case(self) -> AnomalyCase:
        spike = Symptom.from_live_run("loss_spike", CALM, [StepMetrics(40, 6.0, 0.5)])
        case = AnomalyCase(
            "loss_spike", 40, 40, spike, RECIPE, has_previous_commit=True, has_earlier=self.older, has_older=self.older
        )
        return replace(case, live=(StepMetrics(40, self.live, 0.5),), has_end=self.at_end is not None, **self.facts)

    def run(self, arm: ReplayArm) -> ArmOutcome:
        if self.budget <= 0:
            raise ReplayBudgetSpentError("loss_doctor.budget", "the budget is spent")
        self.budget -= 1
        self.ran.append(arm.name)
        if self.failing:
            return ArmOutcome(arm.name, None, failed=self.failing)
        spikes = self.spikes(arm)
        bits = str(random.random()) if self.noisy else "same"
        return ArmOutcome(arm.name, spikes, 1, bits, (StepMetrics(40, self.height if spikes else 2.1, 0.5),))

    def score_documents_at(self, start: Start) -> Sequence[DocumentScore]:
        return self.at_end or () if start == "end" else self.scored

    def compare_new_shards(self) -> Sequence[NewShardsComparison]:
        return self.joining


DOCUMENTS = [DocumentScore(f"d{n}", 2.0 + n / 100, 1.0 + n / 100) for n in range(30)] + [
    DocumentScore("bad-1", 9.0, 20.0), DocumentScore("odd", 8.0, 18.0), DocumentScore("bad-2", 7.0, 12.0),
]  # fmt: skip


def test_documents_are_guilty_only_if_they_have_the_same_effect_with_other_weights() -> None:
    guilty = MadeUp(lambda arm: not {"bad-1", "bad-2"} <= set(arm.masked), DOCUMENTS)
    found = diagnose_anomaly(guilty)
    assert found.causes == ("bad data",) and found.guilty == ("bad-1", "bad-2")
    assert set(found.suspects) == {"bad-1", "odd", "bad-2"}
    trigger = MadeUp(lambda arm: arm.start != "older weights" and "bad-1" not in arm.masked, DOCUMENTS)
    found = diagnose_anomaly(trigger)
    assert found.causes == ("data × state",) and found.guilty == () and found.triggers == ("bad-1",)
    alone = MadeUp(lambda arm: "bad-1" not in arm.masked, DOCUMENTS, older=False)
    found = diagnose_anomaly(alone)
    assert found.causes == ("bad data", "data × state") and found.guilty == ()


@pytest.mark.parametrize(
    ("spikes", "causes"),
    [
        (lambda arm: not arm.recipe, ("numeric precision",)),
        (lambda arm: not arm.reference_kernels, ("faulty kernel",)),
        (lambda arm: not arm.previous_commit, ("code change",)),
        (lambda arm: arm.start != "earlier", ("state lost on resume", "hardware")),
        (lambda arm: "optimizer.lr" not in arm.recipe, ("rate",)),
        (lambda arm: "optimizer.beta2" not in arm.recipe, ("rate",)),
        (lambda arm: "schedule.warmup_steps" not in arm.recipe, ("rate",)),
        (lambda arm: "batch.micro_sequences" not in arm.recipe, ("layout",)),
        (lambda arm: not arm.reshuffled, ("data order or packing",)),
        (lambda arm: False, ("hardware",)),
        (lambda arm: True, ("unknown",)),
    ],
)
def test_each_cause_without_a_guilty_document_is_found(
    spikes: Callable[[ReplayArm], bool], causes: tuple[str, ...]
) -> None:
    found = diagnose_anomaly(MadeUp(spikes, DOCUMENTS))
    assert found.causes == causes and found.guilty == ()


def test_the_diagnosis_undoes_a_known_change_first() -> None:
    mixture = MadeUp(lambda arm: not arm.previous_mixture, DOCUMENTS, facts={"has_previous_mixture": True})
    assert diagnose_anomaly(mixture).causes == ("mixture shift or wrong label",) and mixture.ran == [
        "same again",
        "previous mixture",
    ]
    rate = MadeUp(lambda arm: not arm.recipe, DOCUMENTS, facts={"was_otherwise": {"optimizer.lr": 1e-4}})
    found = diagnose_anomaly(rate)
    assert (
        found.causes == ("rate",) and found.remedy == "rate as before" and rate.ran == ["same again", "rate as before"]
    )
    moments = MadeUp(lambda arm: arm.start != "earlier", DOCUMENTS, facts={"resumed_at": 38})
    assert diagnose_anomaly(moments).causes == ("state lost on resume",) and len(moments.ran) == 2


@pytest.mark.parametrize(
    ("joined", "causes"),
    [
        (NewShardsComparison("chat", ("odd",), "chat", 1.0, 0.5), ("loss mask",)),
        (NewShardsComparison("chat", ("odd",), "chat", 0.5, 0.5, begins_alike=0.1), ("loss mask",)),
        (NewShardsComparison("chat", ("odd",), "code", 0.5, 0.5), ("mixture shift or wrong label",)),
        (NewShardsComparison("chat", ("odd",), "chat", 0.5, 0.5), ("bad data",)),
        (
            NewShardsComparison("chat", ("bad-1",), "code", 0.5, 0.5),
            ("bad data",),
        ),  # odd, but the anomaly is not gone without them
    ],
)
def test_new_documents_are_to_blame_only_if_the_anomaly_is_gone_without_them(
    joined: NewShardsComparison, causes: tuple[str, ...]
) -> None:
    found = diagnose_anomaly(
        MadeUp(lambda arm: "odd" not in arm.masked, DOCUMENTS, joining=[joined], facts={"generation_begins": 35})
    )
    assert found.causes == causes and found.guilty == (("odd",) if causes == ("bad data",) else ())


def test_a_replay_equal_to_the_live_run_is_not_made_twice() -> None:
    same, other = (MadeUp(lambda arm: True, DOCUMENTS, live=live) for live in (6.0, 6.1))
    assert diagnose_anomaly(same).causes == diagnose_anomaly(other).causes == ("unknown",)
    assert "same again, twice" in other.ran and "same again, twice" not in same.ran


def test_the_diagnosis_ends_if_replays_differ_or_no_replay_can_run() -> None:
    noisy = MadeUp(lambda arm: True, DOCUMENTS, noisy=True, live=5.9)
    assert diagnose_anomaly(noisy).causes == ("hardware",) and len(noisy.ran) == 2
    failing = MadeUp(lambda arm: True, DOCUMENTS, failing="no sandbox")
    found = diagnose_anomaly(failing)
    assert found.causes == ("unknown",) and "no sandbox" in found.why and len(failing.ran) == 2


def test_a_cause_stays_unknown_if_an_arm_could_not_run() -> None:
    class Breaking(MadeUp):
        def case(self) -> AnomalyCase:
            return replace(super().case(), generation_begins=40)

        def run(self, arm: ReplayArm) -> ArmOutcome:
            outcome = super().run(arm)
            return replace(outcome, fires=None, failed="killed") if arm.masked else outcome

    assert diagnose_anomaly(Breaking(lambda arm: True, DOCUMENTS)).causes == ("unknown",)
    assert diagnose_anomaly(Breaking(lambda arm: True, [])).causes == ("new generation",)


@pytest.mark.parametrize(("bad", "causes"), [(0, ("new generation",)), (20, ("new generation", "bad data"))])
def test_a_mostly_bad_shard_is_not_diagnosed_as_just_a_new_generation(bad: int, causes: tuple[str, ...]) -> None:
    """At most half of the window's documents are masked, so nothing clears the anomaly; the bad documents, being the majority, look usual."""
    before = [DocumentScore(f"old-{n}", 2.0 + n / 100, 1.0 + n / 100, in_window=False) for n in range(10)]
    window = [DocumentScore(f"good-{n}", 2.0, 1.0) for n in range(5)]
    window += [DocumentScore(f"bad-{n}", 9.0 + n / 100, 20.0 + n / 100) for n in range(bad)]
    mostly = lambda arm: sum(key.startswith("bad-") for key in arm.masked) < bad or not bad
    bench = MadeUp(mostly, [*before, *window], facts={"generation_begins": 40})
    found = diagnose_anomaly(bench)
    assert found.causes == causes and found.guilty == ()


def new_form(share: float, at_end: float = 0.0) -> list[DocumentScore]:
    """A window of 12 documents, four of them odd, and samples; ``share`` of the new shards' documents are as odd."""
    odd, fair = (6.0, 60.0), (2.0, 20.0)
    window = [DocumentScore(f"odd-{n}", *(fair if at_end else odd), joined=True) for n in range(4)]
    window += [DocumentScore(f"fair-{n}", *fair) for n in range(8)]
    before = [DocumentScore(f"old-{n}", *fair, in_window=False) for n in range(100)]
    kind = lambda n: odd if n < 100 * (at_end or share) else fair
    return [*window, *before, *(DocumentScore(f"new-{n}", *kind(n), 1, False, True, 6.5) for n in range(100))]


@pytest.mark.parametrize(
    ("share", "at_end", "causes"),
    [
        (0.03, 0.03, ("bad data",)),  # rare in their shard
        (0.5, 0.05, ("new generation",)),
        (0.5, 0.5, ("new generation", "bad data")),
    ],
)
def test_documents_that_resemble_many_of_their_shard_are_not_quarantined(
    share: float, at_end: float, causes: tuple[str, ...]
) -> None:
    """Masking them clears the anomaly, and they have the same effect with older weights, like good documents of a new form."""
    bench = MadeUp(
        lambda arm: not {f"odd-{n}" for n in range(4)} <= set(arm.masked),
        new_form(share),
        at_end=new_form(share, at_end),
        facts={"generation_begins": 40},
    )
    found = diagnose_anomaly(bench)
    assert found.causes == causes and bool(found.guilty) == (causes == ("bad data",))


def test_only_the_document_unlike_the_rest_of_its_shard_is_guilty() -> None:
    """Many documents of the shard are like four of the window. The document that is like none of them is to blame."""
    for joined in (True, False):
        scores = [DocumentScore("bad", 20.0, 900.0, joined=joined), *new_form(0.5)]
        found = diagnose_anomaly(MadeUp(lambda arm: "bad" not in arm.masked, scores, facts={"generation_begins": 40}))
        assert found.causes == ("bad data",) and found.guilty == ("bad",)


def test_an_inconspicuous_document_is_found_guilty_of_a_value_that_is_not_finite() -> None:
    calm = [DocumentScore(f"d{n}", 2.0 + n / 100, 1.0 + n / 100) for n in range(30)]
    spike = Symptom.from_live_run("non_finite", CALM, [StepMetrics(40, math.inf, math.inf)])
    bench = MadeUp(
        lambda arm: "d7" not in arm.masked, calm, facts={"symptom": spike, "kind": "non_finite"}, height=math.inf
    )
    found = diagnose_anomaly(bench)
    assert found.causes == ("bad data",) and found.guilty == ("d7",)


def test_too_many_easy_documents_are_blamed_together() -> None:
    easy, fair = (0.1, 0.1), (2.0, 1.0)
    before = [DocumentScore(f"old-{n}", *(easy if n < 20 else fair), in_window=False) for n in range(100)]
    window = [DocumentScore(f"easy-{n}", *easy, joined=True) for n in range(5)]
    window += [DocumentScore(f"fair-{n}", *fair) for n in range(20)]
    low = Symptom.from_live_run("loss_drop", CALM, [StepMetrics(40, 0.5, 0.5)])
    bench = MadeUp(
        lambda arm: not {f"easy-{n}" for n in range(5)} <= set(arm.masked),
        [*window, *before],
        facts={"symptom": low, "kind": "loss_drop"},
        height=0.5,
        live=0.5,
    )
    found = diagnose_anomaly(bench)
    assert found.causes == ("bad data", "contamination or repeated data") and found.guilty == ()
    assert found.triggers == tuple(f"easy-{n}" for n in range(5))


def test_documents_that_the_model_has_learnt_meanwhile_are_named_together() -> None:
    window = [DocumentScore(f"easy-{n}", 0.1, 0.1) for n in range(8)] + [
        DocumentScore(f"d{n}", 2.0 + n / 100, 1.0) for n in range(30)
    ]
    low = Symptom.from_live_run("loss_drop", CALM, [StepMetrics(40, 0.5, 0.5)])
    easy = {f"easy-{n}" for n in range(8)}
    bench = MadeUp(
        lambda arm: arm.start != "older weights" and not easy <= set(arm.masked),
        window,
        facts={"symptom": low, "kind": "loss_drop"},
        height=0.5,
        live=0.5,
    )
    found = diagnose_anomaly(bench)
    assert found.causes == ("contamination or repeated data",) and found.guilty == () and set(found.triggers) == easy
    assert sum("masked" in arm for arm in bench.ran) == 2


def test_a_changed_environment_is_undone_if_the_previous_one_is_available() -> None:
    changed = {"has_previous_commit": False, "environment_changed": "torch 1 → 2"}
    at_hand = MadeUp(lambda arm: not arm.previous_environment, facts=changed | {"has_previous_environment": True})
    assert diagnose_anomaly(at_hand).causes == ("code change",) and at_hand.ran[-1] == "previous environment"
    found = diagnose_anomaly(MadeUp(lambda arm: True, facts=changed))
    assert (
        found.causes == ("code change", "unknown")
        and the([found.why], "loss_doctor.environment").data["changed"] == "torch 1 → 2"
    )


def test_with_a_spent_budget_the_cause_is_unknown() -> None:
    found = diagnose_anomaly(MadeUp(lambda arm: True, DOCUMENTS, budget=3))
    assert found.causes == ("unknown",) and the([found.why], "loss_doctor.budget") and found.guilty == ()


def test_the_smallest_set_of_documents_that_clears_the_anomaly_is_found() -> None:
    rng = random.Random(5)
    for _ in range(50):
        ranked = [f"d{n}" for n in range(rng.randint(1, 60))]
        needed = set(rng.sample(ranked, rng.randint(1, min(4, len(ranked)))))
        asked: list[int] = []

        def gone(masked: tuple[str, ...], needed: set[str] = needed, asked: list[int] = asked) -> bool:
            asked.append(1)
            return needed <= set(masked)

        assert set(find_smallest_masked_set(ranked, gone)) == needed
        assert len(asked) <= 6 + 2 * len(needed) * 7


def test_the_onset_comes_before_the_noticed_step() -> None:
    rising = [StepMetrics(40 + n, 2.0, 0.5 * 2.0**n) for n in range(1, 6)]
    assert find_anomaly_onset([*CALM, StepMetrics(40, 2.0, 0.5), *rising, StepMetrics(46, 7.0, 30.0)], 46) == 41
    assert find_anomaly_onset([*CALM, StepMetrics(40, 7.0, 0.5)], 40) == 40
    assert find_anomaly_onset([], 3) == 3
