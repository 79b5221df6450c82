"""Which segments are audited, for which patches, and which of their windows: drawn by the factory before a segment trains. And which audits wait
to be done, and what became of those that were.

A window is what lies between two checkpoints that follow one another. The draw is in the ledger alone, which the trainer cannot read.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from factory.audit.policy import AuditPolicy
from factory.code_loop.revalidating import AGENT as REVALIDATOR
from factory.code_loop.revalidating import AUDIT
from factory.code_loop.reverting import AUDITED
from factory.git import repository
from factory.ledger.ledger import Ledger, record
from factory.ledger.plant import Plant
from factory.ledger.rows import ProposalRow, Reads, SegmentRow, Subject, VerdictRow
from factory.training.certificate import TRAINED_WITH

DRAWN = "audit_drawn"


@dataclass(frozen=True)
class AuditWindow:
    """Steps [first, last) of a segment, and the numbers of the proposals under audit, in the order in which they were merged.

    ``first`` = ``last``: this segment is not audited.
    """

    first: int
    last: int
    patches: tuple[int, ...] = ()

    @classmethod
    def of(cls, db: Reads, segment: int) -> Self | None:
        """What was drawn for a segment; None: nothing yet."""
        sql = "SELECT detail FROM events WHERE kind = :kind AND subject = :subject ORDER BY id DESC LIMIT 1"
        found = db.read(sql, kind=DRAWN, subject=str(Subject("segment", segment)))
        detail: dict[str, Any] = found[0]["detail"] if found else {}
        return cls(detail["first"], detail["last"], tuple(detail["patches"])) if found else None

    @property
    def steps(self) -> int:
        return self.last - self.first


def draw(plant: Plant, row: SegmentRow) -> AuditWindow | None:
    """The window of a segment that is about to train, drawn once and recorded; None where it trains with no agent's patch.

    Raises: ConfigError, RepositoryError.
    """
    known = AuditWindow.of(plant.ledger, row.id)
    if known is not None or row.kind == "average":
        return known
    policy = AuditPolicy.load(plant.workspace.policy("gates/audit.yaml"))
    patches = merged_patches(plant, row.code_commit)
    windows = windows_of(row)
    if not patches or not windows:
        return None
    chosen, share = under_audit([patch.number for patch in patches], agreed(plant.ledger), policy)
    first, last = secrets.choice(windows) if secrets.SystemRandom().random() < share else (0, 0)
    return note(plant.ledger, row.id, AuditWindow(first, last, tuple(chosen)))


def note(ledger: Ledger, segment: int, window: AuditWindow) -> AuditWindow:
    """Record a draw."""
    with ledger.begin() as tx:
        record(tx, DRAWN, Subject("segment", segment), asdict(window))
    return window


def windows_of(row: SegmentRow) -> list[tuple[int, int]]:
    """(first, last) of every window of a segment, in order. Its first window only where a checkpoint goes before it.

    >>> from types import SimpleNamespace
    >>> windows_of(SimpleNamespace(first_step=10, last_step=22, parent=1, recipe_json={"checkpoint_every": 5}))
    [(10, 15), (15, 20), (20, 22)]
    """
    every = int(row.recipe_json["checkpoint_every"])
    ends = [*range(row.first_step - row.first_step % every + every, row.last_step, every), row.last_step]
    return list(itertools.pairwise([row.first_step, *ends] if row.parent else ends))


def under_audit(patches: Sequence[int], agreed: Counter[int], policy: AuditPolicy) -> tuple[Sequence[int], float]:
    """(the patches to audit, the share of segments). From the oldest new one on: an older patch cannot be undone below a newer one.

    >>> under_audit([4, 7, 9], Counter({4: 3, 7: 1, 9: 3}), AuditPolicy())
    ([7, 9], 1.0)
    """
    new = [number for number in patches if agreed[number] < policy.windows]
    return (patches[patches.index(new[0]) :], policy.share) if new else (patches, policy.later_share)


def agreed(ledger: Ledger) -> Counter[int]:
    """By proposal: the windows that agreed with the code without it."""
    rows = ledger.read("SELECT detail FROM events WHERE kind = :kind", kind=AUDITED)
    return Counter(n for row in rows if row["detail"]["outcome"] == "promote" for n in row["detail"]["patches"])


def merged_patches(plant: Plant, commit: str) -> list[ProposalRow]:
    """The approved patches of agents in a commit that change what training reads, in the order in which they were merged.

    A patch that undoes another brings back what was there before it: it is none. Raises: RepositoryError.
    """
    code = plant.workspace.repository
    approved = ProposalRow.select(plant.ledger, "WHERE state = 'approved' ORDER BY number")
    events = plant.ledger.read("SELECT subject FROM events WHERE kind = 'proposal_approved' ORDER BY id")
    order = {event["subject"]: number for number, event in enumerate(events)}
    found = [
        row
        for row in approved
        if row.gate != AUDIT
        and row.agent != REVALIDATOR
        and row.commit
        and repository.contains(code, commit, row.commit)
        and any(c.path.startswith(TRAINED_WITH) for c in repository.changes(code, row.base_commit, row.commit))
    ]
    return sorted(found, key=lambda row: order.get(str(Subject("proposal", row.number)), -1))


def waiting(db: Reads, policy: AuditPolicy) -> list[int]:
    """The segments whose audit should be done now, oldest first."""
    drawn = {
        Subject.parse(row["subject"]).number
        for row in db.read("SELECT subject FROM events WHERE kind = :kind", kind=DRAWN)
    }
    return [number for number in sorted(drawn) if _waits(db, number, policy)]


def _waits(db: Reads, number: int, policy: AuditPolicy) -> bool:
    window = AuditWindow.of(db, number)
    if window is None or not window.steps or SegmentRow.get(db, number).state != "done":
        return False
    newest = VerdictRow.newest(db, AUDIT, Subject("segment", number))
    if newest is None:
        return True
    due = time.time() >= newest.created_at + policy.again_after_seconds
    return newest.outcome == "hold" and due and tries(db, number) < policy.tries


def tries(db: Reads, number: int) -> int:
    """How often the audit of a segment was judged, 'hold' included."""
    which = "WHERE gate = :gate AND subject = :subject"
    return len(VerdictRow.select(db, which, gate=AUDIT, subject=str(Subject("segment", number))))


def every_audit(ledger: Reads) -> list[dict[str, Any]]:
    """All that was drawn, oldest first: segment, window, patches, and the verdict where there is one."""
    subjects = dict.fromkeys(
        row["subject"] for row in ledger.read("SELECT subject FROM events WHERE kind = :kind ORDER BY id", kind=DRAWN)
    )
    found = []
    for subject in map(Subject.parse, subjects):
        window, verdict = AuditWindow.of(ledger, subject.number), VerdictRow.newest(ledger, AUDIT, subject)
        if window is not None and window.steps:
            judged = verdict.with_evidence(ledger) if verdict else None
            found.append({"segment": subject.number, **vars(window), "verdict": judged})
    return found
