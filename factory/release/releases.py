"""Releases a candidate in recoverable steps, a saga: ``decided`` → ``published`` (DESIGN §5).

Each step is idempotent, and is recorded when it is done. After a kill, ``finish_interrupted_releases`` or a second ``release_candidate`` continues
from the recorded state. The newest ``promoted`` or ``rolled_back`` event in the ledger decides which release is champion. The served link follows
the ledger. The factory repairs the link if a person or a crash changed it. MLflow's alias follows too (``factory.show``); no release waits for it.

Before a release is published, its export is hashed again and compared with the hashes in the verdict and in a person's approval. A verdict is out
of date when the champion has changed, or when present licences or anomalies would hold the candidate. A release that is decided but not yet
published is then withdrawn, and the candidate must be judged again.
"""

from __future__ import annotations

import time
from pathlib import Path

from factory.core.errors import InputError
from factory.core.workspace import PATIENCE
from factory.gates.release.recorded_verdict import find_hold_reasons, find_reason_not_overridable
from factory.gates.release.training_evidence import read_training_evidence
from factory.ledger.decisions import OVERRIDDEN, REJECTED, WITHDRAWN, find_decision, find_override
from factory.ledger.ledger import Ledger, record_event, releases
from factory.ledger.plant import Plant
from factory.ledger.rows import IMPORT, ON_CANDIDATES, ReleaseRow, Subject, VerdictRow, find_champion
from factory.ledger.snapshot import Snapshot
from factory.ledger.writing import find_next_key, insert_row
from factory.release import published_link
from factory.release.approvals import find_approver, record_approval
from factory.release.checks import (
    OutOfDateVerdictError,
    check_champion_unchanged,
    check_export_is_judged_one,
    check_export_unchanged,
    check_not_rewound,
    check_training_unchanged,
    check_verdict_current,
    get_newest_verdict,
    get_releasable_verdict,
)
from kernels.contract.message import Message

PUBLISHED = "published"

# A person can override a hold (``factory releases override N --reason "…"``), but only if the hold's only reason is that no gain was shown
# (``factory.gates.release.reasons.NOTHING_SHOWN``). The judge decides again, with the evidence and the policy that the verdict recorded, and
# with the present licences and anomalies of the training, which people may have changed.
LONGEST_REASON = 2000  # characters


def normalise_reason(reason: str) -> str:
    """Return a person's reason on one line. Raises: InputError for a reason without a letter or digit, or one that is too long."""
    why = " ".join("".join(letter if letter.isprintable() else " " for letter in reason).split())
    if not any(letter.isalnum() for letter in why):
        raise InputError(
            "releases.no_reason",
            "An override needs a reason, which the factory records. Nothing was released. Give the reason with '--reason \"…\"'",
        )
    if len(why) > LONGEST_REASON:
        raise InputError(
            "releases.long_reason",
            "The reason has {length:,} characters, but at most {limit:,} are allowed. Nothing was released",
            length=len(why),
            limit=LONGEST_REASON,
        )
    return why


def check_hold_can_be_overridden(plant: Plant, verdict: VerdictRow, by: str, why: str) -> dict[str, str]:
    """Return the detail of an override's event. Raises: InputError for a verdict that no person can override."""
    name = f"verdict {verdict.id} on {verdict.subject}"
    if (known := find_decision(plant.ledger, verdict)) and known.word == REJECTED:
        raise InputError(
            "releases.override_of_rejected",
            "the candidate of {verdict} was {decision}. A rejection cannot be overridden. Nothing was released",
            verdict=name,
            decision=str(known),
        )
    if verdict.outcome == "promote":
        raise InputError(
            "releases.override_of_promoted",
            "{verdict} is 'promote', not 'hold'. Nothing was released. Release the candidate with 'factory releases approve {candidate}'",
            verdict=name,
            candidate=verdict.subject_number,
        )
    if verdict.outcome != "hold":
        raise InputError(
            "releases.override_of_worse",
            "{verdict} is {outcome!r}, not 'hold': the candidate is worse or broken, and no person can override that. "
            "Nothing was released",
            verdict=name,
            outcome=verdict.outcome,
        )
    stored = verdict.read_evidence(plant.ledger)
    held = find_hold_reasons(stored, verdict.policy_sha256, name)
    if words := find_reason_not_overridable(held):
        raise InputError(
            "releases.not_overridable",
            "{verdict} has a reason that no person can override: {reasons} Nothing was released",
            verdict=name,
            reasons=words,
        )
    now = read_training_evidence(plant, verdict.subject_number)
    if words := find_reason_not_overridable(find_hold_reasons(stored, verdict.policy_sha256, name, **now)):
        raise InputError(
            "releases.not_overridable_now",
            "The release gate would hold back {subject} now for a reason that no person can override: {reasons} Nothing was released. Judge "
            "the candidate again with 'factory evaluate {candidate}'",
            subject=verdict.subject,
            reasons=words,
            candidate=verdict.subject_number,
        )
    return {"sha256": verdict.subject_sha256, "evidence_sha256": str(stored["sha256"]), "by": by, "why": why}


# -- the saga -----------------------------------------------------------------------------------------------------------
def release_candidate(
    plant: Plant,
    verdict_id: int,
    *,
    approved_by: str | None = None,
) -> int:
    """Release the candidate that a verdict promotes. Returns the release's number. A second call finishes an interrupted release.

    ``approved_by``: the person who approves with this call, if the policy requires approval.

    Raises: InputError when the verdict does not promote, is out of date, or judged another export; ApprovalNeededError when the policy
    requires a person's approval first.
    """
    verdict = get_releasable_verdict(plant.ledger, verdict_id)
    candidate = verdict.subject_number
    with plant.workspace.hold_lock("release", PATIENCE):
        saga = _Saga(plant)
        saga.finish_others(candidate)
        known = ReleaseRow.find_first(plant.ledger, "WHERE candidate = :candidate", candidate=candidate)
        if known is None:
            check_verdict_current(plant, verdict)
            check_export_is_judged_one(plant.ledger, verdict)
            if approved_by:
                record_approval(plant.ledger, verdict_id, approved_by)
            number = _decide(plant.ledger, verdict, find_approver(plant, verdict))
        else:
            number = known.number
            saga.check_begun(number)
        saga.advance(number)
    return number


def release_held_candidate(plant: Plant, candidate: int, by: str, why: str) -> int:
    """Release a held candidate because a person overrides the hold. Returns the release's number. A second call finishes an interrupted release.

    One transaction records the override and the release, with the hashes of the judged export and of the evidence.

    Raises: InputError without a reason, for a candidate that no person can override, and as ``release_candidate`` does.
    """
    why = normalise_reason(why)
    with plant.workspace.hold_lock("release", PATIENCE):
        saga = _Saga(plant)
        saga.finish_others(candidate)
        known = ReleaseRow.find_first(plant.ledger, "WHERE candidate = :candidate", candidate=candidate)
        if known is None:
            verdict = get_newest_verdict(plant.ledger, candidate)
            detail = check_hold_can_be_overridden(plant, verdict, by, why)
            check_verdict_current(plant, verdict)
            check_export_is_judged_one(plant.ledger, verdict)
            number = _decide(plant.ledger, verdict, by, detail)
        elif find_override(plant.ledger, VerdictRow.get(plant.ledger, known.verdict)) is None:
            raise InputError(
                "releases.was_not_held",
                "candidate {candidate} was already released as release {release}, and the gate had not held the candidate back. Nothing was changed",
                candidate=candidate,
                release=known.number,
            )
        else:
            number = known.number
            saga.check_begun(number)
        saga.advance(number)
    return number


def finish_interrupted_releases(plant: Plant) -> list[str]:
    """Finish interrupted releases, and point the served link at the ledger's champion.

    Returns a line for each action, and for each release that cannot be finished, for example because its export has changed.
    """
    if VerdictRow.find_first(plant.ledger, f"WHERE {ON_CANDIDATES}") is None:
        return []
    with plant.workspace.hold_lock("release", PATIENCE):
        saga = _Saga(plant)
        return saga.finish_others(None) + saga.serve()


def publish_release(plant: Plant, number: int) -> None:
    """Publish a decided release; a published one stays as it is. The caller holds the lock 'release'. Raises: InputError."""
    _Saga(plant).advance(number)


def roll_back_to_release(plant: Plant, number: int) -> None:
    """Make an older release champion again. Raises: InputError when it was not published, or its export has changed."""
    with plant.workspace.hold_lock("release", PATIENCE):
        saga = _Saga(plant)
        saga.finish_others(None)
        row, now = ReleaseRow.get(plant.ledger, number), find_champion(plant.ledger)
        if row.state != "published" or now is None:
            raise InputError(
                "releases.not_published",
                "release {release} is not published. See the published releases with 'factory status'",
                release=number,
            )
        check_export_unchanged(plant.ledger, row.candidate)
        if now.number != number:
            with plant.ledger.begin() as tx:
                record_event(tx, "rolled_back", Subject("release", number), {"from": now.number})
        saga.serve(expected=True)
    plant.progress.line(Message("releases.rolled_back", "release {release} is champion again", release=number))


def find_release_replaced_by_champion(ledger: Ledger) -> int:
    """Return the number of the release that the champion replaced. Raises: InputError when it replaced none."""
    now = find_champion(ledger)
    against = now and VerdictRow.get(ledger, now.verdict).against
    found = against and ReleaseRow.find_first(
        ledger, "WHERE candidate = :candidate", candidate=Subject.parse(against).number
    )
    if not now:
        raise InputError("releases.none", "No candidate has been released yet")
    if not found:
        raise InputError(
            "releases.first",
            "release {release} replaced no other release. Give the number of the release that is to become champion: 'factory releases rollback N'",
            release=now.number,
        )
    return found.number


class _Saga:
    """Takes the steps of a release. The caller holds the lock 'release'."""

    def __init__(self, plant: Plant) -> None:
        self.plant, self.workspace, self.ledger = plant, plant.workspace, plant.ledger

    def check_begun(self, number: int) -> None:
        """Check an interrupted release before it continues. A published release passes, because it is not undone. Raises: OutOfDateVerdictError."""
        row = ReleaseRow.get(self.ledger, number)
        if row.state != PUBLISHED and VerdictRow.get(self.ledger, row.verdict).gate != IMPORT:
            check_training_unchanged(self.plant, VerdictRow.get(self.ledger, row.verdict))

    def advance(self, number: int) -> None:
        """Publish a decided release. Raises: InputError, and then the state does not change."""
        row = ReleaseRow.get(self.ledger, number)
        if row.state == PUBLISHED:
            return
        verdict = VerdictRow.get(self.ledger, row.verdict)
        check_export_is_judged_one(self.ledger, verdict)
        check_champion_unchanged(self.ledger, verdict)
        self._publish(row)

    def _publish(self, row: ReleaseRow) -> None:
        published_link.publish_export(self.workspace, row.number, Path(row.export_path), row.export_sha256)
        with self.ledger.begin() as tx:
            tx.execute(releases.update().where(releases.c.number == row.number).values(state=PUBLISHED))
            record_event(tx, "promoted", Subject("release", row.number), {"candidate": row.candidate})
        self.plant.print_line(
            Message(
                "releases.published",
                "candidate {candidate} is released as release {release} and is now champion",
                release=row.number,
                candidate=row.candidate,
            )
        )

    def finish_others(self, candidate: int | None) -> list[str]:
        """Finish the interrupted releases of all other candidates. Returns a line for each. One that cannot be finished does not stop the others."""
        done: list[str] = []
        for row in ReleaseRow.select(self.ledger, "WHERE state <> 'published' ORDER BY number"):
            if row.candidate == candidate:
                continue
            try:
                self.check_begun(row.number)
                self.advance(row.number)
                done.append(
                    Message(
                        "releases.finished",
                        "the factory finished the interrupted release {release}",
                        release=row.number,
                    )
                )
            except InputError as error:
                if isinstance(error, OutOfDateVerdictError):
                    detail = {"why": str(error), "candidate": row.candidate}
                    with self.ledger.begin() as tx:
                        tx.execute(releases.delete().where(releases.c.number == row.number))
                        record_event(tx, WITHDRAWN, Subject("release", row.number), detail)
                done.append(
                    Message(
                        "releases.not_finished",
                        "release {release} cannot be finished: {why}",
                        release=row.number,
                        why=error.message,
                    )
                )
        return done

    def serve(self, expected: bool = False) -> list[str]:
        """Point the served link at the ledger's champion. With ``expected`` (a rollback), no repair is recorded.

        Returns a line if the link was wrong. Raises: InputError when the champion's export has changed.
        """
        row, note = find_champion(self.ledger), published_link.read_publication_record(self.workspace)
        if row is None or (note and (note["release"], note["export_sha256"]) == (row.number, row.export_sha256)):
            return []
        check_export_unchanged(self.ledger, row.candidate)
        published_link.publish_export(self.workspace, row.number, Path(row.export_path), row.export_sha256)
        done = Message(
            "releases.published_again",
            "the served link did not point at release {release}, so the factory published the release again",
            release=row.number,
        )
        if not expected:
            with self.ledger.begin() as tx:
                record_event(tx, "repaired", Subject("release", row.number), {"what": [done]})
        return [done]


# -- deciding -----------------------------------------------------------------------------------------------------------
def _decide(ledger: Ledger, verdict: VerdictRow, by: str, override: dict[str, str] | None = None) -> int:
    """Take the first step of a release: add a row to ``releases``, and record a person's override, if any. Returns the release's number."""
    candidate = verdict.subject_number
    values = {"candidate": candidate, "verdict": verdict.id, "state": "decided", "approved_by": by}
    with ledger.begin() as tx:
        check_not_rewound(Snapshot(tx, ledger.root), verdict)  # a person may rewind at any moment
        if override is not None:
            record_event(tx, OVERRIDDEN, Subject("verdict", verdict.id), dict(override))
        number = insert_row(tx, releases, number=find_next_key(tx, releases), created_at=time.time(), **values)
        record_event(tx, "release_decided", Subject("release", number), {"candidate": candidate, "verdict": verdict.id})
    return number
