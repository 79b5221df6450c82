"""Certificates in the ledger: required before a segment starts, recorded as verdicts of the gate 'code', accepted by people.

A preflight joins it (gate 'preflight'): at each new commit, layout or environment, after the certificate.

A segment whose certificate is not 'promote' is marked 'uncertified' in the same transaction, and nothing of it is started.
The segment then waits for a person: new code (a revert, a fix) makes the factory plan it again, or ``factory certify --accept`` takes this
code as it is; what was accepted, when and by whom stays in the ledger.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from factory.computing.computing import changed
from factory.core.errors import InputError, SegmentError, WaitingError
from factory.core.policy_file import policy_sha256
from factory.core.removal import remove
from factory.core.workspace import Workspace
from factory.git.repository import RepositoryError
from factory.ledger.ledger import Ledger, record, segments
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow, Subject, VerdictRow
from factory.ledger.snapshot import Snapshot
from factory.ledger.writing import record_verdict
from factory.retrying.asking import refuse_rewound
from factory.training.certificate import (
    CertificateEvidence,
    CertificatePolicy,
    Judgement,
    PreflightPolicy,
    judge_certificate,
)
from factory.training.planning import last_checkpoint
from factory.training.preflight import judge_preflight
from kernels.contract.files import finite, finite_json, write_atomically

GATE = "code"
PREFLIGHT = "preflight"
SCRATCH = {
    GATE: "certificate",
    PREFLIGHT: "preflight",
}  # where a gate's runs lie in the segment's folder, and the name of its file beside them
ACCEPTED = "certificate_accepted"
UNCERTIFIED = "uncertified"
OF_CODE = f"gate IN ('{GATE}', '{PREFLIGHT}')"


class NotCertified(SegmentError, WaitingError):
    """The code changed, and the change is not shown to be inside seed noise: the segment was not started."""


def ensure_certified(plant: Plant, row: SegmentRow) -> None:
    """Return when a segment may start: what trains it is as it was for its parent, or was measured, or a person took it as it is.

    Raises: NotCertified when it may not; SegmentError when the runs were stopped: begin again then.
    """
    parent = SegmentRow.get(plant.ledger, row.parent) if row.parent else None
    policy = CertificatePolicy.load(plant.workspace.policy("gates/certificate.yaml"))
    if parent and (parent.code_commit != row.code_commit or changed(parent, row)):
        _allow(plant.ledger, row, _newest(plant.ledger, GATE, row.id) or _certify(plant, row, parent, policy))
    if policy.preflight.parts and _flies(plant.workspace, parent, row):
        _allow(
            plant.ledger, row, _newest(plant.ledger, PREFLIGHT, row.id) or _run_preflight(plant, row, policy.preflight)
        )


def _allow(ledger: Ledger, row: SegmentRow, verdict: VerdictRow) -> None:
    """The runs are removed once their verdict stands. Raises: NotCertified."""
    remove(Path(row.folder) / SCRATCH[verdict.gate])
    if verdict.outcome != "promote" and not accepted(ledger, verdict):
        raise NotCertified(f"segment {row.id} was not started. {' '.join(verdict.reasons)} {next_steps(row.id)}")


def _newest(ledger: Ledger, gate: str, segment: int) -> VerdictRow | None:
    return VerdictRow.newest(ledger, gate, Subject("segment", segment))


def next_steps(segment: int) -> str:
    """What a person can do about an uncertified segment."""
    return (
        "Commit corrected or reverted code, with which the daemon plans it again; where something could not be measured, stop 'factory run' and "
        f"let 'factory train' or 'factory anneal' measure it again; or take this code as it is: 'factory certify --accept {segment}'"
    )


def certificate_of(ledger: Ledger, segment: int) -> VerdictRow | None:
    """The newest verdict on a segment's code, of its certificate or its preflight; None when none was needed or made."""
    subject = str(Subject("segment", segment))
    return VerdictRow.first(ledger, f"WHERE {OF_CODE} AND subject = :subject ORDER BY id DESC", subject=subject)


def accepted(ledger: Ledger, verdict: VerdictRow) -> dict[str, Any] | None:
    """``{"by", "at"}`` of the person who took the code that this verdict is about, or None."""
    for row in ledger.read("SELECT at, detail FROM events WHERE kind = :kind ORDER BY id DESC", kind=ACCEPTED):
        if row["detail"]["subject_sha256"] == verdict.subject_sha256:
            return {"by": row["detail"]["by"], "at": row["at"]}
    return None


def accept(plant: Plant, segment: int, person: str) -> VerdictRow:
    """A person takes the code of an uncertified segment as it is; the segment is planned again. Returns the verdict.

    Raises: InputError when it is not waiting for that, or another segment took its place.
    """
    verdict = certificate_of(plant.ledger, segment)
    waiting = SegmentRow.select(plant.ledger, "WHERE state = :state ORDER BY id", state=UNCERTIFIED)
    if verdict is None or segment not in {row.id for row in waiting}:
        listed = ", ".join(str(row.id) for row in waiting) or "none"
        raise InputError(f"segment {segment} does not wait for a certificate; those that do: {listed}")
    newer = SegmentRow.first(plant.ledger, "WHERE kind <> 'average' AND id > :id", id=segment)
    if newer:
        raise InputError(f"segment {segment} was replaced by segment {newer.id}: there is nothing to accept")
    detail = {"by": person, "verdict": verdict.id, "subject_sha256": verdict.subject_sha256}
    with plant.ledger.begin() as tx:
        waits = (segments.c.id == segment) & (segments.c.state == UNCERTIFIED)
        tx.execute(segments.update().where(waits).values(state="planned"))
        record(tx, ACCEPTED, Subject("segment", segment), detail)
    return verdict


def every_certificate(ledger: Ledger) -> list[dict[str, Any]]:
    """All of them with their evidence, oldest first, and who accepted which."""
    return [
        {"segment": row.number, **row.with_evidence(ledger), "accepted": accepted(ledger, row)}
        for row in VerdictRow.select(ledger, f"WHERE {OF_CODE} ORDER BY id")
    ]


# -- making one --------------------------------------------------------------------------------------------------------
def _certify(plant: Plant, row: SegmentRow, parent: SegmentRow, policy: CertificatePolicy) -> VerdictRow:
    def measure() -> tuple[Judgement, dict[str, Any]]:
        from factory.training.certificate_runs import gather

        evidence = gather(plant, row, parent, policy)
        judgement = judge_certificate(policy, evidence)
        return judgement, _shown(evidence, judgement) | {"evidence": asdict(evidence)}

    judged = _identity(policy, row, parent, last_checkpoint(plant.ledger, parent.id)["id"])
    return _verdict(plant, row, GATE, judged, policy_sha256(policy), parent.code_commit, measure)


def _verdict(
    plant: Plant, row: SegmentRow, gate: str, judged: str, policy: str, against: str | None, measure: Callable[[], tuple[Judgement, dict[str, Any]]]
) -> VerdictRow:  # fmt: skip
    """The newest verdict on the same thing that was not for want of a measurement; else by ``measure``, whose evidence is written to the
    segment's folder. The verdict, the event, and the segment's state are recorded all at once."""
    same = "WHERE gate = :gate AND subject_sha256 = :judged AND outcome <> 'hold' ORDER BY id DESC"
    known = VerdictRow.first(plant.ledger, same, gate=gate, judged=judged)
    if known:  # the same code on the same checkpoint and data: measured for a segment that this one takes the place of
        outcome, reasons, shown = known.outcome, known.reasons, known.evidence(plant.ledger)
    else:
        judgement, measured = measure()
        outcome, reasons = judgement.outcome, judgement.reasons
        file = Path(row.folder) / f"{SCRATCH[gate]}.json"
        shown = finite(measured) | {"file": str(file)}
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, finite_json(shown | {"outcome": outcome, "reasons": reasons}, indent=1))
        shown.pop("evidence", None)  # of a certificate, every number of every step: in its file alone
    words = {"promote": "certified", "hold": "not certified", "reject": "NOT CERTIFIED"}[outcome]
    subject = Subject("segment", row.id)
    with plant.ledger.begin() as tx:
        refuse_rewound(Snapshot(tx, plant.ledger.root), row.id)
        number = record_verdict(
            tx, gate, subject, against=against, policy_sha256=policy, subject_sha256=judged, outcome=outcome, reasons=reasons, evidence=shown
        )  # fmt: skip
        record(tx, words.lower().replace(" ", "_"), subject, {"verdict": number})
        if outcome != "promote":
            tx.execute(segments.update().where(segments.c.id == row.id).values(state=UNCERTIFIED))
    plant.say(f"  the code of segment {row.id} is {words}: {reasons[0]}")
    return VerdictRow.get(plant.ledger, number)


def _identity(policy: CertificatePolicy, row: SegmentRow, parent: SegmentRow, checkpoint: str) -> str:
    """One hash of all that the measurement depends on: approval binds to it."""
    same = [row.kind, row.recipe_sha256, row.data_plan, row.first_step, row.last_step]
    of = policy.model_dump(exclude={"preflight"})
    parts = [of, parent.code_commit, row.code_commit, checkpoint, same, changed(parent, row)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _shown(evidence: CertificateEvidence, judgement: Judgement) -> dict[str, Any]:
    """The part of the evidence that the ledger keeps."""
    losses = {
        name: trace.series.get("loss", []) for name, trace in (("old", evidence.old), ("new", evidence.new)) if trace
    }
    pairs = zip(losses.get("old", []), losses.get("new", []))
    apart = [None if old is None or new is None else new - old for old, new in pairs]
    return {
        **{name: getattr(evidence, name) for name in ("old_commit", "new_commit", "changed", "first_step", "steps", "basis")},
        "seeds": list(evidence.seeds),
        "loss": losses | {"difference": apart},
        "measures": [asdict(m) | {"share": m.share} for m in judgement.measures],
    }  # fmt: skip


# -- the preflight -----------------------------------------------------------------------------------------------------
def _flies(workspace: Workspace, parent: SegmentRow | None, row: SegmentRow) -> bool:
    """Is the segment trained by other code, in another layout, or in another environment than its parent?

    A first segment on one rank is not preflighted: it starts at once. What an older factory did not write down counts as equal.
    """
    if parent is None:
        return _trained_by(row)["ranks"] not in (1, None)
    before, now = _trained_by(parent), _trained_by(row)
    differ = {key for key in now if before[key] != now[key] and before[key] is not None and now[key] is not None}
    return bool(differ - {"commit"}) or ("commit" in differ and _trains_otherwise(workspace, parent, row))


def _trains_otherwise(workspace: Workspace, parent: SegmentRow, row: SegmentRow) -> bool:
    """Do two commits differ in a file that training reads? Yes, where one of them is not known any more."""
    from factory.training.certificate_runs import changed_files

    try:
        return bool(changed_files(workspace.repository, parent.code_commit, row.code_commit))
    except RepositoryError:
        return True


def _trained_by(row: SegmentRow) -> dict[str, Any]:
    """All that a preflight depends on, but for the size of the model and the data; None: not written down."""
    found: dict[str, Any] = row.computing or {}
    machine = found.get("machine")
    recipe = row.recipe_json
    return {
        "commit": row.code_commit,
        "parallel": recipe.get("parallel"),
        "optimizer": recipe["optimizer"].get("name"),
        "precision": recipe["precision"],
        "compile": recipe.get("compile"),
        "experts": bool(recipe["model"].get("experts")),
        "kernels": found.get("kernels"),
        "ranks": found.get("ranks"),
        "environment": machine and [machine[key] for key in ("name", "processor", "torch", "driver")],
    }


def _run_preflight(plant: Plant, row: SegmentRow, policy: PreflightPolicy) -> VerdictRow:
    def measure() -> tuple[Judgement, dict[str, Any]]:
        from factory.training.preflight_runs import run_preflight

        evidence = run_preflight(plant, row, policy)
        return judge_preflight(policy, evidence), asdict(evidence)

    parts = [policy.model_dump(), _trained_by(row), row.recipe_json["model"], row.data_plan]
    judged = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return _verdict(plant, row, PREFLIGHT, judged, policy_sha256(policy), None, measure)
