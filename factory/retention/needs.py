"""What of a workspace something needs: work that is not finished, a release, an open verdict, an open anomaly, an audit.

Read from the ledger alone. ``choosing`` keeps all of it, whatever the policy says.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from factory.audit.drawing import DRAWN, AuditWindow, tries
from factory.audit.policy import AuditPolicy
from factory.code_loop.revalidating import AUDIT
from factory.gates.release.anomaly_policy import AnomalyPolicy
from factory.gates.release.policy import ReleasePolicy
from factory.gates.release.replicas import due
from factory.git.repository import live_commit
from factory.ledger.anomalies import CLOSED, newest_about, open_anomalies
from factory.ledger.plant import Plant
from factory.ledger.rows import CandidateRow, ProposalRow, Reads, ReleaseRow, SegmentRow, Subject, VerdictRow

Reasons = dict[int, str]


@dataclass
class Needs:
    """By number, the first reason that was found. Of a segment in ``segments``, ``ends`` and ``steps`` speak of checkpoints alone."""

    segments: Reasons = field(default_factory=dict)  # all that was kept of it
    checkpoints: Reasons = field(default_factory=dict)  # all of its checkpoints
    ends: Reasons = field(default_factory=dict)  # its last one
    steps: dict[tuple[int, int], str] = field(default_factory=dict)  # (segment, step)
    exports: Reasons = field(default_factory=dict)  # of the candidate of a segment
    audits: Reasons = field(default_factory=dict)  # of a segment
    diagnoses: Reasons = field(default_factory=dict)  # of an anomaly
    commits: dict[str, str] = field(default_factory=dict)  # worktrees and what was compiled from them

    @classmethod
    def of(cls, plant: Plant) -> Needs:
        """At one moment of the ledger. Raises: ConfigError, RepositoryError."""
        kinds = AnomalyPolicy.load(plant.workspace.policy("anomalies.yaml")).kinds
        audits = AuditPolicy.load(plant.workspace.policy("gates/audit.yaml"))
        found = cls()
        with plant.ledger.snapshot() as db:
            found._unfinished(db)
            found._trunk(db)
            found._candidates(db)
            found._anomalies(db, kinds)
            found._audits(db, audits)
            found._replicas(db, ReleasePolicy.load(plant.workspace.policy("gates/release.yaml")))
            for row in ProposalRow.select(db, "WHERE state IN ('drafted', 'judged')"):
                if row.commit:
                    found.commits.setdefault(row.commit, f"proposal {row.number} is {row.state}")
        found.commits[live_commit(plant.workspace.repository)] = "it is the live code"
        return found

    def _unfinished(self, db: Reads) -> None:
        rows = SegmentRow.select(db)
        for row in rows:
            replaced = any(
                other.id > row.id and (other.kind, other.parent) == (row.kind, row.parent) and row.kind != "average"
                for other in rows
            )
            if row.state in ("done", "rewound", "abandoned") or (replaced and row.state != "planned"):
                continue
            why = f"segment {row.id} is {row.state}"
            self.segments.setdefault(row.id, why)
            self.commits.setdefault(row.code_commit, why)
            if row.parent is not None:
                self.ends.setdefault(row.parent, f"{why} and goes on from it")
            if row.kind == "average":
                sql = "SELECT detail FROM events WHERE kind = 'segment_planned' AND subject = :subject"
                for event in db.read(sql, subject=str(Subject("segment", row.id))):
                    for source in event["detail"]["average"]["sources"]:
                        self.steps.setdefault((source["segment"], source["step"]), f"{why} and averages it")

    def _trunk(self, db: Reads) -> None:
        """What the next segments go on from, and what the gates' training starts from."""
        trunk = SegmentRow.first(db, "WHERE kind = 'trunk' AND state = 'done' ORDER BY id DESC")
        if trunk is None:
            return
        self.ends.setdefault(trunk.id, "the trunk goes on from it")
        farthest = SegmentRow.first(db, "WHERE kind = 'trunk' AND state = 'done' ORDER BY last_step DESC, id DESC")
        assert farthest is not None
        self.ends.setdefault(farthest.id, "proposals are measured from it")
        if anneal := SegmentRow.first(db, "WHERE kind = 'anneal' AND state = 'done' ORDER BY id DESC"):
            self.ends.setdefault(anneal.id, "the trunk may go on from it")

    def _candidates(self, db: Reads) -> None:
        released = {row.candidate: row.number for row in ReleaseRow.select(db)}
        rows = CandidateRow.select(db)
        done = SegmentRow.select(db, "WHERE kind <> 'trunk' AND state = 'done'")
        for segment in {row.id for row in done} - {row.segment for row in rows}:
            self.ends.setdefault(segment, f"segment {segment} is not exported yet")
        newest = max(released, default=0)
        rewound = {row.id for row in SegmentRow.select(db, "WHERE state = 'rewound'")}
        for row in rows:
            verdict = VerdictRow.newest(db, "release", Subject("candidate", row.id))
            spoiled = bool(rewound) and any(one.id in rewound for one in SegmentRow.lineage(db, row.segment))
            if row.id in released:
                why = f"release {released[row.id]} is made of it"
            elif verdict is None:
                why = f"candidate {row.id} is not judged yet"
            elif verdict.outcome != "reject" and row.id > newest and not spoiled:
                why = f"candidate {row.id} is open: {verdict.outcome}, and nothing newer is released"
            else:
                continue
            self.exports.setdefault(row.segment, why)
            self.ends.setdefault(row.segment, why)

    def _anomalies(self, db: Reads, kinds: Collection[str]) -> None:
        """Of an open one the whole lineage, as it may begin to be replayed from any checkpoint before it."""
        counts = {row.id for row in SegmentRow.select(db, "WHERE state <> 'rewound'")}
        for anomaly in open_anomalies(db, kinds):
            if anomaly.segment in counts:
                for row in SegmentRow.lineage(db, anomaly.segment):
                    self.segments.setdefault(row.id, f"anomaly {anomaly.id} is open")
        closed = newest_about(db, CLOSED)
        rows = db.read("SELECT id, segment FROM anomalies")
        self.diagnoses |= {
            row["id"]: f"anomaly {row['id']} is open"
            for row in rows
            if row["id"] not in closed and row["segment"] in counts
        }

    def _audits(self, db: Reads, policy: AuditPolicy) -> None:
        drawn = {
            Subject.parse(row["subject"]).number
            for row in db.read("SELECT subject FROM events WHERE kind = :kind", kind=DRAWN)
        }
        for number in drawn:
            window, row = AuditWindow.of(db, number), SegmentRow.get(db, number)
            verdict = VerdictRow.newest(db, AUDIT, Subject("segment", number))
            over = verdict is not None and (verdict.outcome != "hold" or tries(db, number) >= policy.tries)
            if window is None or not window.steps or over or row.state == "rewound":
                continue
            why = f"the audit of segment {number} is not done"
            self.audits.setdefault(number, why)
            self.checkpoints.setdefault(number, why)
            if row.parent is not None:
                self.ends.setdefault(row.parent, why)

    def _replicas(self, db: Reads, policy: ReleasePolicy) -> None:
        if wanted := due(db, policy.replicas):
            row, _ = wanted
            why = f"replicas of segment {row.id} are to be trained"
            self.ends.setdefault(row.id, why)
            self.commits.setdefault(row.code_commit, why)
            if row.parent is not None:
                self.ends.setdefault(row.parent, why)
