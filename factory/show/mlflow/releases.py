"""Shows candidates and releases in MLflow's registry: each judged candidate with its decision, and the alias ``champion`` as in the ledger."""

from __future__ import annotations

from factory.core.errors import InputError
from factory.core.workspace import PATIENCE
from factory.ledger.decisions import APPROVED, APPROVED_BY_POLICY, OVERRIDDEN, REJECTED, find_decision, find_override
from factory.ledger.ledger import Ledger, record_event, releases
from factory.ledger.plant import Plant
from factory.ledger.rows import ON_CANDIDATES, CandidateRow, ReleaseRow, Subject, VerdictRow, find_champion
from factory.release.approvals import APPROVAL_TAG, describe_waiting_candidate, is_decision_by_person_needed
from factory.release.checks import get_newest_verdict
from factory.show.mlflow.outages import describe_single_failure
from factory.show.mlflow.registry import (
    CHAMPION,
    MODEL,
    SHOWN,
    describe_removed_data,
    find_candidate_version,
    find_newest_bundle_folder,
    is_version_complete,
    mark_version_complete,
    read_aliases,
    register_version,
)
from factory.show.mlflow.runs import MlflowTracking, join_reasons
from factory.show.mlflow.store import convert_mlflow_errors
from kernels.contract.message import Message

ANSWER_TAG, REASON_TAG = "approval_answer", "approval_reason"  # the factory's answer to a person; the person's reason
PENDING = "pending"
ALIAS_SET = "champion_shown"  # event: the version that the champion alias was set to


def show_releases(plant: Plant, tracking: MlflowTracking) -> None:
    """Register every judged candidate that MLflow does not show completely with its newest verdict and release; then set the champion alias.

    A candidate that cannot be shown, for example with a changed export, does not stop the others. The first such error is raised at the end.

    Raises: InputError; TrackingError.
    """
    if VerdictRow.find_first(plant.ledger, f"WHERE {ON_CANDIDATES}") is None:
        return  # no candidate was judged yet, so MLflow need not be imported
    with plant.workspace.hold_lock("release", PATIENCE):
        refused: list[Message] = []
        for candidate in _unshown(plant, tracking):
            try:
                register_candidate(plant, candidate)
            except Exception as error:
                refused.append(
                    Message(
                        "releases.not_shown",
                        "Candidate {candidate} cannot be shown in MLflow: {reason}",
                        candidate=candidate,
                        reason=describe_single_failure(error),
                    )
                )
        _point(plant, tracking)
    if refused:
        raise InputError(refused[0])


def _unshown(plant: Plant, tracking: MlflowTracking) -> list[int]:
    with convert_mlflow_errors("listing versions"):
        found = tracking.client.search_model_versions(f"name = '{MODEL}'")
    shown = {tuple(v.tags.get(key) for key in SHOWN) for v in found if is_version_complete(v)}
    ledger = plant.ledger
    released = {
        row.candidate: (
            str(row.number),
            describe_removed_data(ledger, row.number),
            find_newest_bundle_folder(ledger, row.number),
        )
        for row in ReleaseRow.select(ledger)
    }
    unshown = []
    for row in CandidateRow.select(ledger):
        verdict = VerdictRow.find_newest_on_candidate(ledger, row.id)
        nothing = (None, None, None)
        if verdict and (str(row.id), row.export_sha256, str(verdict.id), *released.get(row.id, nothing)) not in shown:
            unshown.append(row.id)
    return unshown


def _point(plant: Plant, tracking: MlflowTracking) -> None:
    """Set MLflow's champion alias to the ledger's champion. If somebody else moved it, record the repair. Raises: TrackingError."""
    row, client, ledger = find_champion(plant.ledger), tracking.client, plant.ledger
    want = _version(plant, tracking, row) if row else None
    known = ledger.read("SELECT detail FROM events WHERE kind = :kind ORDER BY id DESC LIMIT 1", kind=ALIAS_SET)
    given = known[0]["detail"]["version"] if known else None
    with convert_mlflow_errors("setting the alias"):
        found = read_aliases(client).get(CHAMPION)
        if found != want:
            if want is None:
                client.delete_registered_model_alias(MODEL, CHAMPION)
            else:
                client.set_registered_model_alias(MODEL, CHAMPION, want)
    with ledger.begin() as tx:
        if row and row.mlflow_version != want:
            tx.execute(releases.update().where(releases.c.number == row.number).values(mlflow_version=want))
        if found != want and found != given:
            moved = Message(
                "releases.alias_moved",
                "MLflow's champion was version {found}, but the ledger's champion is version {version}. The factory set the alias back.",
                found=found,
                version=want,
            )
            what = [moved]
            record_event(tx, "repaired", Subject("release", row.number) if row else MODEL, {"what": what})
        if given != want:
            record_event(tx, ALIAS_SET, "mlflow", {"version": want})


def _version(plant: Plant, tracking: MlflowTracking, row: ReleaseRow) -> str:
    """The version of a release's candidate. A deleted version is made again."""
    with convert_mlflow_errors("finding a version"):
        found = find_candidate_version(tracking.client, row.candidate, row.export_sha256)
    return str(found.version) if found else register_version(plant, tracking, row.candidate)


def register_candidate(plant: Plant, candidate_id: int) -> str:
    """Show a judged candidate in MLflow, whatever its verdict: a version with tags, the alias ``candidate`` and the report. Ask for approval.

    Returns the version. A person's answer about an older verdict is removed.

    Raises: InputError when the candidate was not judged or its export changed; TrackingError.
    """
    tracking = MlflowTracking.open(plant)
    verdict = get_newest_verdict(plant.ledger, candidate_id)
    with convert_mlflow_errors("finding a version"):
        before = find_candidate_version(tracking.client, candidate_id, verdict.subject_sha256)
    version = register_version(plant, tracking, candidate_id)
    _ask(plant, tracking, verdict, version, dict(before.tags) if before else {})
    mark_version_complete(tracking.client, version)
    return version


def _ask(plant: Plant, tracking: MlflowTracking, verdict: VerdictRow, version: str, given: dict[str, str]) -> None:
    """Show on a version that it waits for a person's decision, or which decision was made. ``given``: the version's tags."""
    known = make_decision_tags(plant.ledger, verdict)
    if known is None and (is_decision_by_person_needed(plant, verdict) or APPROVAL_TAG in given):
        if given.get(APPROVAL_TAG, OVERRIDDEN) != OVERRIDDEN and given.get("verdict_id") == str(verdict.id):
            return  # it was asked already, or a person's answer is not carried out yet
        asked = is_decision_by_person_needed(plant, verdict)
        known = (
            PENDING if asked else "",
            describe_waiting_candidate(verdict.subject_number)
            if asked
            else Message("releases.nothing_to_approve", "Verdict {verdict} needs no approval.", verdict=verdict.id),
        )
    if known is not None:
        set_approval_tags(tracking, version, given, *known)


def make_decision_tags(ledger: Ledger, verdict: VerdictRow) -> tuple[str, str] | None:
    """(tag ``approval``, tag ``approval_answer``) of a candidate about which a person decided; None if nobody decided."""
    release = ReleaseRow.find_first(ledger, "WHERE candidate = :candidate", candidate=verdict.subject_number)
    if release:
        by = release.approved_by or APPROVED_BY_POLICY
        if over := find_override(ledger, VerdictRow.get(ledger, release.verdict)):
            return OVERRIDDEN, Message(
                "releases.released_overridden",
                "released by {person} as release {release}, although the gate blocked the candidate: {reason}",
                release=release.number,
                person=over["by"],
                reason=over["why"],
            )
        approved = Message(
            "releases.released_approved",
            "approved by {person} and released as release {release}",
            release=release.number,
            person=by,
        )
        return None if by == APPROVED_BY_POLICY else (APPROVED, approved)
    decision = find_decision(ledger, verdict)
    return (REJECTED, str(decision)) if decision and decision.word == REJECTED else None


def set_approval_tags(
    tracking: MlflowTracking, version: str, old_tags: dict[str, str], approval: str, answer: str
) -> None:
    """Set the tags that answer a person's approval or rejection. Raises: TrackingError."""
    with convert_mlflow_errors("answering an approval"):
        for key, value in ((ANSWER_TAG, join_reasons([answer])), (APPROVAL_TAG, approval)):
            if old_tags.get(key) != value:
                tracking.client.set_model_version_tag(MODEL, version, key, value)
