"""Requires a certificate before a segment starts, records it as a verdict of the gate 'code', and lets a person accept the code.

Each kind of segment needs its own, because the steps of a trunk segment and of an anneal are different code: the schedule, the mixture.

At each new commit, layout or environment a preflight (gate 'preflight') follows the certificate.

A segment whose verdict is not 'promote' is marked 'uncertified' in the same transaction, and is not started. The segment
then waits for a person. After new code (a revert or a fix) the factory plans it again, and ``factory certify --accept`` accepts the code
as it is. The ledger keeps who accepted what, and when.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from factory.computing.compute_settings import describe_compute_changes
from factory.core.errors import InputError, PersonNeededError, SegmentError
from factory.core.path_removal import remove_path
from factory.core.policy_file import hash_policy
from factory.core.workspace import Workspace
from factory.git.repository import RepositoryError
from factory.ledger.ledger import Ledger, record_event, segments
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow, Subject, VerdictRow
from factory.ledger.snapshot import Snapshot
from factory.ledger.writing import record_verdict
from factory.retrying.daemon_requests import refuse_rewound_segment
from factory.training.certificate import (
    CertificateEvidence,
    CertificatePolicy,
    CodeJudgement,
    PreflightPolicy,
    judge_certificate,
)
from factory.training.planning import read_last_checkpoint
from factory.training.preflight import judge_preflight
from kernels.contract.files import encode_finite_json, replace_non_finite, write_atomically
from kernels.contract.message import Message

GATE = "code"
PREFLIGHT = "preflight"
PREFLIGHT_JUDGE = 2  # what an older judge decided for another segment is not taken over
RUNS_FOLDER = {
    GATE: "certificate",
    PREFLIGHT: "preflight",
}  # by gate: the folder of its runs in the segment's folder, and the name of its .json file
CERTIFICATE_ACCEPTED = "certificate_accepted"
UNCERTIFIED = "uncertified"
OF_CODE = f"gate IN ('{GATE}', '{PREFLIGHT}')"


class NotCertifiedError(SegmentError, PersonNeededError):
    """The code changed, and no certificate shows that the change is inside seed noise. The segment was not started."""


def ensure_certified(plant: Plant, row: SegmentRow) -> None:
    """Return if a segment may start: its code has made such steps before, is certified, or was accepted by a person.

    Raises: NotCertifiedError when the segment may not start; SegmentError when the runs were stopped, and the caller may begin again.
    """
    parent = SegmentRow.get(plant.ledger, row.parent) if row.parent else None
    if parent is not None and not parent.has_steps:
        parent = None  # no code of this factory trained an imported model
    policy = CertificatePolicy.load(plant.workspace.policy_path("gates/certificate.yaml"))
    if before := parent and find_segment_with_old_code(plant.ledger, row, parent):
        _allow(plant.ledger, row, _newest(plant.ledger, GATE, row.id) or _certify(plant, row, before, policy))
    if policy.preflight.parts and _needs_preflight(plant.workspace, parent, row):
        _allow(
            plant.ledger, row, _newest(plant.ledger, PREFLIGHT, row.id) or _run_preflight(plant, row, policy.preflight)
        )


def find_segment_with_old_code(ledger: Ledger, row: SegmentRow, parent: SegmentRow) -> SegmentRow | None:
    """The segment whose code and settings a certificate compares with those of ``row``; None: they are the same, so no certificate is needed.

    It is the newest finished segment of the same kind, because a certificate runs the steps of one kind: the certificate of a trunk segment runs no
    step of an anneal. Before the first segment of a kind, it is the oldest ancestor. Code that a person accepted counts as old code from then on.
    """
    same = SegmentRow.find_first(
        ledger, "WHERE kind = :kind AND state = 'done' AND id < :id ORDER BY id DESC", kind=row.kind, id=row.id
    )
    before = parent
    for ancestor in reversed(SegmentRow.read_lineage(ledger, parent.id)):
        if same is not None and ancestor.id <= same.id:
            before = same
            break
        if ancestor.has_steps:
            before = ancestor
            accepted = _newest(ledger, GATE, ancestor.id)
            if accepted is not None and find_acceptance(ledger, accepted):
                break
    else:
        before = same or before
    differs = lambda one: one.code_commit != row.code_commit or bool(describe_compute_changes(one, row))
    return next(filter(differs, (before, parent)), None)


def _allow(ledger: Ledger, row: SegmentRow, verdict: VerdictRow) -> None:
    """Remove the runs, because their verdict is recorded. Raises: NotCertifiedError if the verdict does not allow the start."""
    remove_path(Path(row.folder) / RUNS_FOLDER[verdict.gate])
    if verdict.outcome != "promote" and not find_acceptance(ledger, verdict):
        raise NotCertifiedError(
            "training.not_certified", "Segment {segment} was not started. {reasons} {to_do}",
            segment=row.id, reasons=" ".join(verdict.reasons), to_do=make_certificate_instructions(row.id),
        )  # fmt: skip


def _newest(ledger: Ledger, gate: str, segment: int) -> VerdictRow | None:
    return VerdictRow.find_newest(ledger, gate, Subject("segment", segment))


def make_certificate_instructions(segment: int) -> Message:
    """The ways in which a person can continue from an uncertified segment."""
    return Message(
        "training.certificate_to_do", "To continue, commit corrected or reverted code. The daemon then plans the segment again. If a "
        "measurement is missing, stop 'factory run' and measure again with 'factory train' or 'factory anneal'. "
        "To accept this code as it is, run 'factory certify --accept {segment}'.", segment=segment,
    )  # fmt: skip


def find_newest_code_verdict(ledger: Ledger, segment: int) -> VerdictRow | None:
    """The newest verdict on a segment's code, of its certificate or its preflight; None when none was needed or made."""
    subject = str(Subject("segment", segment))
    return VerdictRow.find_first(ledger, f"WHERE {OF_CODE} AND subject = :subject ORDER BY id DESC", subject=subject)


def find_acceptance(ledger: Ledger, verdict: VerdictRow) -> dict[str, Any] | None:
    """``{"by", "at"}`` of the person who accepted the code of this verdict, or None."""
    for row in ledger.read(
        "SELECT at, detail FROM events WHERE kind = :kind ORDER BY id DESC", kind=CERTIFICATE_ACCEPTED
    ):
        if row["detail"]["subject_sha256"] == verdict.subject_sha256:
            return {"by": row["detail"]["by"], "at": row["at"]}
    return None


def accept_code(plant: Plant, segment: int, person: str) -> VerdictRow:
    """Record that a person accepts the code of an uncertified segment, which is then planned again. Returns the verdict.

    Raises: InputError when the segment does not wait for that, or another segment replaced it.
    """
    verdict = find_newest_code_verdict(plant.ledger, segment)
    waiting = SegmentRow.select(plant.ledger, "WHERE state = :state ORDER BY id", state=UNCERTIFIED)
    if verdict is None or segment not in {row.id for row in waiting}:
        raise InputError(
            "training.not_uncertified", "Segment {segment} does not wait for a certificate. Segments that wait: {waiting}.",
            segment=segment, waiting=[row.id for row in waiting] or "none",
        )  # fmt: skip
    newer = SegmentRow.find_first(plant.ledger, "WHERE kind <> 'average' AND id > :id", id=segment)
    if newer:
        raise InputError(
            "training.segment_replaced", "Segment {newer} replaced segment {segment}, so its code cannot be accepted.",
            segment=segment, newer=newer.id,
        )  # fmt: skip
    detail = {"by": person, "verdict": verdict.id, "subject_sha256": verdict.subject_sha256}
    with plant.ledger.begin() as tx:
        waits = (segments.c.id == segment) & (segments.c.state == UNCERTIFIED)
        tx.execute(segments.update().where(waits).values(state="planned"))
        record_event(tx, CERTIFICATE_ACCEPTED, Subject("segment", segment), detail)
    return verdict


def list_certificates(ledger: Ledger) -> list[dict[str, Any]]:
    """All certificates and preflights with their evidence, oldest first, and with the person who accepted the code."""
    return [
        {"segment": row.subject_number, **row.read_with_evidence(ledger), "accepted": find_acceptance(ledger, row)}
        for row in VerdictRow.select(ledger, f"WHERE {OF_CODE} ORDER BY id")
    ]


# -- making a certificate ----------------------------------------------------------------------------------------------
def _certify(plant: Plant, row: SegmentRow, before: SegmentRow, policy: CertificatePolicy) -> VerdictRow:
    def measure() -> tuple[CodeJudgement, dict[str, Any]]:
        from factory.training.certificate_runs import gather_certificate_evidence

        evidence = gather_certificate_evidence(plant, row, before, policy)
        judgement = judge_certificate(policy, evidence)
        return judgement, _shown(evidence, judgement) | {"evidence": asdict(evidence)}

    assert row.parent is not None
    judged = _identity(policy, row, before, read_last_checkpoint(plant.ledger, row.parent)["id"])
    return _verdict(plant, row, GATE, judged, hash_policy(policy), before.code_commit, measure)


def _verdict(
    plant: Plant, row: SegmentRow, gate: str, judged: str, policy: str, against: str | None,
    measure: Callable[[], tuple[CodeJudgement, dict[str, Any]]]
) -> VerdictRow:  # fmt: skip
    """The newest verdict on the same ``judged`` hash that is not 'hold'; without one, the verdict of ``measure``.

    The evidence is written to the segment's folder. One transaction records the verdict, the event and the segment's state.
    """
    same = "WHERE gate = :gate AND subject_sha256 = :judged AND outcome <> 'hold' ORDER BY id DESC"
    known = VerdictRow.find_first(plant.ledger, same, gate=gate, judged=judged)
    if known:  # an earlier segment, which this one replaces, had the same code, checkpoint and data
        outcome, reasons, shown = known.outcome, known.reasons, known.read_evidence(plant.ledger)
    else:
        judgement, measured = measure()
        outcome, reasons = judgement.outcome, list(judgement.reasons)
        file = Path(row.folder) / f"{RUNS_FOLDER[gate]}.json"
        shown = replace_non_finite(measured) | {"file": str(file)}
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, encode_finite_json(shown | {"outcome": outcome, "reasons": reasons}, indent=1))
        shown.pop("evidence", None)  # every number of every step: the file has it, the ledger does not
    event = {"promote": "certified", "hold": "not_certified", "reject": "not_certified"}[outcome]
    subject = Subject("segment", row.id)
    with plant.ledger.begin() as tx:
        refuse_rewound_segment(Snapshot(tx, plant.ledger.root), row.id)
        number = record_verdict(
            tx, gate, subject, against=against, policy_sha256=policy, subject_sha256=judged, outcome=outcome, reasons=reasons, evidence=shown
        )  # fmt: skip
        record_event(tx, event, subject, {"verdict": number})
        if outcome != "promote":
            tx.execute(segments.update().where(segments.c.id == row.id).values(state=UNCERTIFIED))
    plant.print_line(
        Message(
            "training.code_certified",
            "  The code of segment {segment} is certified. {reason}",
            segment=row.id,
            reason=reasons[0],
        )
        if outcome == "promote"
        else Message(
            "training.code_not_certified",
            "  The code of segment {segment} is not certified ({outcome}). {reason}",
            segment=row.id,
            outcome=outcome,
            reason=reasons[0],
        )  # fmt: skip
    )
    return VerdictRow.get(plant.ledger, number)


def _identity(policy: CertificatePolicy, row: SegmentRow, before: SegmentRow, checkpoint: str) -> str:
    """The hash of all inputs of the measurement. An acceptance is valid for this hash."""
    same = [row.kind, row.recipe_sha256, row.data_plan, row.first_step, row.last_step]
    of = policy.model_dump(exclude={"preflight"})
    parts = [of, before.code_commit, row.code_commit, checkpoint, same, describe_compute_changes(before, row)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _shown(evidence: CertificateEvidence, judgement: CodeJudgement) -> dict[str, Any]:
    """The part of the evidence that the ledger stores."""
    losses = {
        name: trace.series.get("loss", []) for name, trace in (("old", evidence.old), ("new", evidence.new)) if trace
    }
    pairs = zip(losses.get("old", []), losses.get("new", []))
    apart = [None if old is None or new is None else new - old for old, new in pairs]
    return {
        **{name: getattr(evidence, name) for name in ("old_commit", "new_commit", "changed", "first_step", "steps", "basis")},
        "seeds": list(evidence.seeds),
        "loss": losses | {"difference": apart},
        "measures": [asdict(m) | {"share": m.multiple_of_noise} for m in judgement.measures],
    }  # fmt: skip


# -- the preflight -----------------------------------------------------------------------------------------------------
def _needs_preflight(workspace: Workspace, parent: SegmentRow | None, row: SegmentRow) -> bool:
    """Whether code, layout or environment differ between the segment and its parent.

    A first segment on one rank needs no preflight. A value that an older factory did not record counts as equal.
    """
    if parent is None:
        return _trained_by(row)["ranks"] not in (1, None)
    before, now = _trained_by(parent), _trained_by(row)
    differ = {key for key in now if before[key] != now[key] and before[key] is not None and now[key] is not None}
    return bool(differ - {"commit"}) or ("commit" in differ and _training_files_differ(workspace, parent, row))


def _training_files_differ(workspace: Workspace, parent: SegmentRow, row: SegmentRow) -> bool:
    """Whether two commits differ in a file that training reads; also true when the repository lost one of them."""
    from factory.training.certificate_runs import list_changed_training_files

    try:
        return bool(list_changed_training_files(workspace.repository, parent.code_commit, row.code_commit))
    except RepositoryError:
        return True


def _trained_by(row: SegmentRow) -> dict[str, Any]:
    """All inputs of a preflight except the model's size and the data. A value is None when it was not recorded."""
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
    def measure() -> tuple[CodeJudgement, dict[str, Any]]:
        from factory.training.preflight_runs import run_preflight

        evidence = run_preflight(plant, row, policy)
        return judge_preflight(policy, evidence), asdict(evidence)

    parts = [PREFLIGHT_JUDGE, policy.model_dump(), _trained_by(row), row.recipe_json["model"], row.data_plan]
    judged = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return _verdict(plant, row, PREFLIGHT, judged, hash_policy(policy), None, measure)
