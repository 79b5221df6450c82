"""Releases: a recoverable saga, ``decided`` → ``published`` (DESIGN §5).

Each step is idempotent and is recorded after it is done; killed anywhere, ``reconcile`` (or the same ``release`` again) goes
on from the recorded state. The ledger decides who is champion: the newest ``promoted`` or ``rolled_back`` event. The served link
follows it, and is put back when a person or a crash moved it; MLflow's alias follows it too (``factory.show``), which no release waits for.

What is released is what was judged: before it is public the export is hashed again and compared with the verdict's hash; a
person's approval, where the policy asks for one, is recorded with that hash too. A verdict against a champion that is no
longer champion is out of date, and so is one whose licences or anomalies hold the candidate by now: its release is withdrawn
until it is public, and the candidate must be judged again.
"""

from __future__ import annotations

import time
from pathlib import Path

from factory.core.errors import InputError
from factory.core.workspace import PATIENCE
from factory.gates.release.recorded import held_by, not_overridable
from factory.gates.release.training_now import training_now
from factory.ledger.decisions import OVERRIDDEN, REJECTED, WITHDRAWN, decision_on, override_on
from factory.ledger.ledger import Ledger, record, releases
from factory.ledger.plant import Plant
from factory.ledger.rows import ReleaseRow, Subject, VerdictRow, champion
from factory.ledger.snapshot import Snapshot
from factory.ledger.writing import insert, next_key
from factory.release import serving
from factory.release.approvals import approve, approver
from factory.release.checks import (
    OutOfDate,
    check_champion,
    check_current,
    check_export,
    check_judged,
    check_not_rewound,
    check_training,
    newest_verdict,
    releasable,
)

PUBLISHED = "published"

# A person's override of a hold: what may be released all the same, by whom and why (``factory releases override N --reason "…"``).
# Only what was held because too little was shown (``factory.gates.release.reasons.NOTHING_SHOWN``) may be. The judge is asked again, of the
# evidence and the policy that the verdict recorded, so what a person overrides is what was judged; and of the licences and anomalies of its
# training as they are now, as people may have changed both since.
LONGEST_REASON = 2000


def reason_of(words: str) -> str:
    """A person's reason, on one line. Raises: InputError for one without a letter or digit."""
    why = " ".join("".join(letter if letter.isprintable() else " " for letter in words).split())
    if not any(letter.isalnum() for letter in why):
        raise InputError('an override needs a reason, which stays on record: --reason "…"; nothing was released')
    if len(why) > LONGEST_REASON:
        raise InputError(
            f"a reason has at most {LONGEST_REASON:,} characters, this one has {len(why):,}; nothing was released"
        )
    return why


def override_of(plant: Plant, verdict: VerdictRow, by: str, why: str) -> dict[str, str]:
    """The event's detail. Raises: InputError for a verdict that does not hold, or holds for what no person overrides."""
    name = f"verdict {verdict.id} on {verdict.subject}"
    if (known := decision_on(plant.ledger, verdict)) and known.word == REJECTED:
        raise InputError(f"{name} was {known}; no override of it counts; nothing was released")
    if verdict.outcome != "hold":
        reasons = {
            "promote": f"'factory releases approve {verdict.number}' releases it",
            "reject": "it was shown to be worse or broken, and no person overrides that",
        }
        raise InputError(f"{name} is {verdict.outcome!r}, not 'hold': {reasons[verdict.outcome]}; nothing was released")
    stored = verdict.evidence(plant.ledger)
    held = held_by(stored, verdict.policy_sha256, name)
    if words := not_overridable(held):
        raise InputError(f"{name} holds for what no person overrides: {words} Nothing was released")
    now = training_now(plant, verdict.number)
    if words := not_overridable(held_by(stored, verdict.policy_sha256, name, **now)):
        raise InputError(
            f"{verdict.subject} would be held now for what no person overrides: {words} 'factory evaluate {verdict.number}' judges it again; "
            "nothing was released"
        )
    return {"sha256": verdict.subject_sha256, "evidence_sha256": str(stored["sha256"]), "by": by, "why": why}


# -- the saga -----------------------------------------------------------------------------------------------------------
def release(
    plant: Plant,
    verdict_id: int,
    *,
    approved_by: str | None = None,
) -> int:
    """Release the candidate that a verdict promotes; safe to call again, finishes what was begun. Returns its number.

    approved_by: the person who approves by this call, where the policy requires approval.

    Raises: InputError when the verdict does not promote, is out of date, or the export is not what was judged;
    ApprovalNeeded when the policy wants a person first.
    """
    verdict = releasable(plant.ledger, verdict_id)
    candidate = verdict.number
    with plant.workspace.lock("release", PATIENCE):
        saga = _Saga(plant)
        saga.finish_others(candidate)
        known = ReleaseRow.first(plant.ledger, "WHERE candidate = :candidate", candidate=candidate)
        if known is None:
            check_current(plant, verdict)
            check_judged(plant.ledger, verdict)
            if approved_by:
                approve(plant.ledger, verdict_id, approved_by)
            number = _decide(plant.ledger, verdict, approver(plant, verdict))
        else:
            number = known.number
            saga.check_begun(number)
        saga.advance(number)
    return number


def override(plant: Plant, candidate: int, by: str, why: str) -> int:
    """Release a candidate that is held, by a person's decision; safe to call again, finishes what was begun. Returns the release's number.

    The override is recorded with the release in one transaction, bound to the hashes of what was judged and of the evidence.

    Raises: InputError without a reason, for a candidate that is not held, or held for what no person overrides, and as ``release`` does.
    """
    why = reason_of(why)
    with plant.workspace.lock("release", PATIENCE):
        saga = _Saga(plant)
        saga.finish_others(candidate)
        known = ReleaseRow.first(plant.ledger, "WHERE candidate = :candidate", candidate=candidate)
        if known is None:
            verdict = newest_verdict(plant.ledger, candidate)
            detail = override_of(plant, verdict, by, why)
            check_current(plant, verdict)
            check_judged(plant.ledger, verdict)
            number = _decide(plant.ledger, verdict, by, detail)
        elif override_on(plant.ledger, VerdictRow.get(plant.ledger, known.verdict)) is None:
            raise InputError(
                f"candidate {candidate} is release {known.number} already, and was not held; nothing was changed"
            )
        else:
            number = known.number
            saga.check_begun(number)
        saga.advance(number)
    return number


def reconcile(plant: Plant) -> list[str]:
    """Finish half releases, put the served link back to the ledger's champion.

    Returns what was done, one line each; nothing to do → empty. What cannot be finished (an export that was tampered with)
    is among the lines as well.
    """
    if VerdictRow.first(plant.ledger, "WHERE gate = 'release'") is None:
        return []
    with plant.workspace.lock("release", PATIENCE):
        saga = _Saga(plant)
        return saga.finish_others(None) + saga.serve()


def rollback(plant: Plant, number: int) -> None:
    """Make an older, published release champion again. Raises: InputError when there is none or its export changed."""
    with plant.workspace.lock("release", PATIENCE):
        saga = _Saga(plant)
        saga.finish_others(None)
        row, now = ReleaseRow.get(plant.ledger, number), champion(plant.ledger)
        if row.state != "published" or now is None:
            raise InputError(f"release {number} is not published; 'factory status' lists those that are")
        check_export(plant.ledger, row.candidate)
        if now.number != number:
            with plant.ledger.begin() as tx:
                record(tx, "rolled_back", Subject("release", number), {"from": now.number})
        saga.serve(expected=True)
    plant.progress.line(f"release {number} is champion again")


def release_before(ledger: Ledger) -> int:
    """Number of the release that the champion replaced. Raises: InputError when there is none."""
    now = champion(ledger)
    against = now and VerdictRow.get(ledger, now.verdict).against
    found = against and ReleaseRow.first(
        ledger, "WHERE candidate = :candidate", candidate=Subject.parse(against).number
    )
    if not found:
        raise InputError(f"release {now.number} replaced none: name one" if now else "nothing was released yet")
    return found.number


class _Saga:
    """The steps of a release; the caller holds the release lock."""

    def __init__(self, plant: Plant) -> None:
        self.plant, self.workspace, self.ledger = plant, plant.workspace, plant.ledger

    def check_begun(self, number: int) -> None:
        """Before one that was begun earlier goes on. What is public is not undone. Raises: OutOfDate."""
        row = ReleaseRow.get(self.ledger, number)
        if row.state != PUBLISHED:
            check_training(self.plant, VerdictRow.get(self.ledger, row.verdict))

    def advance(self, number: int) -> None:
        """Make a release public that was decided. Raises: InputError, and the state stays."""
        row = ReleaseRow.get(self.ledger, number)
        if row.state == PUBLISHED:
            return
        verdict = VerdictRow.get(self.ledger, row.verdict)
        check_judged(self.ledger, verdict)
        check_champion(self.ledger, verdict)
        self._publish(row)

    def _publish(self, row: ReleaseRow) -> None:
        serving.publish(self.workspace, row.number, Path(row.export_path), row.export_sha256)
        with self.ledger.begin() as tx:
            tx.execute(releases.update().where(releases.c.number == row.number).values(state=PUBLISHED))
            record(tx, "promoted", Subject("release", row.number), {"candidate": row.candidate})
        self.plant.say(f"release {row.number}: candidate {row.candidate} is champion")

    def finish_others(self, candidate: int | None) -> list[str]:
        """Finish the half releases of every other candidate; one that cannot be finished is reported, and stops nothing."""
        done = []
        for row in ReleaseRow.select(self.ledger, "WHERE state <> 'published' ORDER BY number"):
            if row.candidate == candidate:
                continue
            try:
                self.check_begun(row.number)
                self.advance(row.number)
                done.append(f"finished release {row.number}, which had been interrupted")
            except InputError as error:
                if isinstance(error, OutOfDate):
                    detail = {"why": str(error), "candidate": row.candidate}
                    with self.ledger.begin() as tx:
                        tx.execute(releases.delete().where(releases.c.number == row.number))
                        record(tx, WITHDRAWN, Subject("release", row.number), detail)
                done.append(f"release {row.number} cannot be finished: {error}")
        return done

    def serve(self, expected: bool = False) -> list[str]:
        """Point the served link at the ledger's champion. ``expected``: a rollback, so no repair is recorded.

        Raises: InputError when its export is not what was judged.
        """
        row, note = champion(self.ledger), serving.served(self.workspace)
        if row is None or (note and (note["release"], note["export_sha256"]) == (row.number, row.export_sha256)):
            return []
        check_export(self.ledger, row.candidate)
        serving.publish(self.workspace, row.number, Path(row.export_path), row.export_sha256)
        done = f"release {row.number} was not what is served: published again"
        if not expected:
            with self.ledger.begin() as tx:
                record(tx, "repaired", Subject("release", row.number), {"what": [done]})
        return [done]


# -- deciding -----------------------------------------------------------------------------------------------------------
def _decide(ledger: Ledger, verdict: VerdictRow, by: str, override: dict[str, str] | None = None) -> int:
    """The first step, and the only one that chooses: a row in ``releases``, and a person's override with it. Returns its number."""
    candidate = verdict.number
    values = {"candidate": candidate, "verdict": verdict.id, "state": "decided", "approved_by": by}
    with ledger.begin() as tx:
        check_not_rewound(Snapshot(tx, ledger.root), verdict)  # a person may rewind at any moment
        if override is not None:
            record(tx, OVERRIDDEN, Subject("verdict", verdict.id), dict(override))
        number = insert(tx, releases, number=next_key(tx, releases), created_at=time.time(), **values)
        record(tx, "release_decided", Subject("release", number), {"candidate": candidate, "verdict": verdict.id})
    return number
