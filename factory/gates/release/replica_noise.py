"""Finds the anneal that is due for replicas, and reads the results of earlier replicas. Replicas measure the effect of another data order.

Everything is read from the ledger. ``factory.replicas`` trains and measures replicas, and records an event about the anneal with the results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import stdev
from typing import Any

from factory.gates.release.policy import ReplicaNoisePolicy
from factory.ledger.rows import SegmentRow, SqlReader, Subject, find_champion

MEASURED = (
    "replicas_measured"  # event about an anneal: {release, recipe_sha256, documents, runs: [{domain: bits per byte}]}
)


@dataclass(frozen=True)
class ReplicaNoise:
    """Standard deviations in bits per byte of ``runs`` trainings that differ only in the order of their data."""

    runs: int
    by_domain: Mapping[str, float]
    target: float | None  # of the target, which weighs the domains as the policy does

    @classmethod
    def compute_from_runs(cls, runs: Sequence[Mapping[str, float]], weights: Mapping[str, float]) -> ReplicaNoise:
        """Return the noise of ``runs``. Each run is domain → bits per byte.

        >>> found = ReplicaNoise.compute_from_runs([{"code": 1.0, "docs": 2.0}, {"code": 1.2, "docs": 1.8}, {"code": 1.1, "docs": 2.2}], {})
        >>> found.runs, {name: round(value, 3) for name, value in found.by_domain.items()}, round(found.target, 3)
        (3, {'code': 0.1, 'docs': 0.2}, 0.087)
        """
        domains = sorted(set.intersection(*map(set, runs)))
        share = {domain: weights.get(domain, 0.0) if weights else 1.0 for domain in domains}
        total = sum(share.values())
        each = [sum(share[domain] * run[domain] for domain in domains) / total for run in runs] if total else []
        return cls(len(runs), {d: stdev(run[d] for run in runs) for d in domains}, stdev(each) if each else None)


def find_newest_replica_noise(db: SqlReader, weights: Mapping[str, float]) -> ReplicaNoise | None:
    """Return the noise that the newest replicas showed. None: no replicas were measured yet."""
    found = find_newest_replica_measurement(db)
    return ReplicaNoise.compute_from_runs(found["runs"], weights) if found else None


def find_newest_replica_measurement(db: SqlReader) -> dict[str, Any] | None:
    """Return the detail of the newest ``MEASURED`` event, with its ``subject``. None: there is no such event."""
    rows = db.read("SELECT subject, detail FROM events WHERE kind = :kind ORDER BY id DESC LIMIT 1", kind=MEASURED)
    return rows[0]["detail"] | {"subject": rows[0]["subject"]} if rows else None


def find_anneal_due_for_replicas(db: SqlReader, policy: ReplicaNoisePolicy) -> tuple[SegmentRow, int] | None:
    """Return the anneal for which replicas are due, and the number of its release. None: no replicas are due now."""
    best = find_champion(db)
    if not policy.count or best is None or best.number < policy.from_release:
        return None
    anneal = next((row for row in reversed(SegmentRow.read_lineage(db, best.segment)) if row.has_steps), None)
    if anneal is None or anneal.kind != "anneal" or anneal.parent is None:
        return None  # a candidate from an average of the trunk's checkpoints has no anneal to repeat
    before = find_newest_replica_measurement(db)
    if before is not None:
        same = anneal.recipe_sha256 == before["recipe_sha256"]
        if best.number <= before["release"] or (same and best.number - before["release"] < policy.every_releases):
            return None
    return anneal, best.number


def may_start_replicas(db: SqlReader, policy: ReplicaNoisePolicy, anneal: SegmentRow) -> bool:
    """True if enough steps were trained since the newest replicas, so that the trunk can wait for the replicas of this anneal."""
    before = find_newest_replica_measurement(db)
    trained = _steps_after(db, Subject.parse(before["subject"]).number if before else 0)
    return policy.count * (anneal.last_step - anneal.first_step) <= policy.steps_max * trained


def _steps_after(db: SqlReader, segment: int) -> int:
    """Return the steps that were trained in the segments after this one, including rewound segments."""
    sql = "SELECT SUM(last_step - first_step) AS steps FROM segments WHERE id > :id AND kind <> 'average' AND state IN ('done', 'rewound')"
    return int(db.read(sql, id=segment)[0]["steps"] or 0)
