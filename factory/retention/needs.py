"""Finds the files that unfinished work, releases, open verdicts, open anomalies and audits need, from the ledger.

``removal_decisions`` keeps all these files, whatever the policy says.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from factory.audit.audit_windows import DRAWN, AuditWindow, is_audit_over
from factory.audit.policy import AuditPolicy
from factory.gates.release.anomaly_policy import AnomalyPolicy
from factory.gates.release.policy import ReleasePolicy
from factory.gates.release.replica_noise import find_anneal_due_for_replicas
from factory.git.repository import get_live_commit
from factory.ledger.anomalies import CLOSED, list_open_anomalies, read_newest_details_by_anomaly
from factory.ledger.plant import Plant
from factory.ledger.rows import CandidateRow, ProposalRow, ReleaseRow, SegmentRow, SqlReader, Subject, VerdictRow
from kernels.contract.message import Message

Reasons = dict[int, str]


@dataclass
class RetentionNeeds:
    """Why files are needed: the first reason that was found. Keys are numbers of segments, unless a comment says otherwise."""

    segments: Reasons = field(default_factory=dict)  # all files of a segment
    checkpoints: Reasons = field(default_factory=dict)  # all checkpoints of a segment
    ends: Reasons = field(default_factory=dict)  # the last checkpoint of a segment
    steps: dict[tuple[int, int], str] = field(default_factory=dict)  # a checkpoint, by segment and step
    exports: Reasons = field(default_factory=dict)  # the export of a segment's candidate
    audits: Reasons = field(default_factory=dict)  # the audit of a segment
    diagnoses: Reasons = field(default_factory=dict)  # a diagnosis, by number of its anomaly
    commits: dict[str, str] = field(default_factory=dict)  # worktrees and compiled kernels, by commit

    @classmethod
    def find_in_ledger(cls, plant: Plant) -> RetentionNeeds:
        """Find the needs in one snapshot of the ledger. Raises: ConfigError, RepositoryError."""
        kinds = AnomalyPolicy.load(plant.workspace.policy_path("anomalies.yaml")).kinds
        audits = AuditPolicy.load(plant.workspace.policy_path("gates/audit.yaml"))
        found = cls()
        with plant.ledger.snapshot() as db:
            found._unfinished(db)
            found._trunk(db)
            found._candidates(db)
            found._anomalies(db, kinds)
            found._audits(db, audits)
            found._replicas(db, ReleasePolicy.load(plant.workspace.policy_path("gates/release.yaml")))
            for row in ProposalRow.select(db, "WHERE state IN ('drafted', 'judged')"):
                if row.commit:
                    why = Message(
                        "needs.proposal", "proposal {proposal} is {state}", proposal=row.number, state=row.state
                    )
                    found.commits.setdefault(row.commit, why)
        found.commits[get_live_commit(plant.workspace.repository)] = Message(
            "needs.live_code", "this commit is the live code"
        )
        return found

    def _unfinished(self, db: SqlReader) -> None:
        rows = SegmentRow.select(db)
        for row in rows:
            replaced = any(
                other.id > row.id and (other.kind, other.parent) == (row.kind, row.parent) and row.kind != "average"
                for other in rows
            )
            if row.state in ("done", "rewound", "abandoned") or (replaced and row.state != "planned"):
                continue
            why = Message("needs.segment", "segment {segment} is {state}", segment=row.id, state=row.state)
            self.segments.setdefault(row.id, why)
            self.commits.setdefault(row.code_commit, why)
            if row.parent is not None:
                self.ends.setdefault(
                    row.parent, Message("needs.parent", "{why} and starts from this checkpoint", why=why)
                )
            if row.kind == "average":
                self._averaged(db, row.id, why)

    def _trunk(self, db: SqlReader) -> None:
        """Find the checkpoints from which the next segments start, and from which the gates train."""
        trunk = SegmentRow.find_first(db, "WHERE kind = 'trunk' AND state = 'done' ORDER BY id DESC")
        if trunk is None:
            return
        self.ends.setdefault(trunk.id, Message("needs.trunk", "the trunk continues from this checkpoint"))
        farthest = SegmentRow.find_first(db, "WHERE kind = 'trunk' AND state = 'done' ORDER BY last_step DESC, id DESC")
        assert farthest is not None
        self.ends.setdefault(
            farthest.id, Message("needs.proposals", "measurements of proposals start from this checkpoint")
        )
        if anneal := SegmentRow.find_first(db, "WHERE kind = 'anneal' AND state = 'done' ORDER BY id DESC"):
            self.ends.setdefault(anneal.id, Message("needs.anneal", "the trunk may continue from this checkpoint"))

    def _candidates(self, db: SqlReader) -> None:
        released = {row.candidate: row.number for row in ReleaseRow.select(db)}
        rows = CandidateRow.select(db)
        done = SegmentRow.select(db, "WHERE kind <> 'trunk' AND state = 'done'")
        for segment in {row.id for row in done} - {row.segment for row in rows}:
            why = Message("needs.not_exported", "segment {segment} is not exported yet", segment=segment)
            self.ends.setdefault(segment, why)
        newest = max(released, default=0)
        rewound = {row.id for row in SegmentRow.select(db, "WHERE state = 'rewound'")}
        for row in rows:
            verdict = VerdictRow.find_newest(db, "release", Subject("candidate", row.id))
            spoiled = bool(rewound) and any(one.id in rewound for one in SegmentRow.read_lineage(db, row.segment))
            if row.id in released:
                why = Message("needs.release", "release {release} was made from this segment", release=released[row.id])
            elif verdict is None:
                why = Message("needs.not_judged", "candidate {candidate} is not judged yet", candidate=row.id)
            elif verdict.outcome != "reject" and row.id > newest and not spoiled:
                why = Message(
                    "needs.open_candidate",
                    "candidate {candidate} is open: its verdict is {outcome!r}, and no newer candidate is released",
                    candidate=row.id,
                    outcome=verdict.outcome,
                )
            else:
                continue
            self.exports.setdefault(row.segment, why)
            self.ends.setdefault(row.segment, why)

    def _anomalies(self, db: SqlReader, kinds: Collection[str]) -> None:
        """Find all segments of the lineage of each open anomaly: its diagnosis may replay from any earlier checkpoint."""
        counts = {row.id for row in SegmentRow.select(db, "WHERE state <> 'rewound'")}
        open_ = lambda number: Message("needs.open_anomaly", "anomaly {anomaly} is open", anomaly=number)
        for anomaly in list_open_anomalies(db, kinds):
            if anomaly.segment in counts:
                for row in SegmentRow.read_lineage(db, anomaly.segment):
                    self.segments.setdefault(row.id, open_(anomaly.id))
        closed = read_newest_details_by_anomaly(db, CLOSED)
        rows = db.read("SELECT id, segment FROM anomalies")
        self.diagnoses |= {
            row["id"]: open_(row["id"]) for row in rows if row["id"] not in closed and row["segment"] in counts
        }

    def _audits(self, db: SqlReader, policy: AuditPolicy) -> None:
        drawn = {
            Subject.parse(row["subject"]).number
            for row in db.read("SELECT subject FROM events WHERE kind = :kind", kind=DRAWN)
        }
        for number in drawn:
            window, row = AuditWindow.find_for_segment(db, number), SegmentRow.get(db, number)
            over = is_audit_over(db, number, policy)
            if window is None or not window.is_audited or over or row.state == "rewound":
                continue
            why = Message("needs.audit", "the audit of segment {segment} is not done", segment=number)
            self.audits.setdefault(number, why)
            self.checkpoints.setdefault(number, why)
            if row.parent is not None:
                self.ends.setdefault(row.parent, why)
            if row.kind == "average":
                self._averaged(db, row.id, why)

    def _averaged(self, db: SqlReader, segment: int, why: str) -> None:
        sql = "SELECT detail FROM events WHERE kind = 'segment_planned' AND subject = :subject"
        for event in db.read(sql, subject=str(Subject("segment", segment))):
            for source in event["detail"]["average"]["sources"]:
                averaged = Message("needs.averaged", "{why} and averages this checkpoint", why=why)
                self.steps.setdefault((source["segment"], source["step"]), averaged)

    def _replicas(self, db: SqlReader, policy: ReleasePolicy) -> None:
        if wanted := find_anneal_due_for_replicas(db, policy.replicas):
            row, _ = wanted
            why = Message("needs.replicas", "replicas of segment {segment} will be trained", segment=row.id)
            self.ends.setdefault(row.id, why)
            self.commits.setdefault(row.code_commit, why)
            if row.parent is not None:
                self.ends.setdefault(row.parent, why)
