"""Decides by a random draw, before a segment trains, whether the segment is audited, for which patches, and in which window of steps.

A window is the steps between two consecutive checkpoints. The window of an average is its one step. If a segment was stopped and goes on, the steps
from its newest checkpoint to the next are drawn too, because only these steps come from a resume. Only the ledger stores the draws, and the trainer
cannot read the ledger. This module also lists the waiting and the finished audits.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from factory.audit.policy import AuditPolicy
from factory.code_loop.revalidating import AGENT as REVALIDATOR
from factory.code_loop.revalidating import AUDIT
from factory.code_loop.reverting import AUDITED
from factory.git import repository
from factory.ledger.ledger import Ledger, record_event
from factory.ledger.plant import Plant
from factory.ledger.rows import IMPORT, ProposalRow, SegmentRow, SqlReader, Subject, VerdictRow
from factory.retrying.trainer_deaths import find_newest_checkpoint_step
from factory.training.certificate import TRAINING_FILES

DRAWN = "audit_drawn"


@dataclass(frozen=True)
class AuditWindow:
    """The steps [first, last) of a segment, and the numbers of the proposals under audit, in the order in which they were merged.

    A segment whose window has ``last`` = 0 is not audited. The window of an average has ``first`` = ``last``. ``resumed``: the (first, last) of more
    windows, each of which begins with a resume.
    """

    first: int
    last: int
    patches: tuple[int, ...] = ()
    resumed: tuple[tuple[int, int], ...] = ()

    @classmethod
    def find_for_segment(cls, db: SqlReader, segment: int) -> Self | None:
        """Return the window that was drawn for a segment; None before the draw."""
        sql = "SELECT detail FROM events WHERE kind = :kind AND subject = :subject ORDER BY id DESC LIMIT 1"
        found = db.read(sql, kind=DRAWN, subject=str(Subject("segment", segment)))
        detail: dict[str, Any] = found[0]["detail"] if found else {}
        resumed = tuple((first, last) for first, last in detail.get("resumed", ()))
        return cls(detail["first"], detail["last"], tuple(detail["patches"]), resumed) if found else None

    @property
    def is_audited(self) -> bool:
        return self.last > 0

    @property
    def step_count(self) -> int:
        return self.last - self.first

    def list_parts(self) -> list[AuditWindow]:
        """Return a window without ``resumed`` for each window, in the order of the draws."""
        return [replace(self, first=a, last=b, resumed=()) for a, b in ((self.first, self.last), *self.resumed)]


def draw_audit_window(plant: Plant, row: SegmentRow) -> AuditWindow | None:
    """Draw and record the window of a segment that is about to train; a second call returns the same window. None if no agent patched its code.

    If the segment was stopped and now goes on from a checkpoint of its own, the steps up to the next checkpoint are drawn with the same probability.

    Raises: ConfigError, RepositoryError.
    """
    known = AuditWindow.find_for_segment(plant.ledger, row.id)
    if row.kind == IMPORT or (known is not None and not row.has_steps):
        return known
    policy = AuditPolicy.load(plant.workspace.policy_path("gates/audit.yaml"))
    if known is not None:
        return _draw_resumed_window(plant, row, known, policy)
    patches = list_merged_agent_patches(plant, row.code_commit)
    windows = list_possible_windows(row)
    if not patches or not windows:
        return None
    chosen, share = choose_patches_to_audit(
        [patch.number for patch in patches], count_agreeing_audits_by_patch(plant.ledger), policy
    )
    first, last = secrets.choice(windows) if _is_drawn(share) else (0, 0)
    return record_audit_window(plant.ledger, row.id, AuditWindow(first, last, tuple(chosen)))


def _draw_resumed_window(plant: Plant, row: SegmentRow, known: AuditWindow, policy: AuditPolicy) -> AuditWindow:
    """Draw the window that begins at the segment's newest checkpoint, from which its trainer will resume."""
    newest = find_newest_checkpoint_step(row)
    if newest is None or not row.first_step < newest < row.last_step or not known.patches:
        return known
    first, last = list_possible_windows(replace(row, first_step=newest, parent=row.parent or row.id))[0]
    _, share = choose_patches_to_audit(known.patches, count_agreeing_audits_by_patch(plant.ledger), policy)
    if (first, last) in ((known.first, known.last), *known.resumed) or not _is_drawn(share):
        return known
    drawn = (
        replace(known, resumed=(*known.resumed, (first, last)))
        if known.is_audited
        else replace(known, first=first, last=last)
    )
    return record_audit_window(plant.ledger, row.id, drawn)


def _is_drawn(share: float) -> bool:
    return secrets.SystemRandom().random() < share


def record_audit_window(ledger: Ledger, segment: int, window: AuditWindow) -> AuditWindow:
    """Record a drawn window in the ledger, and return the window."""
    with ledger.begin() as tx:
        record_event(tx, DRAWN, Subject("segment", segment), asdict(window))
    return window


def list_possible_windows(row: SegmentRow) -> list[tuple[int, int]]:
    """Return (first, last) of every window of a segment that could be audited, in order.

    A window that begins with new weights has two steps or more, because the effect of rounding is measured after its first step.

    >>> from types import SimpleNamespace
    >>> segment = SimpleNamespace(first_step=10, last_step=22, parent=1, recipe_json={"checkpoint_every": 5}, has_steps=True)
    >>> list_possible_windows(segment)
    [(10, 15), (15, 20), (20, 22)]
    """
    if not row.has_steps:
        return [(row.last_step, row.last_step)]
    every = int(row.recipe_json["checkpoint_every"])
    ends = [*range(row.first_step - row.first_step % every + every, row.last_step, every), row.last_step]
    found = list(itertools.pairwise([row.first_step, *ends]))
    if row.parent is None and found[0][1] == row.first_step + 1:
        found[0:2] = [(row.first_step, found[1][1]), found[1]] if len(found) > 1 else []
    return found


def choose_patches_to_audit(
    patches: Sequence[int], agreements: Counter[int], policy: AuditPolicy
) -> tuple[Sequence[int], float]:
    """Return (the patches to audit, the probability of an audit). A patch cannot be undone below a newer patch.

    Therefore all patches from the oldest new patch on are audited together.

    >>> choose_patches_to_audit([4, 7, 9], Counter({4: 3, 7: 1, 9: 3}), AuditPolicy())
    ([7, 9], 1.0)
    """
    new = [number for number in patches if agreements[number] < policy.windows]
    return (patches[patches.index(new[0]) :], policy.share) if new else (patches, policy.later_share)


def count_agreeing_audits_by_patch(ledger: Ledger) -> Counter[int]:
    """Return, by proposal, in how many windows live training agreed with a replay without the proposal."""
    rows = ledger.read("SELECT detail FROM events WHERE kind = :kind", kind=AUDITED)
    return Counter(n for row in rows if row["detail"]["outcome"] == "promote" for n in row["detail"]["patches"])


def list_merged_agent_patches(plant: Plant, commit: str) -> list[ProposalRow]:
    """Return the approved patches of agents that a commit contains and that change training files, in the order in which they were merged.

    A patch that undoes another patch does not count, because it restores earlier code. Raises: RepositoryError.
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
        and repository.is_ancestor(code, commit, row.commit)
        and any(
            c.path.startswith(TRAINING_FILES) for c in repository.read_file_changes(code, row.base_commit, row.commit)
        )
    ]
    return sorted(found, key=lambda row: order.get(str(Subject("proposal", row.number)), -1))


def find_due_audits(db: SqlReader, policy: AuditPolicy) -> list[int]:
    """Return the numbers of the segments whose audit is due now, oldest first."""
    drawn = {
        Subject.parse(row["subject"]).number
        for row in db.read("SELECT subject FROM events WHERE kind = :kind", kind=DRAWN)
    }
    return [number for number in sorted(drawn) if _waits(db, number, policy)]


def _waits(db: SqlReader, number: int, policy: AuditPolicy) -> bool:
    window = AuditWindow.find_for_segment(db, number)
    if window is None or not window.is_audited or SegmentRow.get(db, number).state != "done":
        return False
    newest = VerdictRow.find_newest(db, AUDIT, Subject("segment", number))
    due = newest is None or time.time() >= newest.created_at + policy.again_after_seconds
    return due and not is_audit_over(db, number, policy)


def is_audit_over(db: SqlReader, number: int, policy: AuditPolicy) -> bool:
    """Return whether the audit of a segment has a verdict, and no further try would be made by itself."""
    newest = VerdictRow.find_newest(db, AUDIT, Subject("segment", number))
    if newest is None or newest.outcome != "hold":
        return newest is not None
    hidden = newest.read_evidence(db).get("hidden_by_rounding")  # another try would show the same
    return bool(hidden) or count_audit_tries(db, number) >= policy.tries


def count_audit_tries(db: SqlReader, number: int) -> int:
    """Return how many verdicts the audit of a segment has, including 'hold'."""
    which = "WHERE gate = :gate AND subject = :subject"
    return len(VerdictRow.select(db, which, gate=AUDIT, subject=str(Subject("segment", number))))


def list_audits(ledger: SqlReader) -> list[dict[str, Any]]:
    """Return all drawn audits, oldest first, each with its segment, window, patches, and the verdict if there is one."""
    subjects = dict.fromkeys(
        row["subject"] for row in ledger.read("SELECT subject FROM events WHERE kind = :kind ORDER BY id", kind=DRAWN)
    )
    found = []
    for subject in map(Subject.parse, subjects):
        window, verdict = (
            AuditWindow.find_for_segment(ledger, subject.number),
            VerdictRow.find_newest(ledger, AUDIT, subject),
        )
        if window is not None and window.is_audited:
            judged = verdict.read_with_evidence(ledger) if verdict else None
            found.append({"segment": subject.number, **vars(window), "verdict": judged})
    return found
