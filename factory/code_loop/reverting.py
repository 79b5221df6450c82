"""Opens reverts: proposals that undo a merged patch because an audit or the loss doctor blames it. The verdict is that of the audit or the doctor.

The gate does not measure a revert: the code without the patch was live before, and the reason is not speed. People may have edited other lines of the
same files since (``factory.git.undo``), and the certificate compares the result before it trains. As with any other proposal, a person or the policy
approves the revert.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from agents.core.proposal import Proposal
from factory.code_loop.revalidating import AUDIT
from factory.code_loop.submitting import (
    mark_stale_proposals_as_failed,
    record_drafted_proposal,
    record_verdict_without_stages,
    run_under_code_loop_lock,
)
from factory.gates.release.judge import PROMOTE
from factory.git import repository
from factory.git.undo import make_revert_commit
from factory.ledger.anomalies import (
    CLOSED,
    DIAGNOSED,
    DIAGNOSIS,
    REJECTED,
    find_explanation,
    format_claims,
    read_newest_details_by_anomaly,
)
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.ledger.rows import UNDO_TARGET, ProposalRow, Subject, VerdictRow
from kernels.contract.message import Message

AGENT = "auditor"
AUDITED = "audited"  # event: {"outcome", "patches", "suspects"}


def propose_reverts_of_blamed_patches(plant: Plant) -> list[int]:
    """Open a revert of each approved patch that an audit or the loss doctor blames, unless the patch has one already.

    Returns the numbers of the new proposals. An error is shown once a day.
    """
    made = []
    for number, why in {number: why for number, why in _blamed(plant.ledger) if why}.items():
        row = ProposalRow.get(plant.ledger, number)
        if row.state == "approved" and find_newest_revert(plant.ledger, number) is None:
            words = Message(
                "code_loop.undo_by_hand",
                "proposal {proposal} must be undone by hand",
                proposal=number,
            )
            made.append(
                run_under_code_loop_lock(
                    plant, partial(_open, plant, row, why), "audit_revert_waits", Subject("proposal", number), words
                )
            )
    return [number for number in made if number is not None]


def _open(plant: Plant, row: ProposalRow, why: VerdictRow) -> int:
    mark_stale_proposals_as_failed(plant)
    return propose_revert(plant, row, why)


def _blamed(ledger: Ledger) -> Iterator[tuple[int, VerdictRow | None]]:
    """Yield the numbers of the proposals that an audit or a diagnosis blames, each with the verdict that blames it."""
    sql = "SELECT subject, detail FROM events WHERE kind = :kind ORDER BY id"
    for event in ledger.read(sql, kind=AUDITED):
        for number in event["detail"]["suspects"] if event["detail"]["outcome"] == "reject" else ():
            yield number, VerdictRow.find_newest(ledger, AUDIT, Subject.parse(event["subject"]))
    closed = read_newest_details_by_anomaly(ledger, CLOSED)
    for event in ledger.read(sql, kind=DIAGNOSED):
        end = closed.get(Subject.parse(event["subject"]).number)
        for number in event["detail"].get("undo", ()) if not end or end["how"] != REJECTED else ():
            yield number, VerdictRow.find_newest(ledger, DIAGNOSIS, Subject("segment", event["detail"]["segment"]))


def propose_revert(plant: Plant, row: ProposalRow, why: VerdictRow) -> int:
    """Propose to undo an approved proposal on top of the live code. ``why``: the verdict that blames it. Returns the new proposal's number.

    The caller holds the ``code-loop`` lock. Raises: RepositoryError if the proposal's lines changed since; nothing is left then.
    """
    code = plant.workspace.repository
    live = repository.get_live_commit(code)
    title = str(Message("code_loop.undo_title", "Undo proposal {proposal}", proposal=row.number))
    blamed = why.gate == DIAGNOSIS
    shown = (
        Message("code_loop.gone_without", "Without the proposal, the segment's anomaly is gone")
        if blamed
        else Message("code_loop.ends_elsewhere", "Without the proposal, the same steps end with other weights")
    )
    hypothesis = Message(
        "code_loop.revert",
        "Segment {segment} trained with proposal {proposal} ({title}). {shown}: {reasons}{words}",
        segment=why.subject_number,
        proposal=row.number,
        title=row.title[:100],
        shown=shown,
        reasons="; ".join(why.reasons)[:1000],
        words=_in_words(plant.ledger, why),
    )
    message = f"{title}\n\n{hypothesis}\n\nThis reverts {row.patch_commit}.\n"
    commit = make_revert_commit(code, live, row.base_commit, row.patch_commit, message)
    drafted = Proposal(AGENT, f"{UNDO_TARGET}:{row.number}", title, hypothesis, 1.0, ())
    number, branch = record_drafted_proposal(plant, drafted, live)
    repository.make_branch(code, branch, commit)
    sha256 = repository.hash_patch(code, live, commit)
    found = (
        Message(
            "code_loop.doctor_blames",
            "the loss doctor blames proposal {proposal} for an anomaly of segment {segment}",
            proposal=row.number,
            segment=why.subject_number,
        )
        if blamed
        else Message(
            "code_loop.audit_differs", "the audit of segment {segment} found a difference", segment=why.subject_number
        )
    )
    reasons = [found, *why.reasons]
    stages = {AUDIT: {"state": "passed", "reasons": reasons}}
    evidence = {
        "gate": AUDIT,
        "base": live,
        "patch_sha256": sha256,
        "patch_id": sha256,
        "stages": stages,
        "gain": None,
        "audit": why.id,
    }
    of = {"policy_sha256": why.policy_sha256, "subject_sha256": sha256}
    record_verdict_without_stages(plant, number, commit, AUDIT, reasons, evidence, outcome=PROMOTE, **of)
    plant.progress.line(
        Message(
            "code_loop.undoes",
            "  proposal {proposal} undoes proposal {undone}: {why}. To merge it: 'factory proposals approve "
            "{proposal}'",
            proposal=number,
            undone=row.number,
            why=reasons[0],
        )
    )
    return number


def _in_words(ledger: Ledger, why: VerdictRow) -> str:
    """Return a language model's explanation of the diagnosis behind a verdict, each sentence with its evidence; '' without an explanation."""
    said = find_explanation(ledger, why.read_evidence(ledger)["anomaly"]) if why.gate == DIAGNOSIS else None
    return format_claims(said) if said else ""


def find_newest_revert(ledger: Ledger, number: int) -> ProposalRow | None:
    """Return the newest revert of a proposal, whatever was decided about the revert. Reverts that failed or were superseded do not count."""
    which = "WHERE agent = :agent AND target = :target AND state NOT IN ('failed', 'superseded') ORDER BY number DESC"
    return ProposalRow.find_first(ledger, which, agent=AGENT, target=f"{UNDO_TARGET}:{number}")


def propose_revert_again(plant: Plant, row: ProposalRow) -> int:
    """Open the same revert again on top of the present live code, and return the new proposal's number. Raises: as ``propose_revert``."""
    why = VerdictRow.get(plant.ledger, row.read_evidence(plant.ledger)["audit"])
    return propose_revert(plant, ProposalRow.get(plant.ledger, int(row.target.partition(":")[2])), why)
