"""A revert that the audit or the loss doctor asks for: a proposal that undoes a merged patch, whose verdict is theirs.

It is no patch to be measured: the code without the patch was live before, and what it takes away is not speed. A person approves it as any
other proposal, or the policy does.
"""

from __future__ import annotations

from agents.core.proposal import Proposal
from factory.code_loop.revalidating import AUDIT
from factory.code_loop.submitting import draft, record_judged
from factory.gates.release.judge import PROMOTE, Verdict
from factory.git import repository
from factory.ledger.anomalies import DIAGNOSIS, in_words, words_about
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.ledger.rows import UNDO, ProposalRow, Subject, VerdictRow
from factory.ledger.writing import record_verdict

AGENT = "auditor"


def open_revert(plant: Plant, row: ProposalRow, why: VerdictRow) -> int:
    """Propose to undo an approved proposal on top of the live code; ``why``: the verdict that blames it. Returns its number.

    The caller holds the ``code-loop`` lock. Raises: RepositoryError when its files changed again since; nothing is left then.
    """
    code = plant.workspace.repository
    live = repository.live_commit(code)
    title = f"Undo proposal {row.number}"
    shown = "Its anomaly is gone without it" if why.gate == DIAGNOSIS else "The same steps without it end elsewhere"
    hypothesis = f"Segment {why.number} trained with proposal {row.number} ({row.title[:100]}). {shown}: {'; '.join(why.reasons)[:1000]}"
    hypothesis += _in_words(plant.ledger, why)
    message = f"{title}\n\n{hypothesis}\n\nThis reverts {row.patch_commit}.\n"
    commit = repository.undoing(code, live, row.base_commit, row.patch_commit, message)
    drafted = Proposal(AGENT, f"{UNDO}:{row.number}", title, hypothesis, 1.0, ())
    number, branch = draft(plant, drafted, live)
    repository.make_branch(code, branch, commit)
    sha256 = repository.patch_sha256(code, live, commit)
    found = f"the loss doctor blames it for an anomaly of segment {why.number}"
    reasons = (
        found if why.gate == DIAGNOSIS else f"the audit of segment {why.number} found a difference",
        *why.reasons,
    )
    stages = {AUDIT: {"state": "passed", "reasons": list(reasons)}}
    evidence = {
        "gate": AUDIT, "base": live, "patch_sha256": sha256, "patch_id": sha256, "tries": 1, "stages": stages, "gain": None, "audit": why.id,
    }  # fmt: skip
    verdict = Verdict(PROMOTE, reasons)
    with plant.ledger.begin() as tx:
        verdict_id = record_verdict(
            tx,
            AUDIT,
            Subject("proposal", number),
            against=live,
            policy_sha256=why.policy_sha256,
            subject_sha256=sha256,
            outcome=verdict.outcome,
            reasons=reasons,
            evidence=evidence,
        )
    record_judged(plant.ledger, number, commit, sha256, verdict_id)
    plant.progress.line(
        f"  proposal {number} undoes proposal {row.number}: {reasons[0]}; merge it with 'factory proposals approve {number}'"
    )
    return number


def _in_words(ledger: Ledger, why: VerdictRow) -> str:
    """What a language model said about the diagnosis behind a verdict, each sentence with its evidence; '': nothing."""
    said = words_about(ledger, why.evidence(ledger)["anomaly"]) if why.gate == DIAGNOSIS else None
    return in_words(said) if said else ""


def opened(ledger: Ledger, number: int) -> ProposalRow | None:
    """The newest proposal of the audit to undo a proposal that was not given up, whatever was decided about it."""
    which = "WHERE agent = :agent AND target = :target AND state NOT IN ('failed', 'superseded') ORDER BY number DESC"
    return ProposalRow.first(ledger, which, agent=AGENT, target=f"{UNDO}:{number}")


def reopen(plant: Plant, row: ProposalRow) -> int:
    """The same revert on top of the code that is live now; returns the new proposal's number. Raises: as ``open_revert``."""
    why = VerdictRow.get(plant.ledger, row.evidence(plant.ledger)["audit"])
    return open_revert(plant, ProposalRow.get(plant.ledger, int(row.target.partition(":")[2])), why)
