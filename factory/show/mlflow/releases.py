"""What MLflow's registry shows of candidates and releases: each judged one with what was decided, the alias ``champion`` where the ledger has it."""

from __future__ import annotations

from factory.core.errors import InputError
from factory.core.workspace import PATIENCE
from factory.ledger.decisions import APPROVED, BY_POLICY, OVERRIDDEN, REJECTED, decision_on, override_on
from factory.ledger.ledger import Ledger, record, releases
from factory.ledger.plant import Plant
from factory.ledger.rows import CandidateRow, ReleaseRow, Subject, VerdictRow, champion
from factory.release.approvals import APPROVAL_TAG, how_to_answer, waits
from factory.release.checks import newest_verdict
from factory.show.mlflow.outages import of_one_thing
from factory.show.mlflow.registry import (
    CHAMPION,
    MODEL,
    SHOWN,
    aliases,
    bundle,
    find_version,
    is_whole,
    mark_whole,
    register,
    removed_data,
)
from factory.show.mlflow.runs import Tracking, short
from factory.show.mlflow.store import mlflow_errors

ANSWER_TAG, REASON_TAG = "approval_answer", "approval_reason"  # what became of a person's word; the person's reason
PENDING = "pending"
POINTED = "champion_shown"  # event: the version that the alias was pointed at


def show_releases(plant: Plant, tracking: Tracking) -> None:
    """Register every judged candidate that MLflow does not show, whole, with its newest verdict and its release; then point the alias.

    What cannot be shown (an export that was tampered with) stops nothing; the first of it is raised in the end.

    Raises: InputError; TrackingError.
    """
    if VerdictRow.first(plant.ledger, "WHERE gate = 'release'") is None:
        return  # no candidate was judged, so MLflow has nothing to show and need not be imported
    with plant.workspace.lock("release", PATIENCE):
        refused: list[str] = []
        for candidate in _unshown(plant, tracking):
            try:
                register_candidate(plant, candidate)
            except Exception as error:
                refused.append(f"candidate {candidate} cannot be shown in MLflow: {of_one_thing(error)}")
        _point(plant, tracking)
    if refused:
        raise InputError(refused[0])


def _unshown(plant: Plant, tracking: Tracking) -> list[int]:
    with mlflow_errors("listing versions"):
        found = tracking.client.search_model_versions(f"name = '{MODEL}'")
    shown = {tuple(v.tags.get(key) for key in SHOWN) for v in found if is_whole(v)}
    ledger = plant.ledger
    released = {
        row.candidate: (str(row.number), removed_data(ledger, row.number), bundle(ledger, row.number))
        for row in ReleaseRow.select(ledger)
    }
    unshown = []
    for row in CandidateRow.select(ledger):
        verdict = VerdictRow.newest(ledger, "release", Subject("candidate", row.id))
        nothing = (None, None, None)
        if verdict and (str(row.id), row.export_sha256, str(verdict.id), *released.get(row.id, nothing)) not in shown:
            unshown.append(row.id)
    return unshown


def _point(plant: Plant, tracking: Tracking) -> None:
    """Point MLflow's alias at the ledger's champion; where somebody else moved it, that is recorded as repaired. Raises: TrackingError."""
    row, client, ledger = champion(plant.ledger), tracking.client, plant.ledger
    want = _version(plant, tracking, row) if row else None
    known = ledger.read("SELECT detail FROM events WHERE kind = :kind ORDER BY id DESC LIMIT 1", kind=POINTED)
    given = known[0]["detail"]["version"] if known else None
    with mlflow_errors("pointing the champion alias"):
        found = aliases(client).get(CHAMPION)
        if found != want:
            if want is None:
                client.delete_registered_model_alias(MODEL, CHAMPION)
            else:
                client.set_registered_model_alias(MODEL, CHAMPION, want)
    with ledger.begin() as tx:
        if row and row.mlflow_version != want:
            tx.execute(releases.update().where(releases.c.number == row.number).values(mlflow_version=want))
        if found != want and found != given:
            what = [f"MLflow's champion was version {found}, the ledger's is version {want}: put back"]
            record(tx, "repaired", Subject("release", row.number) if row else MODEL, {"what": what})
        if given != want:
            record(tx, POINTED, "mlflow", {"version": want})


def _version(plant: Plant, tracking: Tracking, row: ReleaseRow) -> str:
    """The version of a release's candidate; made again when it was deleted."""
    with mlflow_errors("finding a version"):
        found = find_version(tracking.client, row.candidate, row.export_sha256)
    return str(found.version) if found else register(plant, tracking, row.candidate)


def register_candidate(plant: Plant, candidate_id: int) -> str:
    """Show a judged candidate in MLflow, whatever its verdict: a version with tags, alias ``candidate``, its report; ask for approval.

    Returns the version. A word that a person gave about an older verdict is taken away.

    Raises: InputError when it was not judged or its export changed; TrackingError.
    """
    tracking = Tracking.open(plant)
    verdict = newest_verdict(plant.ledger, candidate_id)
    with mlflow_errors("finding a version"):
        before = find_version(tracking.client, candidate_id, verdict.subject_sha256)
    version = register(plant, tracking, candidate_id)
    _ask(plant, tracking, verdict, version, dict(before.tags) if before else {})
    mark_whole(tracking.client, version)
    return version


def _ask(plant: Plant, tracking: Tracking, verdict: VerdictRow, version: str, given: dict[str, str]) -> None:
    """Show on a version that it waits for a person, or what became of that; ``given``: its tags before."""
    known = decided(plant.ledger, verdict)
    if known is None and (waits(plant, verdict) or APPROVAL_TAG in given):
        if given.get(APPROVAL_TAG, OVERRIDDEN) != OVERRIDDEN and given.get("verdict_id") == str(verdict.id):
            return  # asked already, or a word that is to be answered
        asked = waits(plant, verdict)
        known = (
            PENDING if asked else "",
            how_to_answer(verdict.number) if asked else f"verdict {verdict.id}: nothing to approve",
        )
    if known is not None:
        set_tags(tracking, version, given, *known)


def decided(ledger: Ledger, verdict: VerdictRow) -> tuple[str, str] | None:
    """(tag ``approval``, tag ``approval_answer``) of a candidate about which a person decided; None: nobody did."""
    release = ReleaseRow.first(ledger, "WHERE candidate = :candidate", candidate=verdict.number)
    if release:
        by = release.approved_by or BY_POLICY
        if over := override_on(ledger, VerdictRow.get(ledger, release.verdict)):
            return OVERRIDDEN, f"released as {release.number}, though it was held, by {over['by']}: {over['why']}"
        return None if by == BY_POLICY else (APPROVED, f"released as {release.number}, approved by {by}")
    decision = decision_on(ledger, verdict)
    return (REJECTED, str(decision)) if decision and decision.word == REJECTED else None


def set_tags(tracking: Tracking, version: str, before: dict[str, str], word: str, answer: str) -> None:
    """Show on a version what became of a person's word. Raises: TrackingError."""
    with mlflow_errors("answering about an approval"):
        for key, value in ((ANSWER_TAG, short([answer])), (APPROVAL_TAG, word)):
            if before.get(key) != value:
                tracking.client.set_model_version_tag(MODEL, version, key, value)
