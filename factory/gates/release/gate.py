"""The release gate: gather the evidence on a candidate, judge it, record the verdict.

The champion is measured on the candidate's suite if it was not yet. A verdict on the same subject, policy and evidence is recorded once.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from typing import Any

import sqlalchemy as sa

from factory.core.policy_file import policy_sha256
from factory.core.progress import Progress
from factory.core.workspace import Workspace
from factory.evals.evaluator import current_suite, evaluate_on, items_of
from factory.evals.statistics import compare
from factory.evals.suite import Suite
from factory.gates.release.anomaly_policy import AnomalyPolicy
from factory.gates.release.judge import FIRST_RELEASE, PROMOTE, ReleaseEvidence, judge
from factory.gates.release.licences import not_releasable, tokens_by_licence
from factory.gates.release.line import GATE, look_at, lost_since_best
from factory.gates.release.policy import ReleasePolicy
from factory.gates.release.with_tasks import with_tasks
from factory.ingest.rules.policy import DataPolicy
from factory.ledger.anomalies import open_in, rewound_in
from factory.ledger.ledger import Ledger, record, verdicts
from factory.ledger.rows import CandidateRow, EvaluationRow, ReleaseRow, Subject, champion
from factory.ledger.writing import record_verdict
from factory.tasks.comparing import TaskEvidence
from factory.tasks.tiers import measure_due
from kernels.contract.files import finite


def decide(workspace: Workspace, ledger: Ledger, candidate_id: int, progress: Progress) -> int:
    """Judge a candidate on the current held-out items; returns the verdict's id. Idempotent.

    A candidate that has been released keeps the verdict that released it. Raises: InputError for an unknown candidate; ConfigError.
    """
    policy = ReleasePolicy.load(workspace.policy("gates/release.yaml"))
    released = ReleaseRow.first(ledger, "WHERE candidate = :candidate", candidate=candidate_id)
    if released:
        return released.verdict
    suite = current_suite(workspace, ledger)
    ours = evaluate_on(workspace, ledger, candidate_id, suite, progress)
    best = champion(ledger)
    champion_id = best.candidate if best else None
    theirs = (
        None if champion_id is None else evaluate_on(workspace, ledger, champion_id, suite, progress, released=True)
    )
    evidence = gather(ledger, policy, suite, champion_id, ours, theirs)
    licences = DataPolicy.load(workspace.policy("data.yaml")).licences
    tokens = tokens_by_licence(ledger, CandidateRow.get(ledger, candidate_id).segment)
    other = not_releasable(licences, tokens)
    evidence = replace(
        evidence,
        anomalies=_open_anomalies(workspace, ledger, candidate_id),
        releasable=1 - min(1.0, sum(other.values())) if any(tokens.values()) else None,
        not_releasable=other,
    )
    tasks = measure_due(workspace, ledger, candidate_id, progress, would_promote=False)
    if with_tasks(policy, judge(policy, evidence), tasks).outcome == PROMOTE:
        tasks = measure_due(workspace, ledger, candidate_id, progress, would_promote=True)
    evaluated = {"candidate": ours, "champion": theirs}
    return _record(ledger, policy, candidate_id, champion_id, suite, evidence, tasks, evaluated)


def gather(
    ledger: Ledger, policy: ReleasePolicy, suite: Suite, champion_id: int | None, ours: int, theirs: int | None
) -> ReleaseEvidence:
    """Read the two evaluations and compare them item by item."""
    mine = EvaluationRow.get(ledger, ours).summary
    cloze = mine.get("cloze", {})
    measured: dict[str, Any] = {
        "domains": tuple(suite.domains),
        "documents": mine.get("documents", {}),
        "bits_per_byte": mine.get("bpb", {}),
        "trigram_bits_per_byte": {domain: row.get("trigram") for domain, row in mine.get("baselines", {}).items()},
        "cloze_items": cloze.get("items"),
        "cloze": cloze.get("share_right"),
        "checks": {name: (check["ok"], check["detail"]) for name, check in mine.get("parity", {}).items()},
    }
    if champion_id is None or theirs is None:
        return ReleaseEvidence(against=FIRST_RELEASE, **measured)
    other = EvaluationRow.get(ledger, theirs).summary
    measured |= {
        "champion_bits_per_byte": other.get("bpb", {}),
        "champion_cloze": other.get("cloze", {}).get("share_right"),
        "noise_floor": other.get("noise_floor", {}),
    }
    found = compare(items_of(ledger, ours), items_of(ledger, theirs), policy.target.weights)
    target, guards = found if found else (None, {})
    measured |= {
        "look": look_at(ledger, champion_id, EvaluationRow.get(ledger, ours).candidate, suite.sha256),
        "lost": lost_since_best(ledger, guards),
    }
    return ReleaseEvidence(against=str(Subject("candidate", champion_id)), target=target, guards=guards, **measured)


def _open_anomalies(workspace: Workspace, ledger: Ledger, candidate_id: int) -> tuple[str, ...]:
    """Of the training that a candidate comes from: what is open, and what was rewound."""
    kinds = AnomalyPolicy.load(workspace.policy("anomalies.yaml")).kinds
    segment = CandidateRow.get(ledger, candidate_id).segment
    found = open_in(ledger, segment, kinds)
    words = [
        f"{row.kind} at step {row.step} of segment {row.segment} (anomaly {row.id}, which is open)" for row in found
    ]
    return (*words, *(f"segment {number} was rewound" for number in rewound_in(ledger, segment)))


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
    verdict = with_tasks(policy, judge(policy, evidence), tasks)
    stored = finite(evidence.to_json()) | {"suite_sha256": suite.sha256, "evaluations": evaluated}
    if tasks:
        stored["tasks"] = finite(asdict(tasks))
    stored["sha256"] = hashlib.sha256(json.dumps(stored, sort_keys=True).encode()).hexdigest()
    subject = Subject("candidate", candidate_id)
    values: dict[str, Any] = {
        "against": None if champion_id is None else Subject("candidate", champion_id),
        "policy_sha256": policy_sha256(policy),
        "subject_sha256": CandidateRow.get(ledger, candidate_id).export_sha256,
    }
    same = [verdicts.c[name].is_not_distinct_from(value) for name, value in values.items()]
    with ledger.begin() as tx:
        known = sa.select(verdicts.c.id, verdicts.c.evidence).where(
            verdicts.c.gate == GATE, verdicts.c.subject == subject, *same
        )
        for row in tx.execute(known):
            if row.evidence.get("sha256") == stored["sha256"]:
                return int(row.id)
        number = record_verdict(
            tx, GATE, subject, **values, outcome=verdict.outcome, reasons=verdict.reasons, evidence=stored
        )
        record(tx, "judged", subject, {"verdict": number, "outcome": verdict.outcome})
    return number
