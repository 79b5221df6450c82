"""Checks before a release that the verdict promotes the candidate, is up to date, and judged the present bytes of the export."""

from __future__ import annotations

from pathlib import Path

from factory.core.errors import InputError
from factory.core.exports import hash_export_folder
from factory.gates.release.evidence import ReleaseEvidence
from factory.gates.release.judge import make_training_reasons
from factory.gates.release.policy import ReleasePolicy
from factory.gates.release.training_evidence import read_training_evidence
from factory.ledger.anomalies import list_rewound_segments_of_lineage
from factory.ledger.decisions import find_override
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.ledger.rows import CandidateRow, SqlReader, Subject, VerdictRow, find_champion


class OutOfDateVerdictError(InputError):
    """The champion, or licences or anomalies of the training, have changed since the verdict."""


def get_promoting_verdict(ledger: Ledger, verdict_id: int) -> VerdictRow:
    """Return a verdict of the release gate. Raises: InputError when the verdict does not exist or does not promote."""
    verdict = VerdictRow.find_first(ledger, "WHERE gate = 'release' AND id = :id", id=verdict_id)
    if verdict is None:
        raise InputError(
            "checks.no_verdict",
            "The release gate has no verdict {verdict}. See all verdicts with 'factory status'",
            verdict=verdict_id,
        )
    if verdict.outcome != "promote":
        raise InputError(
            "checks.not_promoted",
            "verdict {verdict} on {subject} is {outcome!r}, not 'promote': {reasons}",
            verdict=verdict_id,
            subject=verdict.subject,
            outcome=verdict.outcome,
            reasons="; ".join(verdict.reasons),
        )
    return verdict


def get_releasable_verdict(ledger: Ledger, verdict_id: int) -> VerdictRow:
    """Return a verdict of the release gate that promotes, or a hold that a person overrode. Raises: InputError."""
    verdict = VerdictRow.find_first(ledger, "WHERE gate = 'release' AND id = :id", id=verdict_id)
    if verdict is not None and verdict.outcome == "hold" and find_override(ledger, verdict):
        return verdict
    return get_promoting_verdict(ledger, verdict_id)


def check_verdict_newest(ledger: Ledger, verdict: VerdictRow) -> None:
    """Raises: InputError when the candidate has a newer verdict."""
    newest = get_newest_verdict(ledger, verdict.subject_number)
    if newest.id != verdict.id:
        raise InputError(
            "checks.newer_verdict",
            "verdict {verdict} on {subject} is out of date: the newer verdict {newest} is {outcome!r}",
            verdict=verdict.id,
            subject=verdict.subject,
            newest=newest.id,
            outcome=newest.outcome,
        )


def check_verdict_current(plant: Plant, verdict: VerdictRow) -> None:
    """Raises: InputError if the candidate has a newer verdict, if its training was rewound, or if champion, licences or anomalies have changed."""
    check_verdict_newest(plant.ledger, verdict)
    check_not_rewound(plant.ledger, verdict)
    check_champion_unchanged(plant.ledger, verdict)
    check_training_unchanged(plant, verdict)


def check_not_rewound(db: SqlReader, verdict: VerdictRow) -> None:
    """Raises: InputError when a segment of the candidate's training was rewound."""
    if spoiled := list_rewound_segments_of_lineage(db, CandidateRow.get(db, verdict.subject_number).segment):
        raise InputError(
            "checks.rewound",
            "{subject} is not released, because segment {segment} of its training was rewound",
            subject=verdict.subject,
            segment=spoiled[0],
        )


def check_champion_unchanged(ledger: Ledger, verdict: VerdictRow) -> None:
    """Raises: OutOfDateVerdictError when the champion has changed since the verdict."""
    now = find_champion(ledger)
    subject = str(Subject("candidate", now.candidate)) if now else None
    if verdict.against != subject:
        raise OutOfDateVerdictError(
            "checks.other_champion",
            "verdict {verdict} judged {subject} against {against}, but {champion} is champion now. Judge the candidate again with 'factory "
            "evaluate {candidate}'",
            verdict=verdict.id,
            subject=verdict.subject,
            against=verdict.against or "no champion",
            champion=subject or "no candidate",
            candidate=verdict.subject_number,
        )


def check_training_unchanged(plant: Plant, verdict: VerdictRow) -> None:
    """Check the present licences and anomalies of the training. People may have changed both since the verdict.

    Raises: OutOfDateVerdictError if they would now hold back the candidate; ConfigError.
    """
    now = read_training_evidence(plant, verdict.subject_number)
    if now["releasable"] is None and verdict.read_evidence(plant.ledger).get("releasable") is None:
        now["releasable"] = 1.0  # the training data are not recorded, and were not at the verdict either
    policy = ReleasePolicy.load(plant.workspace.policy_path("gates/release.yaml"))
    if held := make_training_reasons(policy, ReleaseEvidence(**now)):
        raise OutOfDateVerdictError(
            "checks.held_now",
            "The release gate would hold back {subject} now: {why} Judge the candidate again with 'factory evaluate {candidate}'",
            subject=verdict.subject,
            why=held[0].message,
            candidate=verdict.subject_number,
        )


def check_export_is_judged_one(ledger: Ledger, verdict: VerdictRow) -> None:
    """Raises: InputError when the bytes of the export are not those that the verdict judged."""
    row = check_export_unchanged(ledger, verdict.subject_number)
    if row.export_sha256 != verdict.subject_sha256:
        raise InputError(
            "checks.other_export",
            "verdict {verdict} judged another export of {subject}. Judge the current export with 'factory evaluate {candidate}'",
            verdict=verdict.id,
            subject=verdict.subject,
            candidate=verdict.subject_number,
        )


def get_newest_verdict(ledger: Ledger, candidate_id: int) -> VerdictRow:
    """Return the newest verdict on a candidate. Raises: InputError for an unknown candidate, or one without a verdict."""
    verdict = VerdictRow.find_newest_on_candidate(ledger, candidate_id)
    if verdict is None:
        CandidateRow.get(ledger, candidate_id)
        raise InputError(
            "checks.not_judged",
            "candidate {candidate} has not been judged yet: run 'factory evaluate {candidate}'",
            candidate=candidate_id,
        )
    return verdict


def check_export_unchanged(ledger: Ledger, candidate_id: int) -> CandidateRow:
    """Return the candidate. Raises: InputError when the bytes of its export are not those that the ledger recorded."""
    row = CandidateRow.get(ledger, candidate_id)
    found = hash_export_folder(Path(row.export_path))
    if found != row.export_sha256:
        raise InputError(
            "checks.changed_export",
            "candidate {candidate}: {export} has changed (SHA-256 {found}…, recorded {recorded}…). Nothing was released. "
            "Restore the export, or evaluate a new candidate",
            candidate=candidate_id,
            export=row.export_path,
            found=found[:12],
            recorded=row.export_sha256[:12],
        )
    return row
