"""Releases: one recoverable saga a promotion, ``decided`` → ``registered`` → ``aliased`` → ``published`` (DESIGN §5).

Each step is idempotent and is recorded after it is done; killed anywhere, ``reconcile`` (or the same ``release`` again) goes
on from the recorded state. The ledger decides who is champion: the newest ``promoted`` or ``rolled_back`` event. MLflow's
alias and the served link follow it, and are put back when a person or a crash moved them.

What is released is what was judged: before each step the export is hashed again and compared with the verdict's hash; a
person's approval, where the policy asks for one, is recorded with that hash too. A verdict against a champion that is no
longer champion is out of date: its release is withdrawn, and the candidate must be judged again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from factory.core.errors import InputError
from factory.core.progress import SILENT, Progress
from factory.core.workspace import Workspace
from factory.gates.release.policy import ReleasePolicy
from factory.ledger.anomalies import rewound_in
from factory.ledger.ledger import Ledger, record, releases
from factory.ledger.rows import CandidateRow, ReleaseRow, Subject, VerdictRow, champion
from factory.ledger.writing import insert, next_key
from factory.release import serving
from factory.release.registry import (
    CHAMPION,
    MODEL,
    aliases,
    check_export,
    find_version,
    newest_verdict,
    register,
    removed_data,
    write_report,
)
from factory.tracking.mlflow_store import TrackingError, mlflow_errors, waiting_lock
from factory.tracking.outages import shown
from factory.tracking.tracking import APPROVAL_TAG, Tracking

__all__ = [
    "ApprovalNeeded", "approve", "reconcile", "register_candidate", "release", "rollback",
]  # fmt: skip


def automatic(workspace: Workspace) -> bool:
    """Is a verdict enough to release? Raises: ConfigError."""
    return ReleasePolicy.load(workspace.policy("gates/release.yaml")).approval == "automatic"


class ApprovalNeeded(InputError):
    """The policy requires a person's approval before this release."""


def register_candidate(workspace: Workspace, ledger: Ledger, candidate_id: int) -> str:
    """Show a judged candidate in MLflow, whatever its verdict: a version with tags, alias ``candidate``, its report.

    Raises: InputError when it was not judged or its export changed; TrackingError.
    """
    tracking = Tracking.open(workspace, ledger)
    version = register(workspace, ledger, tracking, candidate_id)
    verdict = newest_verdict(ledger, candidate_id)
    if verdict.outcome == "promote" and not automatic(workspace) and not _approval(ledger, verdict):
        with mlflow_errors("asking for approval"):
            if APPROVAL_TAG not in tracking.client.get_model_version(MODEL, version).tags:
                tracking.client.set_model_version_tag(MODEL, version, APPROVAL_TAG, "pending")
    return version


# -- approval -----------------------------------------------------------------------------------------------------------
def approve(ledger: Ledger, verdict_id: int, by: str) -> None:
    """Record a person's approval of exactly what this verdict judged. Raises: InputError for a verdict that is no promotion."""
    verdict = _promotion(ledger, verdict_id)
    with ledger.begin() as tx:
        record(tx, "approved", Subject("verdict", verdict_id), {"sha256": verdict.subject_sha256, "by": by})


def _approval(ledger: Ledger, verdict: VerdictRow) -> str | None:
    sql = "SELECT detail FROM events WHERE kind = 'approved' AND subject = :subject"
    for event in ledger.read(sql, subject=str(Subject("verdict", verdict.id))):
        if event["detail"]["sha256"] == verdict.subject_sha256:
            return str(event["detail"]["by"])
    return None


def _check_approval(workspace: Workspace, ledger: Ledger, verdict: VerdictRow) -> str:
    """Who approved: ``policy``, or the person. Takes over an approval given in MLflow. Raises: ApprovalNeeded."""
    by = _approval(ledger, verdict)
    if by or automatic(workspace):
        return by or "policy"
    number = verdict.number
    try:
        version = register_candidate(workspace, ledger, number)
        with mlflow_errors("reading the approval"):
            tags = Tracking.open(workspace, ledger).client.get_model_version(MODEL, version).tags
    except TrackingError as error:
        raise ApprovalNeeded(
            f"candidate {number} waits for approval: run 'factory release {number}'; {error}"
        ) from None
    if tags.get(APPROVAL_TAG, "").strip().lower() == "approved":
        approve(ledger, verdict.id, "mlflow")
        return "mlflow"
    raise ApprovalNeeded(
        f"candidate {number} waits for approval: run 'factory release {number}', or set the tag {APPROVAL_TAG}=approved on "
        f"version {version} of {MODEL} in MLflow"
    )


# -- the saga -----------------------------------------------------------------------------------------------------------
def release(
    workspace: Workspace,
    ledger: Ledger,
    verdict_id: int,
    progress: Progress = SILENT,
    *,
    approved_by: str | None = None,
) -> int:
    """Release the candidate that a verdict promotes; safe to call again, finishes what was begun. Returns its number.

    approved_by: the person who approves by this call, where the policy requires approval.

    Raises: InputError when the verdict does not promote, is out of date, or the export is not what was judged;
    ApprovalNeeded when the policy wants a person first. MLflow is not waited for: ``reconcile`` shows there later what it misses.
    """
    verdict = _promotion(ledger, verdict_id)
    candidate = verdict.number
    with waiting_lock(workspace, "release"):
        saga = _Saga(workspace, ledger, progress)
        saga.finish_others(candidate)
        known = ReleaseRow.first(ledger, "WHERE candidate = :candidate", candidate=candidate)
        if known is None:
            _check_current(ledger, verdict)
            _check_judged(ledger, verdict)
            if approved_by:
                approve(ledger, verdict_id, approved_by)
            by = _check_approval(workspace, ledger, verdict)
            number = _decide(ledger, verdict, by)
        else:
            number = known.number
        saga.advance(number)
    return number


def reconcile(workspace: Workspace, ledger: Ledger, progress: Progress = SILENT) -> list[str]:
    """Finish half releases, show what MLflow misses, put alias and served link back to the ledger's champion.

    Returns what was done, one line each; nothing to do → empty. What cannot be repaired (an export that was tampered with)
    is among the lines as well. While MLflow does not answer, the served folder is what the ledger says all the same.
    """
    if VerdictRow.first(ledger, "WHERE gate = 'release'") is None:
        return []  # no candidate was judged, so MLflow has nothing to show and need not be imported
    with waiting_lock(workspace, "release"):
        saga = _Saga(workspace, ledger, progress)
        done = saga.finish_others(None) + saga.serve()
        show = lambda: saga.show_judged() + ([] if automatic(workspace) else saga.release_approved())
        done += shown(progress.line, show) or []
        return done + saga.serve() + (shown(progress.line, saga.follow_ledger) or [])


def rollback(workspace: Workspace, ledger: Ledger, number: int, progress: Progress = SILENT) -> None:
    """Make an older, published release champion again. Raises: InputError when there is none or its export changed."""
    with waiting_lock(workspace, "release"):
        saga = _Saga(workspace, ledger, progress)
        saga.finish_others(None)
        row, now = ReleaseRow.get(ledger, number), champion(ledger)
        if row.state != "published" or now is None:
            raise InputError(f"release {number} is not published; 'factory status' lists those that are")
        check_export(ledger, row.candidate)
        if now.number != number:
            with ledger.begin() as tx:
                record(tx, "rolled_back", Subject("release", number), {"from": now.number})
        saga.serve(expected=True)
        shown(progress.line, lambda: saga.follow_ledger(expected=True))
    progress.line(f"release {number} is champion again")


class _Saga:
    """The steps of a release, on one open MLflow; the caller holds the release lock."""

    def __init__(self, workspace: Workspace, ledger: Ledger, progress: Progress) -> None:
        self.workspace, self.ledger, self.progress = workspace, ledger, progress
        self.tracking = Tracking.open(workspace, ledger)

    def advance(self, number: int) -> None:
        """Take a release from its recorded state to ``published``. Raises: InputError, and the state stays."""
        steps: dict[str, Callable[[ReleaseRow], None]] = {
            "decided": self._register,
            "registered": self._alias,
            "aliased": self._publish,
        }
        while (row := ReleaseRow.get(self.ledger, number)).state in steps:
            verdict = VerdictRow.get(self.ledger, row.verdict)
            _check_judged(self.ledger, verdict)
            _check_champion(self.ledger, verdict)
            steps[row.state](row)

    def _register(self, row: ReleaseRow) -> None:
        add = lambda: register(self.workspace, self.ledger, self.tracking, row.candidate)
        self._move(row, "registered", mlflow_version=shown(self.progress.line, add))

    def _alias(self, row: ReleaseRow) -> None:
        self._move(row, "aliased", mlflow_version=shown(self.progress.line, lambda: self._point(row)))

    def _point(self, row: ReleaseRow) -> str:
        """Move MLflow's alias to a release; returns its version. Raises: TrackingError."""
        version = self._version(row)
        with mlflow_errors("moving the champion alias"):
            self.tracking.client.set_registered_model_alias(MODEL, CHAMPION, version)
        return version

    def _version(self, row: ReleaseRow) -> str:
        """The version of a release's candidate; made again when it was deleted."""
        with mlflow_errors("finding a version"):
            found = find_version(self.tracking.client, row.candidate, row.export_sha256)
        return str(found.version) if found else register(self.workspace, self.ledger, self.tracking, row.candidate)

    def _publish(self, row: ReleaseRow) -> None:
        report = write_report(self.workspace, self.ledger, row.candidate)
        log = lambda: self.tracking.log_report(self.tracking.candidate_run(row.candidate), report)
        shown(self.progress.line, log)
        serving.publish(self.workspace, row.number, Path(row.export_path), row.export_sha256)
        self._move(row, "published", report=self.ledger.inside(report), event="promoted")
        self.progress.line(f"release {row.number}: candidate {row.candidate} is champion")

    def _move(self, row: ReleaseRow, state: str, event: str | None = None, **values: Any) -> None:
        with self.ledger.begin() as tx:
            tx.execute(releases.update().where(releases.c.number == row.number).values(state=state, **values))
            if event:
                record(tx, event, Subject("release", row.number), {"candidate": row.candidate})

    def finish_others(self, candidate: int | None) -> list[str]:
        """Finish the half releases of every other candidate; one that cannot be finished is reported, and stops nothing."""
        done = []
        for row in ReleaseRow.select(self.ledger, "WHERE state <> 'published' ORDER BY number"):
            if row.candidate == candidate:
                continue
            try:
                self.advance(row.number)
                done.append(f"finished release {row.number}, which had been interrupted")
            except InputError as error:
                if isinstance(error, OutOfDate):
                    detail = {"why": str(error), "candidate": row.candidate}
                    with self.ledger.begin() as tx:
                        tx.execute(releases.delete().where(releases.c.number == row.number))
                        record(tx, "withdrawn", Subject("release", row.number), detail)
                done.append(f"release {row.number} cannot be finished: {error}")
        return done

    def show_judged(self) -> list[str]:
        """Register every judged candidate that MLflow does not show with its newest verdict and its release."""
        with mlflow_errors("listing versions"):
            found = self.tracking.client.search_model_versions(f"name = '{MODEL}'")
        keys = ("candidate", "export_sha256", "verdict", "release", "removed_data")
        shown = {tuple(v.tags.get(key) for key in keys) for v in found}
        released = {row.candidate: str(row.number) for row in ReleaseRow.select(self.ledger)}
        removed = {row.candidate: removed_data(self.ledger, row.number) for row in ReleaseRow.select(self.ledger)}
        done = []
        for row in CandidateRow.select(self.ledger):
            verdict = VerdictRow.newest(self.ledger, "release", Subject("candidate", row.id))
            if verdict is None:
                continue
            is_now = (str(row.id), row.export_sha256, verdict.outcome, released.get(row.id), removed.get(row.id))
            if is_now in shown:
                continue
            try:
                register_candidate(self.workspace, self.ledger, row.id)
                done.append(f"candidate {row.id} is shown in MLflow")
            except InputError as error:
                done.append(f"candidate {row.id} cannot be shown in MLflow: {error}")
        return done

    def release_approved(self) -> list[str]:
        """Release the newest promotion that waits for a person, once a person approved it in MLflow."""
        verdict = VerdictRow.first(self.ledger, "WHERE gate = 'release' ORDER BY id DESC")
        if verdict is None or verdict.outcome != "promote":
            return []
        if ReleaseRow.first(self.ledger, "WHERE candidate = :candidate", candidate=verdict.number):
            return []
        try:
            _check_current(self.ledger, verdict)
            _check_judged(self.ledger, verdict)
            number = _decide(self.ledger, verdict, _check_approval(self.workspace, self.ledger, verdict))
            self.advance(number)
        except ApprovalNeeded:
            return []
        except InputError as error:
            return [str(error)]
        return [f"release {number} was approved in MLflow and is published"]

    def follow_ledger(self, expected: bool = False) -> list[str]:
        """Point MLflow's alias at the ledger's champion. ``expected``: a rollback, so no repair is recorded. Raises: TrackingError."""
        row, done = champion(self.ledger), []
        client = self.tracking.client
        want = self._version(row) if row else None
        with mlflow_errors("comparing the champion alias"):
            found = aliases(client).get(CHAMPION)
            if found != want:
                if want is None:
                    client.delete_registered_model_alias(MODEL, CHAMPION)
                else:
                    client.set_registered_model_alias(MODEL, CHAMPION, want)
                done.append(f"MLflow's champion was version {found}, the ledger's is version {want}: put back")
        if row and row.mlflow_version != want:
            self._move(row, row.state, mlflow_version=want)
        return self._repaired(row, done, expected)

    def serve(self, expected: bool = False) -> list[str]:
        """Point the served link at the ledger's champion; as ``follow_ledger``. Raises: InputError when its export is not what was judged."""
        row, done = champion(self.ledger), []
        if row and not self._is_served(row):
            check_export(self.ledger, row.candidate)
            serving.publish(self.workspace, row.number, Path(row.export_path), row.export_sha256)
            done.append(f"release {row.number} was not what is served: published again")
        return self._repaired(row, done, expected)

    def _repaired(self, row: ReleaseRow | None, done: list[str], expected: bool) -> list[str]:
        if done and not expected:
            with self.ledger.begin() as tx:
                record(tx, "repaired", Subject("release", row.number) if row else MODEL, {"what": done})
        return done

    def _is_served(self, row: ReleaseRow) -> bool:
        note = serving.served(self.workspace)
        return note is not None and (note["release"], note["export_sha256"]) == (row.number, row.export_sha256)


# -- what must hold -----------------------------------------------------------------------------------------------------
class OutOfDate(InputError):
    """The verdict was against a champion that is no longer champion."""


def _promotion(ledger: Ledger, verdict_id: int) -> VerdictRow:
    verdict = VerdictRow.first(ledger, "WHERE gate = 'release' AND id = :id", id=verdict_id)
    if verdict is None:
        raise InputError(f"there is no verdict {verdict_id} of the release gate; 'factory status' lists them")
    if verdict.outcome != "promote":
        why = "; ".join(verdict.reasons)
        raise InputError(f"verdict {verdict_id} on {verdict.subject} is {verdict.outcome!r}, not 'promote': {why}")
    return verdict


def _check_current(ledger: Ledger, verdict: VerdictRow) -> None:
    """Raises: InputError when the candidate was judged again since, its training was rewound, or the champion is another one than then."""
    newest = newest_verdict(ledger, verdict.number)
    if newest.id != verdict.id:
        raise InputError(
            f"verdict {verdict.id} on {verdict.subject} is out of date: verdict {newest.id} says {newest.outcome!r}"
        )
    if spoiled := rewound_in(ledger, CandidateRow.get(ledger, verdict.number).segment):
        raise InputError(
            f"{verdict.subject} is not released: its training went wrong, segment {spoiled[0]} was rewound"
        )
    _check_champion(ledger, verdict)


def _check_champion(ledger: Ledger, verdict: VerdictRow) -> None:
    now = champion(ledger)
    subject = str(Subject("candidate", now.candidate)) if now else None
    if verdict.against != subject:
        raise OutOfDate(
            f"verdict {verdict.id} judged {verdict.subject} against {verdict.against or 'no champion'}, but "
            f"{subject or 'no candidate'} is champion now: evaluate it again"
        )


def _check_judged(ledger: Ledger, verdict: VerdictRow) -> None:
    """Raises: InputError when the export is not, byte for byte, the one that the verdict judged."""
    row = check_export(ledger, verdict.number)
    if row.export_sha256 != verdict.subject_sha256:
        raise InputError(f"verdict {verdict.id} judged another export of {verdict.subject}: evaluate it again")


def _decide(ledger: Ledger, verdict: VerdictRow, by: str) -> int:
    """The first step, and the only one that chooses: a row in ``releases``. Returns its number."""
    candidate = verdict.number
    values = {"candidate": candidate, "verdict": verdict.id, "state": "decided", "approved_by": by}
    with ledger.begin() as tx:
        number = insert(tx, releases, number=next_key(tx, releases), created_at=time.time(), **values)
        record(tx, "release_decided", Subject("release", number), {"candidate": candidate, "verdict": verdict.id})
    return number
