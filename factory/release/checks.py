"""What must hold before a candidate is released: its verdict promotes it, is up to date, and judged the bytes that are there."""

from __future__ import annotations

from pathlib import Path

from factory.core.errors import InputError
from factory.core.exports import folder_sha256
from factory.gates.release.evidence import ReleaseEvidence
from factory.gates.release.judge import of_training
from factory.gates.release.policy import ReleasePolicy
from factory.gates.release.training_now import training_now
from factory.ledger.anomalies import rewound_in
from factory.ledger.decisions import override_on
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.ledger.rows import CandidateRow, Reads, Subject, VerdictRow, champion


class OutOfDate(InputError):
    """The verdict was against a champion that is no longer champion, or licences or anomalies of the training are others by now."""


def promotion(ledger: Ledger, verdict_id: int) -> VerdictRow:
    """A verdict of the release gate that promotes. Raises: InputError."""
    verdict = VerdictRow.first(ledger, "WHERE gate = 'release' AND id = :id", id=verdict_id)
    if verdict is None:
        raise InputError(f"there is no verdict {verdict_id} of the release gate; 'factory status' lists them")
    if verdict.outcome != "promote":
        why = "; ".join(verdict.reasons)
        raise InputError(f"verdict {verdict_id} on {verdict.subject} is {verdict.outcome!r}, not 'promote': {why}")
    return verdict


def releasable(ledger: Ledger, verdict_id: int) -> VerdictRow:
    """A verdict of the release gate that promotes, or that a person overrode. Raises: InputError."""
    verdict = VerdictRow.first(ledger, "WHERE gate = 'release' AND id = :id", id=verdict_id)
    if verdict is not None and verdict.outcome == "hold" and override_on(ledger, verdict):
        return verdict
    return promotion(ledger, verdict_id)


def check_newest(ledger: Ledger, verdict: VerdictRow) -> None:
    """Raises: InputError when the candidate was judged again since."""
    newest = newest_verdict(ledger, verdict.number)
    if newest.id != verdict.id:
        raise InputError(
            f"verdict {verdict.id} on {verdict.subject} is out of date: verdict {newest.id} says {newest.outcome!r}"
        )


def check_current(plant: Plant, verdict: VerdictRow) -> None:
    """Raises: InputError when the candidate was judged again since, its training was rewound, or champion, licences or anomalies are others."""
    check_newest(plant.ledger, verdict)
    check_not_rewound(plant.ledger, verdict)
    check_champion(plant.ledger, verdict)
    check_training(plant, verdict)


def check_not_rewound(db: Reads, verdict: VerdictRow) -> None:
    """Raises: InputError."""
    if spoiled := rewound_in(db, CandidateRow.get(db, verdict.number).segment):
        raise InputError(
            f"{verdict.subject} is not released: its training went wrong, segment {spoiled[0]} was rewound"
        )


def check_champion(ledger: Ledger, verdict: VerdictRow) -> None:
    """Raises: OutOfDate when the candidate was judged against another champion than the one of now."""
    now = champion(ledger)
    subject = str(Subject("candidate", now.candidate)) if now else None
    if verdict.against != subject:
        raise OutOfDate(
            f"verdict {verdict.id} judged {verdict.subject} against {verdict.against or 'no champion'}, but "
            f"{subject or 'no candidate'} is champion now: evaluate it again"
        )


def check_training(plant: Plant, verdict: VerdictRow) -> None:
    """Licences and anomalies of its training as they are now: people may have changed both since it was judged.

    Raises: OutOfDate when they hold the candidate; ConfigError.
    """
    now = training_now(plant, verdict.number)
    if now["releasable"] is None and verdict.evidence(plant.ledger).get("releasable") is None:
        now["releasable"] = 1.0  # nothing is recorded of what it was trained on, and no verdict of it said otherwise
    policy = ReleasePolicy.load(plant.workspace.policy("gates/release.yaml"))
    if held := of_training(policy, ReleaseEvidence(**now)):
        raise OutOfDate(
            f"{verdict.subject} would be held now: {held[0].message} 'factory evaluate {verdict.number}' judges it again"
        )


def check_judged(ledger: Ledger, verdict: VerdictRow) -> None:
    """Raises: InputError when the export is not, byte for byte, the one that the verdict judged."""
    row = check_export(ledger, verdict.number)
    if row.export_sha256 != verdict.subject_sha256:
        raise InputError(f"verdict {verdict.id} judged another export of {verdict.subject}: evaluate it again")


def newest_verdict(ledger: Ledger, candidate_id: int) -> VerdictRow:
    """Raises: InputError when there is no such candidate, or it was not judged."""
    verdict = VerdictRow.newest(ledger, "release", Subject("candidate", candidate_id))
    if verdict is None:
        CandidateRow.get(ledger, candidate_id)
        raise InputError(f"candidate {candidate_id} was not judged yet: run 'factory evaluate {candidate_id}'")
    return verdict


def check_export(ledger: Ledger, candidate_id: int) -> CandidateRow:
    """The candidate, after making sure that its export is, byte for byte, the one it was recorded with.

    Raises: InputError.
    """
    row = CandidateRow.get(ledger, candidate_id)
    found = folder_sha256(Path(row.export_path))
    if found != row.export_sha256:
        raise InputError(
            f"candidate {candidate_id}: {row.export_path} is not what was recorded (sha256 {found[:12]}…, "
            f"recorded {row.export_sha256[:12]}…): nothing was released; restore the export, or evaluate a new candidate"
        )
    return row
