"""Releases: one recoverable saga a promotion, ``decided`` → ``registered`` → ``aliased`` → ``published`` (DESIGN §5).

Each step is idempotent and is recorded after it is done; killed anywhere, ``reconcile`` (or the same ``release`` again) goes
on from the recorded state. The ledger decides who is champion: the newest ``promoted`` or ``rolled_back`` event. MLflow's
alias and the served link follow it, and are put back when a person or a crash moved them.

What is released is what was judged: before each step the export is hashed again and compared with the verdict's hash; a
person's approval, where the policy asks for one, is recorded with that hash too. A verdict against a champion that is no
longer champion is out of date, and so is one whose licences or anomalies hold the candidate by now: its release is withdrawn
until it is public, and the candidate must be judged again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from factory.core.errors import InputError
from factory.ledger.decisions import OVERRIDDEN, WITHDRAWN, override_on
from factory.ledger.ledger import Ledger, record, releases
from factory.ledger.plant import Plant
from factory.ledger.rows import CandidateRow, ReleaseRow, Subject, VerdictRow, champion
from factory.ledger.snapshot import Snapshot
from factory.ledger.writing import insert, next_key
from factory.release import serving
from factory.release.approvals import approve, approver, register_candidate
from factory.release.checks import (
    OutOfDate,
    check_champion,
    check_current,
    check_judged,
    check_not_rewound,
    check_training,
    releasable,
)
from factory.release.overriding import override_of, reason_of
from factory.release.registry import (
    CHAMPION,
    MODEL,
    SHOWN,
    aliases,
    bundle,
    check_export,
    find_version,
    is_whole,
    newest_verdict,
    register,
    removed_data,
    write_report,
)
from factory.tracking.mlflow_store import mlflow_errors, waiting_lock
from factory.tracking.outages import shown
from factory.tracking.tracking import Tracking


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
    ApprovalNeeded when the policy wants a person first. MLflow is not waited for: ``reconcile`` shows there later what it misses.
    """
    verdict = releasable(plant.ledger, verdict_id)
    candidate = verdict.number
    with waiting_lock(plant.workspace, "release"):
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
    with waiting_lock(plant.workspace, "release"):
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
    """Finish half releases, show what MLflow misses, put alias and served link back to the ledger's champion.

    Returns what was done, one line each; nothing to do → empty. What cannot be repaired (an export that was tampered with)
    is among the lines as well. While MLflow does not answer, the served folder is what the ledger says all the same.
    """
    if VerdictRow.first(plant.ledger, "WHERE gate = 'release'") is None:
        return []  # no candidate was judged, so MLflow has nothing to show and need not be imported
    with waiting_lock(plant.workspace, "release"):
        saga = _Saga(plant)
        done = saga.finish_others(None) + saga.serve()
        done += shown(plant.progress.line, saga.show_judged) or []
        return done + saga.serve() + (shown(plant.progress.line, saga.follow_ledger) or [])


def rollback(plant: Plant, number: int) -> None:
    """Make an older, published release champion again. Raises: InputError when there is none or its export changed."""
    with waiting_lock(plant.workspace, "release"):
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
        shown(plant.progress.line, lambda: saga.follow_ledger(expected=True))
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
    """The steps of a release, on one open MLflow; the caller holds the release lock."""

    def __init__(self, plant: Plant) -> None:
        self.workspace, self.ledger, self.progress = plant.workspace, plant.ledger, plant.progress
        self.tracking = Tracking.open(plant)

    def check_begun(self, number: int) -> None:
        """Before one that was begun earlier goes on. What is public is not undone. Raises: OutOfDate."""
        row = ReleaseRow.get(self.ledger, number)
        if row.state != "published":
            check_training(Plant(self.workspace, self.ledger), VerdictRow.get(self.ledger, row.verdict))

    def advance(self, number: int) -> None:
        """Take a release from its recorded state to ``published``. Raises: InputError, and the state stays."""
        steps: dict[str, Callable[[ReleaseRow], None]] = {
            "decided": self._register,
            "registered": self._alias,
            "aliased": self._publish,
        }
        while (row := ReleaseRow.get(self.ledger, number)).state in steps:
            verdict = VerdictRow.get(self.ledger, row.verdict)
            check_judged(self.ledger, verdict)
            check_champion(self.ledger, verdict)
            steps[row.state](row)

    def _register(self, row: ReleaseRow) -> None:
        add = lambda: register_candidate(Plant(self.workspace, self.ledger), row.candidate)
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
        return (
            str(found.version) if found else register(Plant(self.workspace, self.ledger), self.tracking, row.candidate)
        )

    def _publish(self, row: ReleaseRow) -> None:
        report = write_report(Plant(self.workspace, self.ledger), row.candidate)
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

    def show_judged(self) -> list[str]:
        """Register every judged candidate that MLflow does not show, whole, with its newest verdict and its release."""
        with mlflow_errors("listing versions"):
            found = self.tracking.client.search_model_versions(f"name = '{MODEL}'")
        shown = {tuple(v.tags.get(key) for key in SHOWN) for v in found if is_whole(v)}
        released = {
            row.candidate: (str(row.number), removed_data(self.ledger, row.number), bundle(self.ledger, row.number))
            for row in ReleaseRow.select(self.ledger)
        }
        done = []
        for row in CandidateRow.select(self.ledger):
            verdict = VerdictRow.newest(self.ledger, "release", Subject("candidate", row.id))
            if verdict is None:
                continue
            now = str(row.id), row.export_sha256, str(verdict.id), *released.get(row.id, (None, None, None))
            if now in shown:
                continue
            try:
                register_candidate(Plant(self.workspace, self.ledger), row.id)
                done.append(f"candidate {row.id} is shown in MLflow")
            except InputError as error:
                done.append(f"candidate {row.id} cannot be shown in MLflow: {error}")
        return done

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
