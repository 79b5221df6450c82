"""Runs the arms from cheap to expensive until the table names the cause."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from agents.loss_doctor.arms import (
    AGAIN,
    COMMIT,
    EARLIER,
    ENVIRONMENT,
    FP32,
    KERNELS,
    MIXTURE,
    OLDER,
    ORDER,
    AnomalyCase,
    ArmOutcome,
    NewShardsComparison,
    ReplayArm,
    ReplayBench,
    ReplayBudgetSpentError,
    make_arm_without_accumulation,
    make_arms_with_smaller_steps,
)
from agents.loss_doctor.causes import (
    BAD_DATA,
    CODE,
    LOSS_MASK,
    SHARES,
    SPREAD,
    UNKNOWN,
    ArmFindings,
    DiagnosedCause,
    choose_cause,
)
from agents.loss_doctor.curves import StepMetrics
from agents.loss_doctor.suspects import (
    find_documents_typical_of_shards,
    find_odd_documents,
    find_smallest_masked_set,
    find_suspect_documents,
    has_learnt_odd_documents,
    rank_documents,
)
from kernels.contract.message import Message

NOTICED = 8.0  # robust deviations: an anomaly of its own
MOST_MASKS = (
    24  # replays in which documents are masked; if more would be needed to find the guilty documents, none are named
)
AT_ONCE = 2  # an anomaly that begins so many steps after new shards joined is taken as theirs
OTHER_MASK = 0.2  # difference of the share of tokens that carry loss, from which on two loss masks differ
ALIKE, UNLIKE = (
    0.5,
    0.2,
)  # effect of documents at another checkpoint, as a share of that at the newest: from the first on they are bad, up to the second not


@dataclass(frozen=True)
class Diagnosis:
    """The doctor's result. ``guilty``: documents that may be quarantined. ``triggers``: documents without which the anomaly is gone."""

    causes: tuple[str, ...]
    why: str
    guilty: tuple[str, ...]
    triggers: tuple[str, ...]
    suspects: tuple[str, ...]
    outcomes: tuple[ArmOutcome, ...]
    steps: int  # replayed in all
    remedy: str = ""  # the arm of ``make_arms_with_smaller_steps`` that cleared the anomaly

    def to_json(self) -> dict[str, Any]:
        """As JSON values, without the curves."""
        arms = [{"arm": o.arm, "fires": o.fires, "steps": o.steps, "failed": o.failed} for o in self.outcomes]
        lists = {key: list(getattr(self, key)) for key in ("causes", "guilty", "triggers", "suspects")}
        return {"why": self.why, "steps": self.steps, "remedy": self.remedy, "arms": arms, **lists}


def diagnose_anomaly(bench: ReplayBench) -> Diagnosis:
    """The cause of an anomaly; ``unknown``, with the reason, if the budget ends or a replay fails first."""
    consultation = _Consultation(bench)
    try:
        naming = consultation.run()
    except ReplayBudgetSpentError as spent:
        naming = choose_cause(consultation.findings) or DiagnosedCause((UNKNOWN,), spent.message)
    return consultation.diagnosis(naming)


class _TooMany(Exception):
    """More documents play a part than the allowed replays can tell apart."""


class _Consultation:
    """One diagnosis in progress: the arms that were tried, and the findings."""

    def __init__(self, bench: ReplayBench) -> None:
        self.bench = bench
        self.case: AnomalyCase = bench.case()
        self.outcomes: list[ArmOutcome] = []
        self.ranked: list[str] = []
        self.triggers: list[str] = []
        self.strictly = False
        self.findings = ArmFindings(
            self.case.kind,
            low=self.case.symptom.low,
            kernels_are_reference=self.case.all_reference,
            resumed=self.case.resumed_at is not None,
            one_rank=self.case.one_rank,
            generation_begins=self._began_with_new_shards(),
            environment=bool(self.case.environment_changed),
        )

    def _began_with_new_shards(self) -> bool:
        begins = self.case.generation_begins
        return begins is not None and self.case.onset <= begins + AT_ONCE

    def run(self) -> DiagnosedCause:
        # Documents come last: the effect of a faulty kernel, commit or rate on one document is not the document's fault.
        first = (self._again, self._changes, self._numerics, self._commit, self._joined, self._documents)
        for step in (*first, self._order, self._earlier, self._rate):
            step()
            if self.outcomes and all(outcome.failed for outcome in self.outcomes):
                reason = self.outcomes[0].failed
                why = Message("loss_doctor.no_replay", "no replay could run: {problem}", problem=reason)
                return DiagnosedCause((UNKNOWN,), why)
            if (naming := choose_cause(self.findings)) is not None:
                return naming
            if self.findings.masked_clears and self.findings.guilty_share <= SPREAD:
                break  # documents trigger it; nothing else can say more
        self.findings = replace(self.findings, finished=True)
        naming = choose_cause(self.findings)
        assert naming is not None
        if naming.causes == (CODE, UNKNOWN):
            changed = self.case.environment_changed
            why = Message("loss_doctor.environment", "{why} (the changes: {changed})", why=naming.why, changed=changed)
            naming = replace(naming, why=why)
        failed = [f"{o.arm}: {o.failed}" for o in self.outcomes if o.failed]
        if not failed:
            return naming
        arms = "; ".join(failed)
        return replace(
            naming,
            why=Message("loss_doctor.not_run", "{why} (these replays did not run: {arms})", why=naming.why, arms=arms),
        )

    def diagnosis(self, naming: DiagnosedCause) -> Diagnosis:
        guilty = tuple(self.triggers) if naming.causes == (BAD_DATA,) else ()
        steps = sum(outcome.steps for outcome in self.outcomes)
        return Diagnosis(
            naming.causes, naming.why, guilty, tuple(self.triggers), tuple(self.ranked), tuple(self.outcomes), steps, self.findings.rate_clears
        )  # fmt: skip

    def _tried(self, arm: ReplayArm) -> ArmOutcome:
        if known := next((o for o in self.outcomes if o.arm == arm.name), None):
            return known
        outcome = self.bench.run(arm)
        self.outcomes.append(outcome)
        if outcome.failed:
            self.findings = replace(self.findings, failed=True)
        else:
            self.findings = replace(self.findings, fires={**self.findings.fires, arm.name: outcome.fires})
        return outcome

    def _again(self) -> None:
        """Replay the window unchanged: once if the curve equals the live run's to the last digit, else twice."""
        first = self._tried(AGAIN[0])
        if not first.failed and first.curve == self.case.live:
            self.findings = replace(self.findings, repeatable=True)
        elif first.fires is not False or first.failed:
            second = self._tried(AGAIN[1])
            if not (first.failed or second.failed):
                self.findings = replace(self.findings, repeatable=first.bits == second.bits)

    def _changes(self) -> None:
        """Undo each known change."""
        if self.findings.resumed and self.case.has_earlier:
            self._tried(EARLIER)
        if choose_cause(self.findings) is None and self.case.has_previous_mixture:
            self._tried(MIXTURE)
        if choose_cause(self.findings) is None and self.case.was_otherwise:
            self._tried_rate(make_arms_with_smaller_steps(self.case)[0])

    def _numerics(self) -> None:
        if self.case.recipe["precision"] != "fp32":
            self._tried(FP32)
        if not self.case.all_reference:
            self._tried(KERNELS)
        if choose_cause(self.findings) is None and (arm := make_arm_without_accumulation(self.case.recipe)) is not None:
            self._tried(arm)

    def _commit(self) -> None:
        if self.case.has_previous_commit:
            self._tried(COMMIT)
        if choose_cause(self.findings) is None and self.case.has_previous_environment:
            self._tried(ENVIRONMENT)

    def _joined(self) -> None:
        """Mask all documents of new shards at once if their labels or masks are odd."""
        for joined in self.bench.compare_new_shards() if self.case.generation_begins is not None else ():
            if (odd := choose_cause_of_odd_documents(joined)) and self._masked(joined.documents).fires is False:
                self.triggers = sorted(joined.documents)
                self.findings = replace(self.findings, joined_clears=odd)
                return

    def _documents(self) -> None:
        scores = self.bench.score_documents_at("newest")
        odd, common = find_suspect_documents(scores), find_documents_typical_of_shards(scores)
        self.findings = replace(self.findings, strange=bool(find_odd_documents(scores)))
        if math.isinf(self.case.symptom.excess):
            odd, common = rank_documents(scores), set()  # any document may make a value that is not finite
        # Mask first the documents that stand out among their own kind, then all that stand out.
        rare = [key for key in odd if key not in common]
        self.ranked = rare if rare and self._cleared_without(rare) else odd
        if not self.findings.masked_clears and not (odd and self._cleared_without(odd)):
            self._learnt()
            if self.findings.low:
                self._excused(find_suspect_documents(scores, skip_familiar=False))
            return
        if common & set(self.ranked) and not self.findings.low:
            self.triggers = sorted(self.ranked)
            self.findings = replace(self.findings, shards_kind=True)
            self._learnt()
            return
        if self.findings.low and self.case.has_older:
            self.triggers = sorted(self.ranked)
            if (
                self._misbehave_elsewhere() is False
            ):  # learnt since: nothing will be quarantined, so the exact set is not needed
                self.findings = replace(self.findings, older_fires=False)
                return
        try:
            self.triggers = sorted(find_smallest_masked_set(self.ranked, self._gone))
        except _TooMany:
            self.triggers = sorted(self.ranked)
            return
        in_window = sum(score.in_window for score in scores)
        self.findings = replace(self.findings, guilty_share=len(self.triggers) / max(1, in_window))
        if self.findings.guilty_share > SPREAD:
            self._learnt()
        elif self.case.has_older:
            of_shards = bool(common & set(self.triggers))
            self.findings = replace(self.findings, shards_kind=of_shards, older_fires=self._misbehave_elsewhere())

    def _cleared_without(self, documents: list[str]) -> bool:
        masked = self._masked(tuple(documents))
        cleared = masked.fires is False
        # The smallest set must leave as little as masking all leaves: not a smaller spike.
        self.strictly = cleared and self._unnoticed(masked)
        self.findings = replace(self.findings, masked_clears=cleared)
        return cleared

    def _excused(self, documents: list[str]) -> None:
        """Mask together the documents that are like some earlier ones: they may be too many at once, without one to blame."""
        if documents and self._cleared_without(documents):
            self.ranked, self.triggers = documents, sorted(documents)
            self.findings = replace(self.findings, too_many=True)

    def _learnt(self) -> None:
        """Find out whether the new shards were learnt by the segment's end, if their documents are odd."""
        if self.findings.strange and self.case.has_end:
            found = has_learnt_odd_documents(
                self.bench.score_documents_at("newest"), self.bench.score_documents_at("end")
            )
            self.findings = replace(self.findings, learnt=found)

    def _order(self) -> None:
        """Replay with other documents of the same shards. Reached only if no single documents are to blame."""
        self._tried(ORDER)

    def _misbehave_elsewhere(self) -> bool | None:
        """True if the triggers have the same effect at another checkpoint. Their effect is the difference of the window with and without them."""
        triggers, named = tuple(self.triggers), _named(self.triggers)
        arms = (
            (AGAIN[0], ReplayArm(named, masked=triggers, start="onset")),
            (
                ReplayArm(OLDER, start="older weights"),
                ReplayArm(f"{OLDER}, {named}", masked=triggers, start="older weights"),
            ),
        )
        outcomes = [[self._tried(arm) for arm in pair] for pair in arms]
        if any(outcome.failed for pair in outcomes for outcome in pair):
            return None
        here, there = (self.case.symptom.find_largest_difference(*map(self._window, pair)) for pair in outcomes)
        if math.isinf(here) or math.isinf(there):
            return math.isinf(there)
        share = there / here if here > 0 else 0.0
        if share <= UNLIKE:
            return False
        noticed = there >= NOTICED * self.case.symptom.usual.deviation
        if share >= ALIKE or noticed:
            return True
        # In between, the documents' own loss and gradient at that checkpoint decide, if they say the same of all documents.
        odd = set(triggers) & set(
            find_suspect_documents(self.bench.score_documents_at("older weights"), most_share=1.0)
        )
        return True if odd == set(triggers) else None if odd else False

    def _gone(self, masked: tuple[str, ...]) -> bool:
        """True if the anomaly is gone when these documents are masked. Raises: _TooMany."""
        if sum("documents masked" in outcome.arm for outcome in self.outcomes) >= MOST_MASKS:
            raise _TooMany
        outcome = self._masked(masked)
        return outcome.fires is False and (self._unnoticed(outcome) or not self.strictly)

    def _masked(self, masked: tuple[str, ...]) -> ArmOutcome:
        return self._tried(ReplayArm(_named(masked), masked=tuple(sorted(masked)), start="onset"))

    def _unnoticed(self, outcome: ArmOutcome) -> bool:
        return self.case.symptom.is_unnoticeable_in(self._window(outcome))

    def _window(self, outcome: ArmOutcome) -> list[StepMetrics]:
        return [point for point in outcome.curve if self.case.onset <= point.step <= self.case.last]

    def _earlier(self) -> None:
        if self.case.has_earlier:
            self._tried(EARLIER)

    def _rate(self) -> None:
        for arm in make_arms_with_smaller_steps(self.case):
            if self._tried_rate(arm):
                return

    def _tried_rate(self, arm: ReplayArm) -> bool:
        cleared = self._tried(arm).fires is False
        if cleared:
            self.findings = replace(self.findings, rate_clears=arm.name)
        return cleared


def choose_cause_of_odd_documents(comparison: NewShardsComparison) -> str:
    """The cause to which an oddity of the new documents points; '' if they are not odd.

    >>> choose_cause_of_odd_documents(NewShardsComparison("chat", ("a",), "chat", supervised=1.0, supervised_before=0.5))
    'loss mask'
    >>> choose_cause_of_odd_documents(NewShardsComparison("chat", ("a",), "code", supervised=0.5, supervised_before=0.5))
    'mixture shift or wrong label'
    """
    if abs(comparison.supervised - comparison.supervised_before) > OTHER_MASK or comparison.begins_alike < 0.5:
        return LOSS_MASK
    return SHARES if comparison.reads_like != comparison.domain else ""


def _named(masked: Sequence[str]) -> str:
    """The name of the arm that masks these documents, such as '3 documents masked (ab12cd34)'."""
    digest = hashlib.sha256("\n".join(sorted(masked)).encode()).hexdigest()[:8]
    return f"{len(masked)} documents masked ({digest})"
