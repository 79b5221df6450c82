"""Certificates in the ledger: required before a segment starts, recorded as verdicts of the gate 'code', accepted by people.

A segment whose certificate is not 'promote' is marked 'uncertified' in the same transaction, and nothing of it is started.
The segment then waits for a person: new code (a revert, a fix) makes the factory plan it again, or ``factory certify --accept`` takes this
code as it is; what was accepted, when and by whom stays in the ledger.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from factory.computing.computing import changed
from factory.core.errors import InputError, SegmentError
from factory.core.policy_file import policy_sha256
from factory.core.progress import Progress
from factory.core.removal import remove
from factory.core.workspace import Workspace
from factory.ledger.ledger import Ledger, record, segments
from factory.ledger.rows import SegmentRow, Subject, VerdictRow
from factory.ledger.writing import record_verdict
from factory.training.certificate import CertificateEvidence, CertificatePolicy, Judgement, judge_certificate
from factory.training.planning import last_checkpoint
from kernels.contract.files import finite, finite_json, write_atomically

GATE = "code"
ACCEPTED = "certificate_accepted"
UNCERTIFIED = "uncertified"


class NotCertified(SegmentError):
    """The code changed, and the change is not shown to be inside seed noise: the segment was not started."""


def ensure_certified(workspace: Workspace, ledger: Ledger, row: SegmentRow, progress: Progress) -> None:
    """Return when a segment may start: no parent, the same code computed in the same way, a certificate, or a person's acceptance.

    Raises: NotCertified when it may not; SegmentError when the runs were stopped: begin again then.
    """
    parent = SegmentRow.get(ledger, row.parent) if row.parent else None
    if not parent or (parent.code_commit == row.code_commit and not changed(parent, row)):
        return
    verdict = certificate_of(ledger, row.id) or _certify(workspace, ledger, row, parent, progress)
    remove(Path(row.folder) / "certificate")
    if verdict.outcome != "promote" and not accepted(ledger, verdict):
        raise NotCertified(f"segment {row.id} was not started. {' '.join(verdict.reasons)} {next_steps(row.id)}")


def next_steps(segment: int) -> str:
    """What a person can do about an uncertified segment."""
    return (
        "Commit corrected or reverted code and run 'factory run' again ('factory train' or 'factory anneal' measures again what "
        f"could not be measured), or take this code as it is: 'factory certify --accept {segment}'"
    )


def certificate_of(ledger: Ledger, segment: int) -> VerdictRow | None:
    """The verdict on a segment's code, or None when none was needed or made."""
    return VerdictRow.newest(ledger, GATE, Subject("segment", segment))


def accepted(ledger: Ledger, verdict: VerdictRow) -> dict[str, Any] | None:
    """``{"by", "at"}`` of the person who took the code that this verdict is about, or None."""
    for row in ledger.read("SELECT at, detail FROM events WHERE kind = :kind ORDER BY id DESC", kind=ACCEPTED):
        if row["detail"]["subject_sha256"] == verdict.subject_sha256:
            return {"by": row["detail"]["by"], "at": row["at"]}
    return None


def accept(workspace: Workspace, ledger: Ledger, segment: int, person: str) -> VerdictRow:
    """A person takes the code of an uncertified segment as it is; the segment is planned again. Returns the verdict.

    Raises: InputError when it is not waiting for that, or another segment took its place.
    """
    verdict = certificate_of(ledger, segment)
    waiting = SegmentRow.select(ledger, "WHERE state = :state ORDER BY id", state=UNCERTIFIED)
    if verdict is None or segment not in {row.id for row in waiting}:
        listed = ", ".join(str(row.id) for row in waiting) or "none"
        raise InputError(f"segment {segment} does not wait for a certificate; those that do: {listed}")
    newer = SegmentRow.first(ledger, "WHERE kind <> 'average' AND id > :id", id=segment)
    if newer:
        raise InputError(f"segment {segment} was replaced by segment {newer.id}: there is nothing to accept")
    detail = {"by": person, "verdict": verdict.id, "subject_sha256": verdict.subject_sha256}
    with ledger.begin() as tx:
        waits = (segments.c.id == segment) & (segments.c.state == UNCERTIFIED)
        tx.execute(segments.update().where(waits).values(state="planned"))
        record(tx, ACCEPTED, Subject("segment", segment), detail)
    return verdict


def every_certificate(ledger: Ledger) -> list[dict[str, Any]]:
    """All of them with their evidence, oldest first, and who accepted which."""
    return [
        {"segment": row.number, **row.with_evidence(ledger), "accepted": accepted(ledger, row)}
        for row in VerdictRow.select(ledger, "WHERE gate = :gate ORDER BY id", gate=GATE)
    ]


# -- making one --------------------------------------------------------------------------------------------------------
def _certify(
    workspace: Workspace, ledger: Ledger, row: SegmentRow, parent: SegmentRow, progress: Progress
) -> VerdictRow:
    policy = CertificatePolicy.load(workspace.policy("gates/certificate.yaml"))
    judged = _identity(policy, row, parent, last_checkpoint(ledger, parent.id)["id"])
    same = "WHERE gate = :gate AND subject_sha256 = :judged AND outcome <> 'hold' ORDER BY id DESC"
    known = VerdictRow.first(ledger, same, gate=GATE, judged=judged)
    if known:  # the same code on the same checkpoint and data: measured for a segment that this one takes the place of
        outcome, reasons, shown = known.outcome, known.reasons, known.evidence(ledger)
    else:
        from factory.training.certificate_runs import gather

        evidence = gather(workspace, ledger, row, parent, policy, progress)
        judgement = judge_certificate(policy, evidence)
        outcome, reasons = judgement.outcome, judgement.reasons
        shown = _write_file(Path(row.folder), evidence, judgement)
    words = {"promote": "certified", "hold": "not certified", "reject": "NOT CERTIFIED"}[outcome]
    subject = Subject("segment", row.id)
    with ledger.begin() as tx:
        number = record_verdict(
            tx,
            GATE,
            subject,
            against=parent.code_commit,
            policy_sha256=policy_sha256(policy),
            subject_sha256=judged,
            outcome=outcome,
            reasons=reasons,
            evidence=shown,
        )
        record(tx, words.lower().replace(" ", "_"), subject, {"verdict": number})
        if outcome != "promote":
            tx.execute(segments.update().where(segments.c.id == row.id).values(state=UNCERTIFIED))
    progress.line(f"  the code of segment {row.id} is {words}: {reasons[0]}")
    return VerdictRow.get(ledger, number)


def _identity(policy: CertificatePolicy, row: SegmentRow, parent: SegmentRow, checkpoint: str) -> str:
    """One hash of all that the measurement depends on: approval binds to it."""
    same = [row.kind, row.recipe_sha256, row.data_plan, row.first_step, row.last_step]
    parts = [policy.model_dump(), parent.code_commit, row.code_commit, checkpoint, same, changed(parent, row)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _write_file(folder: Path, evidence: CertificateEvidence, judgement: Judgement) -> dict[str, Any]:
    """certificate.json, with everything that was measured; returns the part that the ledger keeps."""
    measured = [asdict(m) | {"share": m.share} for m in judgement.measures]
    losses = {
        name: trace.series.get("loss", []) for name, trace in (("old", evidence.old), ("new", evidence.new)) if trace
    }
    pairs = zip(losses.get("old", []), losses.get("new", []))
    apart = [None if old is None or new is None else new - old for old, new in pairs]
    shown = {
        "old_commit": evidence.old_commit,
        "new_commit": evidence.new_commit,
        "changed": evidence.changed,
        "first_step": evidence.first_step,
        "steps": evidence.steps,
        "basis": evidence.basis,
        "seeds": list(evidence.seeds),
        "loss": losses | {"difference": apart},
        "measures": measured,
        "file": str(folder / "certificate.json"),
    }
    shown = finite(shown)
    folder.mkdir(parents=True, exist_ok=True)
    whole = shown | {"outcome": judgement.outcome, "reasons": judgement.reasons, "evidence": asdict(evidence)}
    write_atomically(folder / "certificate.json", finite_json(whole, indent=1))
    return shown
