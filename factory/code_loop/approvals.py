"""What becomes of a judged proposal: a person approves, rejects, or takes back; the checked-out branch follows.

An approval binds to the hash of the patch that was judged and to the commit it was judged on. When the branch holds another
patch, it is refused; when the live code has moved on, the same patch is proposed and judged on top of it first. The
word is recorded before the branch is moved and the state after it: killed in between, the same call finishes.

A person's word comes from the command line, or from MLflow: the tag ``approval`` of the proposal's run. With ``approval:
automatic`` in policies/gates/patch.yaml the verdict alone is enough.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sqlalchemy as sa
import yaml

from agents.core.proposal import Edit, Proposal
from agents.search_proposer.search_proposer import choose
from factory.code_loop.revalidating import UNDO, note_validated
from factory.computing.tuned_kernels import KERNELS
from factory.core.errors import FactoryError, InputError, WorkspaceError
from factory.core.progress import Progress
from factory.core.workspace import Workspace
from factory.gates.patch.policy import PatchPolicy
from factory.gates.training_start import find_start
from factory.git import repository
from factory.git.scope import Change
from factory.ledger.ledger import Ledger, events, proposals, record, verdicts
from kernels.contract.choice import section_of

Row = dict[str, Any]
_told: set[str] = set()
WORDS = ("approved", "rejected")


def approve(workspace: Workspace, ledger: Ledger, number: int, by: str, progress: Progress) -> str | None:
    """Merge a proposal that the gate promotes; returns the live commit, or None when a new judgement spoke against it.

    The caller holds the workspace's ``code-loop`` lock. Raises: InputError when there is nothing to approve, or the branch
    does not hold what was judged; RepositoryError when the checkout is in the way; either way nothing has moved.
    """
    row = _judged(ledger, number)
    if row["outcome"] != "promote" or not row["commit"]:
        raise InputError(
            f"the gate says {row['outcome'].upper()} of proposal {number}: {'; '.join(row['reasons'])[:500]}"
        )
    code = workspace.repository
    live = repository.live_commit(code)
    if not repository.contains(code, live, row["commit"]):
        _check_patch(workspace, row)
        if live != row["base_commit"]:
            again = _judge_again(workspace, ledger, row, live, progress)
            return (
                approve(workspace, ledger, again, by, progress) if _row(ledger, again)["outcome"] == "promote" else None
            )
        _say(ledger, "proposal_approved", row, by)
        repository.advance(code, live, row["commit"])
    _become(ledger, row, "approved")
    _settle_what_it_is_about(ledger, row)
    progress.line(
        f"  proposal {number} is live: {row['commit'][:12]}; the next segment trains with it, once it is certified"
    )
    return str(row["commit"])


def reject(ledger: Ledger, number: int, by: str, why: str = "") -> None:
    """A person turns a judged proposal down, whatever its verdict. Its branch stays. Raises: InputError."""
    row = _judged(ledger, number)
    _say(ledger, "proposal_rejected", row, by, why)
    _become(ledger, row, "rejected")


def revert(workspace: Workspace, ledger: Ledger, number: int, by: str, why: str = "") -> str:
    """Take an approved proposal back with a commit of its own; returns it. Needs no gate: the old code was live before.

    Raises: InputError when it is not live; RepositoryError when the same files changed since, or the checkout is in the way.
    """
    row = _row(ledger, number)
    if row["state"] != "approved":
        raise InputError(f"proposal {number} is {_state(row)}, not approved: there is nothing to take back")
    code = workspace.repository
    live = repository.live_commit(code)
    reason = f"\n\n{why.strip()[:2000]}" if why.strip() else ""
    message = f"Revert proposal {number}: {row['title'][:80]}{reason}\n\nThis takes back {row['commit']}.\n"
    undone = repository.undoing(code, live, row["base_commit"], row["commit"], message)
    _say(ledger, "proposal_reverted", row, by, why)
    repository.advance(code, live, undone)
    _become(ledger, row, "reverted")
    return undone


def follow(workspace: Workspace, ledger: Ledger, progress: Progress) -> int:
    """Do what people said in MLflow, or the policy says, of the proposals that wait; returns how many were settled.

    A proposal that cannot be merged is told, and stops nothing. Raises: TrackingError.
    """
    waiting = _waiting(ledger)
    if not waiting:
        return 0
    from factory.tracking.tracking import Tracking

    tracking = Tracking.open(workspace, ledger)
    automatic = PatchPolicy.load(workspace.policy("gates/patch.yaml")).approval == "automatic"
    settled = 0
    for number in waiting:
        word, by = ("approved", "policy") if automatic else (tracking.proposal_word(number), "mlflow")
        if word not in WORDS:
            continue
        try:
            with workspace.lock("code-loop"):
                if word == "approved":
                    settled += approve(workspace, ledger, number, by, progress) is not None
                else:
                    reject(ledger, number, by)
                    settled += 1
        except WorkspaceError:
            return settled  # somebody proposes or decides just now: the next pass asks again
        except FactoryError as error:
            said = f"  proposal {number} was {word} by {by} and cannot be: {error}"
            if said not in _told:
                _told.add(said)
                progress.line(said)
        tracking.proposal_run(number)
    return settled


def _waiting(ledger: Ledger) -> list[int]:
    """Promoted proposals that nobody has settled."""
    joined = proposals.join(verdicts, verdicts.c.id == proposals.c.verdict)
    wanted = (proposals.c.state == "judged") & (verdicts.c.outcome == "promote")
    found = ledger.rows(sa.select(proposals.c.number).select_from(joined).where(wanted).order_by(proposals.c.number))
    return [row["number"] for row in found]


def _row(ledger: Ledger, number: int) -> Row:
    joined = proposals.outerjoin(verdicts, verdicts.c.id == proposals.c.verdict)
    columns = (proposals, verdicts.c.outcome, verdicts.c.reasons, verdicts.c.subject_sha256)
    row = ledger.one(sa.select(*columns).select_from(joined).where(proposals.c.number == number))
    if row is None:
        known = [str(r["number"]) for r in ledger.rows(sa.select(proposals.c.number).order_by(proposals.c.number))]
        there = f"there are: {', '.join(known)}" if known else "there is none yet: run 'factory propose'"
        raise InputError(f"no proposal {number}; {there}")
    return row


def _judged(ledger: Ledger, number: int) -> Row:
    row = _row(ledger, number)
    if row["state"] != "judged":
        raise InputError(f"proposal {number} is {_state(row)}: there is nothing to decide about it")
    return row


def _state(row: Row) -> str:
    return {"failed": "failed (it was never judged)", "drafted": "being judged"}.get(row["state"]) or str(row["state"])


def _check_patch(workspace: Workspace, row: Row) -> None:
    """Raises: InputError when the branch does not hold the patch that the verdict is about."""
    code = workspace.repository
    commit = repository.branch_commit(code, row["branch"])
    if commit is None:
        raise InputError(f"the branch {row['branch']} is gone: there is nothing to merge")
    judged = (row["commit"], row["subject_sha256"])
    if (commit, repository.patch_sha256(code, row["base_commit"], commit)) != judged or row["patch_sha256"] != judged[
        1
    ]:
        raise InputError(
            f"the branch {row['branch']} does not hold the patch that was judged (it was {row['commit'][:12]}, it is "
            f"{commit[:12]}): an approval is of what was judged"
        )


def _settle_what_it_is_about(ledger: Ledger, row: Row) -> None:
    """A merged patch was judged in the surroundings of now; one that takes another back has done so."""
    kind, _, number = row["target"].partition(":")
    undone = ledger.one(sa.select(proposals).where(proposals.c.number == int(number))) if kind == UNDO else None
    if undone is not None and undone["state"] == "approved":
        _become(ledger, undone, "reverted")
    elif start := find_start(ledger):
        note_validated(ledger, row["number"], start)


def _judge_again(workspace: Workspace, ledger: Ledger, row: Row, live: str, progress: Progress) -> int:
    """The same patch on top of newer code, as a proposal of its own; returns its number. Raises: InputError."""
    from factory.code_loop.submitting import submit

    code = workspace.repository
    changes = repository.changes(code, row["base_commit"], row["commit"])
    moved = {change.path for change in repository.changes(code, row["base_commit"], live)}
    if both := sorted(moved & {change.path for change in changes} - {KERNELS}):
        raise InputError(
            f"{', '.join(both)} changed since proposal {row['number']} was judged: it has to be proposed anew"
        )
    progress.line(f"  the code moved on to {live[:12]} since proposal {row['number']} was judged: the gate runs again")
    edits = tuple(Edit(change.path, _moved_on(code, row, change, live)) for change in changes)
    same = {key: row[key] for key in ("agent", "target", "title", "hypothesis", "predicted_gain")}
    number = submit(workspace, ledger, progress, Proposal(**same, edits=edits), live)
    _become(ledger, row, "superseded")
    return number


def _moved_on(code: Path, row: Row, change: Change, live: str) -> str:
    """A file as the patch makes it of the live one. In kernels.yaml, a line an op, what other patches chose meanwhile stays.

    Raises: InputError where both chose for the same op, or the patch changed more there than choices.
    """
    text = (change.content or b"").decode()
    if change.path != KERNELS:
        return text
    base, now = (repository.file_text(code, commit, KERNELS) for commit in (row["base_commit"], live))
    anew = f"{KERNELS} changed since proposal {row['number']} was judged"
    replayed = base
    for device in yaml.safe_load(text):
        old, new, held = (section_of(version, device) for version in (base, text, now))
        for op in (op for op in new if old.get(op) != new[op]):
            if held.get(op) != old.get(op):
                raise InputError(f"{anew}, in its choice of {op}: it has to be proposed anew")
            replayed, now = (choose(version, device, op, new[op]) for version in (replayed, now))
    if yaml.safe_load(replayed) != yaml.safe_load(text):
        raise InputError(f"{anew}, and the patch changes more there than choices: it has to be proposed anew")
    return now


def _say(ledger: Ledger, kind: str, row: Row, by: str, why: str = "") -> None:
    """Record a person's word, once, with the hash of what it is about."""
    detail = {"sha256": row["patch_sha256"], "base": row["base_commit"], "by": by} | (
        {"why": why[:2000]} if why else {}
    )
    subject = f"proposal:{row['number']}"
    same = (events.c.kind == kind) & (events.c.subject == subject)
    if all(event["detail"] != detail for event in ledger.rows(sa.select(events.c.detail).where(same))):
        with ledger.begin() as tx:
            record(tx, kind, subject, detail)


def _become(ledger: Ledger, row: Row, state: str) -> None:
    with ledger.begin() as tx:
        tx.execute(proposals.update().where(proposals.c.number == row["number"]).values(state=state))
