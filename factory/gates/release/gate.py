"""The release gate. It gathers the evidence about a candidate, judges it and records the verdict.

The gate measures the champion on the candidate's suite if that was not done yet. It records no new verdict if policy and evidence equal those of the
newest verdict on the candidate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import sqlalchemy as sa

from factory.core.policy_file import hash_policy
from factory.evals.evaluator import evaluate_on_suite, find_evaluation, load_current_suite, read_items_of_evaluation
from factory.evals.statistics import compare_items
from factory.evals.suite import Suite
from factory.evals.tasks import EvalItem
from factory.gates.release.evidence import FIRST_RELEASE, ReleaseEvidence
from factory.gates.release.held_out_gaps import (
    TASK,
    compare_gains_of_two_document_sets,
    compute_mean_candidates_per_sealed_document,
    find_fresh_documents,
)
from factory.gates.release.judge import PROMOTE, judge
from factory.gates.release.judge_version import compute_judge_version
from factory.gates.release.overfitting import find_gain_on_dev_half_only
from factory.gates.release.policy import ReleasePolicy
from factory.gates.release.recorded_verdict import compute_evidence_sha256
from factory.gates.release.release_line import GATE, compute_guard_losses_since_best_release, find_ordinal_of_comparison
from factory.gates.release.replica_noise import find_newest_replica_noise
from factory.gates.release.reward_hacking import add_dev_only_gain_evidence
from factory.gates.release.trained_licences import list_token_shards_of_lineage
from factory.gates.release.training_evidence import read_training_evidence
from factory.ledger.anomalies import GAIN_ON_DEV_ONLY
from factory.ledger.ledger import Ledger, anomalies, record_event, segments, verdicts
from factory.ledger.plant import Plant
from factory.ledger.rows import CandidateRow, EvaluationRow, ReleaseRow, Subject, find_champion
from factory.ledger.writing import record_verdict
from factory.tasks.comparing import TaskEvidence
from factory.tasks.tiers import measure_due_tasks
from kernels.contract.files import replace_non_finite


def judge_candidate(plant: Plant, candidate_id: int) -> int:
    """Judge a candidate on the current held-out items. Returns the id of the verdict. Idempotent.

    A candidate that has been released keeps the verdict that released it. Raises: InputError for an unknown candidate; ConfigError.
    """
    policy = ReleasePolicy.load(plant.workspace.policy_path("gates/release.yaml"))
    released = ReleaseRow.find_first(plant.ledger, "WHERE candidate = :candidate", candidate=candidate_id)
    if released:
        return released.verdict
    suite = load_current_suite(plant)
    best = find_champion(plant.ledger)
    champion_id = best.candidate if best else None
    looks = compute_mean_candidates_per_sealed_document(plant.ledger, candidate_id, suite)
    if looks >= policy.sealed_looks_max and find_evaluation(plant.ledger, candidate_id, suite) is None:
        against = FIRST_RELEASE if champion_id is None else str(Subject("candidate", champion_id))
        unread = ReleaseEvidence(
            against=against, domains=tuple(suite.domains), sealed_looks=looks, candidate=candidate_id
        )
        evaluated: dict[str, Any] = {"candidate": None, "champion": None}
        return _record(plant.ledger, policy, candidate_id, champion_id, suite, unread, TaskEvidence(), evaluated)
    ours = evaluate_on_suite(plant, candidate_id, suite)
    theirs = None if champion_id is None else evaluate_on_suite(plant, champion_id, suite, released=True)
    evidence = gather_evidence(plant.ledger, policy, suite, champion_id, ours, theirs)
    segment = CandidateRow.get(plant.ledger, candidate_id).segment
    evidence = replace(
        evidence,
        candidate=candidate_id,
        sealed_looks=looks,
        trained_on=compute_token_shares_by_domain(plant.ledger, segment),
        **read_training_evidence(plant, candidate_id),
    )
    tasks = measure_due_tasks(plant, candidate_id, would_promote=False)
    if judge(policy, evidence, tasks).outcome == PROMOTE:
        tasks = measure_due_tasks(plant, candidate_id, would_promote=True)
    evaluated = {"candidate": ours, "champion": theirs}
    return _record(plant.ledger, policy, candidate_id, champion_id, suite, evidence, tasks, evaluated)


def gather_evidence(
    ledger: Ledger, policy: ReleasePolicy, suite: Suite, champion_id: int | None, ours: int, theirs: int | None
) -> ReleaseEvidence:
    """Return the evidence of the evaluations ``ours`` and ``theirs``, which are compared item by item."""
    mine = EvaluationRow.get(ledger, ours).summary
    if champion_id is None or theirs is None:
        return make_evidence_of_evaluations(policy, tuple(suite.domains), FIRST_RELEASE, (mine, []), None)
    other = EvaluationRow.get(ledger, theirs).summary
    against = str(Subject("candidate", champion_id))
    both = (mine, read_items_of_evaluation(ledger, ours)), (other, read_items_of_evaluation(ledger, theirs))
    evidence = make_evidence_of_evaluations(policy, tuple(suite.domains), against, *both)
    candidate_id = EvaluationRow.get(ledger, ours).candidate
    fresh = find_fresh_documents(ledger, candidate_id, suite)
    ages = compare_gains_of_two_document_sets(both[0][1], both[1][1], fresh, policy.target.weights)
    noise = find_newest_replica_noise(ledger, policy.target.weights)
    evidence = add_dev_only_gain_evidence(ledger, candidate_id, champion_id, evidence)
    return replace(
        evidence,
        replicas=noise.runs if noise else None,
        replica_noise=dict(noise.by_domain) if noise else {},
        replica_target=noise.target if noise else None,
        fresh_documents=len(fresh),
        older_documents=len(suite.documents) + len(suite.dev) - len(fresh),
        on_fresh=ages[0] if ages else None,
        fresh_gap=ages[2] if ages else None,
        look=find_ordinal_of_comparison(ledger, champion_id, candidate_id, suite.sha256),
        lost=compute_guard_losses_since_best_release(ledger, champion_id, evidence.guards),
    )


def make_evidence_of_evaluations(
    policy: ReleasePolicy,
    domains: tuple[str, ...],
    against: str,
    candidate: tuple[Mapping[str, Any], Sequence[EvalItem]],
    champion: tuple[Mapping[str, Any], Sequence[EvalItem]] | None,
) -> ReleaseEvidence:
    """Return the part of the evidence that follows from the two evaluations alone. Each is (summary, items). Pure."""
    mine = candidate[0]
    cloze = mine.get("cloze", {})
    values: dict[str, Any] = {
        "domains": domains,
        "documents": mine.get("documents", {}),
        "bits_per_byte": mine.get("bpb", {}),
        "trigram_bits_per_byte": {domain: row.get("trigram") for domain, row in mine.get("baselines", {}).items()},
        "cloze_items": cloze.get("items"),
        "cloze": cloze.get("share_right"),
        "checks": {name: (check["ok"], check["detail"]) for name, check in mine.get("parity", {}).items()},
    }
    if champion is None:
        return ReleaseEvidence(against=against, **values)
    other = champion[0]
    found = compare_items(candidate[1], champion[1], policy.target.weights)
    target, guards = found if found else (None, {})
    sealed = {item.item for item in candidate[1] if item.task == TASK}
    halves = compare_gains_of_two_document_sets(candidate[1], champion[1], sealed, policy.target.weights)
    if halves:
        values |= dict(zip(("on_sealed", "on_dev", "halves_gap"), halves, strict=True))
    failed = {name: check["detail"] for name, check in other.get("parity", {}).items() if check["ok"] is False}
    return ReleaseEvidence(
        against=against,
        champion_bits_per_byte=other.get("bpb", {}),
        champion_failed={} if champion[1] else failed,
        champion_cloze=other.get("cloze", {}).get("share_right"),
        noise_floor=other.get("noise_floor", {}),
        target=target,
        guards=guards,
        **values,
    )


def compute_token_shares_by_domain(ledger: Ledger, segment: int) -> dict[str, float]:
    """Return domain → share of the supervised tokens, largest first, in the token shards of a segment and of all segments before it.

    Documents that were quarantined later count too. Documents that a person removed do not count.
    """
    used = list_token_shards_of_lineage(ledger, segment)
    sql = """SELECT token_shard, domain, SUM(supervised_tokens) AS tokens FROM documents
        WHERE fate IN ('train', 'quarantined') AND token_shard IS NOT NULL GROUP BY token_shard, domain"""
    found: Counter[str] = Counter()
    for group in ledger.read(sql):
        if group["token_shard"] in used:
            found[group["domain"]] += int(group["tokens"])
    total = sum(found.values())
    return {name: count / total for name, count in sorted(found.items(), key=lambda one: (-one[1], one[0])) if count}


def _record(
    ledger: Ledger,
    policy: ReleasePolicy,
    candidate_id: int,
    champion_id: int | None,
    suite: Suite,
    evidence: ReleaseEvidence,
    tasks: TaskEvidence,
    evaluated: dict[str, Any],
) -> int:
    verdict = judge(policy, evidence, tasks)
    stored = replace_non_finite(evidence.to_json()) | {"suite_sha256": suite.sha256, "evaluations": evaluated}
    stored["policy"] = policy.model_dump(mode="json")
    if tasks:
        stored["tasks"] = replace_non_finite(asdict(tasks))
    stored["sha256"] = compute_evidence_sha256(stored)
    subject = Subject("candidate", candidate_id)
    values: dict[str, Any] = {
        "against": None if champion_id is None else Subject("candidate", champion_id),
        "policy_sha256": hash_policy(policy),
        "subject_sha256": CandidateRow.get(ledger, candidate_id).export_sha256,
    }
    same = [verdicts.c[name].is_not_distinct_from(value) for name, value in values.items()]
    with ledger.begin() as tx:
        # Only the newest verdict is compared: a change back to older evidence, such as a licence, is a new verdict.
        own = (verdicts.c.gate == GATE) & (verdicts.c.subject == subject)
        newest = sa.select(sa.func.max(verdicts.c.id)).where(own).scalar_subquery()
        for row in tx.execute(sa.select(verdicts.c.id, verdicts.c.evidence).where(verdicts.c.id == newest, *same)):
            if row.evidence.get("sha256") == stored["sha256"]:
                return int(row.id)
        number = record_verdict(
            tx, GATE, subject, **values, outcome=verdict.outcome, reasons=verdict.reasons, evidence=stored
        )
        if alone := find_gain_on_dev_half_only(policy, evidence):
            _note(tx, CandidateRow.get(ledger, candidate_id).segment, subject, number, alone)
        record_event(
            tx,
            "judged",
            subject,
            {"verdict": number, "outcome": verdict.outcome, "judge": compute_judge_version().to_json()},
        )
    return number


def _note(tx: sa.Connection, segment: int, subject: Subject, verdict: int, why: str) -> None:
    """Record an anomaly of the segment that the candidate comes from, at most one per segment."""
    own = (anomalies.c.segment == segment) & (anomalies.c.kind == GAIN_ON_DEV_ONLY)
    if tx.execute(sa.select(anomalies.c.id).where(own)).first() is None:
        last = tx.execute(sa.select(segments.c.last_step).where(segments.c.id == segment)).scalar_one()
        detail = {
            "step": last - 1,
            "kind": GAIN_ON_DEV_ONLY,
            "candidate": subject.number,
            "verdict": verdict,
            "why": str(why),
        }
        tx.execute(anomalies.insert().values(segment=segment, step=last - 1, kind=GAIN_ON_DEV_ONLY, detail=detail))
        record_event(tx, GAIN_ON_DEV_ONLY, subject, detail)
