"""Decisions on judged proposals: a person approves, rejects or reverts one, and the checked-out branch follows.

An approval binds to the hash of the patch that was judged and to the commit it was judged on. It is refused when the branch holds
another patch; when the live code has changed, the same patch is first proposed and judged on top of it. The decision is recorded before
the branch is moved, and the state after it: killed in between, the same call finishes.

A decision comes from the command line, or from MLflow: the tag ``approval`` of the proposal's run. With ``approval: automatic`` in
policies/gates/patch.yaml the verdict is enough.

What a time limit alone held back, or a device that was not there, the daemon has judged again later: the machine may be less busy then, and the
limits follow from what approved code takes (``factory.gates.patience``); a daemon may run where that device is. A patch that never ends is
held back each time; after a few times it waits for a person.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from agents.core.proposal import Edit, Proposal
from agents.core.yaml_edit import set_value
from factory.code_loop.revalidating import AUDIT, note_validated
from factory.code_loop.reverting import reopen
from factory.code_loop.submitting import PROPOSED, in_turn, make_ready, submit
from factory.computing.tuned_kernels import KERNELS
from factory.core import devices
from factory.core.errors import InputError
from factory.core.workspace import Workspace
from factory.gates.patch.policy import PatchPolicy
from factory.gates.patience import missing_alone, ran_out
from factory.gates.training_start import find_start
from factory.git import repository
from factory.git.scope import Change
from factory.ledger.ledger import Ledger, proposals
from factory.ledger.plant import Plant
from factory.ledger.rows import UNDO, ProposalRow, Subject, VerdictRow
from factory.ledger.writing import record_once
from kernels.contract.choice import section_of


def approve(plant: Plant, number: int, by: str) -> str | None:
    """Merge a proposal that the gate promotes; returns the live commit, or None when it had to be judged again and was not promoted.

    The caller holds the workspace's ``code-loop`` lock. Raises: InputError when there is nothing to approve, or the branch does not hold
    what was judged; RepositoryError when the checkout has uncommitted changes. Nothing has moved then.
    """
    row = _judged(plant.ledger, number)
    if row.outcome != "promote" or not row.commit:
        why = "; ".join(row.reasons or [])[:500]
        raise InputError(f"the gate's verdict on proposal {number} is {(row.outcome or '').upper()}: {why}")
    code = plant.workspace.repository
    live = repository.live_commit(code)
    if not repository.contains(code, live, row.patch_commit):
        _check_patch(plant.workspace, row)
        if live != row.base_commit:
            again = judge_again(plant, row, live)
            promoted = ProposalRow.get(plant.ledger, again).outcome == "promote"
            return approve(plant, again, by) if promoted else None
        _record_decision(plant.ledger, "proposal_approved", row, by)
        repository.advance(code, live, row.patch_commit)
    _become(plant.ledger, row, "approved")
    _after_merge(plant.ledger, row)
    plant.progress.line(
        f"  proposal {number} is live: {row.patch_commit[:12]}; the next segment trains with it, once it is certified"
    )
    return row.patch_commit


def reject(ledger: Ledger, number: int, by: str, why: str = "") -> int:
    """Reject a judged proposal, whatever its verdict; returns its number. Its branch stays. Raises: InputError."""
    row = _judged(ledger, number)
    _record_decision(ledger, "proposal_rejected", row, by, why)
    _become(ledger, row, "rejected")
    return number


def revert(plant: Plant, number: int, by: str, why: str = "") -> str:
    """Undo an approved proposal by a commit of its own, and return it. No gate judges it: the old code was live before.

    Raises: InputError when it is not live; RepositoryError when the same files changed since, or have uncommitted changes.
    """
    row = ProposalRow.get(plant.ledger, number)
    if row.state != "approved":
        raise InputError(f"proposal {number} is {_state(row)}, not approved: there is nothing to revert")
    code = plant.workspace.repository
    live = repository.live_commit(code)
    reason = f"\n\n{why.strip()[:2000]}" if why.strip() else ""
    message = f"Revert proposal {number}: {row.title[:80]}{reason}\n\nThis reverts {row.patch_commit}.\n"
    undone = repository.undoing(code, live, row.base_commit, row.patch_commit, message)
    _record_decision(plant.ledger, "proposal_reverted", row, by, why)
    repository.advance(code, live, undone)
    _become(plant.ledger, row, "reverted")
    return undone


def follow(plant: Plant, word_of: Callable[[int], str | None]) -> int:
    """Carry out what the policy decides, or a person, about proposals that wait; returns how many were settled.

    ``word_of``: what a person said elsewhere about a proposal, 'approved' or 'rejected'; all else is no word. A proposal that cannot be merged
    is said once, and stops nothing.
    """
    waiting = _waiting(plant.ledger)
    automatic = bool(waiting) and PatchPolicy.load(plant.workspace.policy("gates/patch.yaml")).approval == "automatic"
    settled = 0
    for number in waiting:
        word, by = ("approved", "policy") if automatic else (word_of(number), "mlflow")
        if word == "approved":
            act: Callable[[], object] = partial(approve, plant, number, by)
        elif word == "rejected":
            act = partial(reject, plant.ledger, number, by)
        else:
            continue
        words = f"proposal {number} cannot be {word} (requested by {by})"
        settled += (
            in_turn(plant, act, "decision_refused", Subject("proposal", number), words, word=word, by=by) is not None
        )
    return settled


def _waiting(ledger: Ledger) -> list[int]:
    """The numbers of promoted proposals that wait for a decision."""
    which = "WHERE state = 'judged' AND outcome = 'promote' ORDER BY number"
    return [row.number for row in ProposalRow.select(ledger, which)]


def _judged(ledger: Ledger, number: int) -> ProposalRow:
    row = ProposalRow.get(ledger, number)
    if row.state != "judged":
        raise InputError(f"proposal {number} is {_state(row)}: there is nothing to decide about it")
    return row


def _state(row: ProposalRow) -> str:
    return {"failed": "failed (it was never judged)", "drafted": "being judged", "written": "not judged yet"}.get(
        row.state
    ) or str(row.state)


def _check_patch(workspace: Workspace, row: ProposalRow) -> None:
    """Raises: InputError when the branch does not hold the patch that the verdict is about."""
    code = workspace.repository
    commit = repository.branch_commit(code, row.branch)
    if commit is None:
        raise InputError(f"the branch {row.branch} is gone: there is nothing to merge")
    judged = (row.patch_commit, row.judged_sha256)
    if (commit, repository.patch_sha256(code, row.base_commit, commit)) != judged or row.patch_sha256 != judged[1]:
        raise InputError(
            f"the branch {row.branch} does not hold the patch that was judged (it was {row.patch_commit[:12]}, it is "
            f"{commit[:12]}), and only what was judged can be approved: propose it again"
        )


def _after_merge(ledger: Ledger, row: ProposalRow) -> None:
    """Note the surroundings that a merged patch was judged in; mark the proposal that it undoes as reverted."""
    kind, _, number = row.target.partition(":")
    undone = ProposalRow.first(ledger, "WHERE number = :number", number=int(number)) if kind == UNDO else None
    if undone is not None and undone.state == "approved":
        _become(ledger, undone, "reverted")
    elif start := find_start(ledger):
        note_validated(ledger, row.number, start)


def judge_again(plant: Plant, row: ProposalRow, live: str) -> int:
    """The same patch on top of newer code, as a proposal of its own; returns its number. Raises: InputError."""
    if row.gate == AUDIT:  # measured on a segment, whatever is live now
        number = reopen(plant, row)
        _become(plant.ledger, row, "superseded")
        return number
    code = plant.workspace.repository
    changes = repository.changes(code, row.base_commit, row.patch_commit)
    moved = {change.path for change in repository.changes(code, row.base_commit, live)}
    if both := sorted(moved & {change.path for change in changes} - {KERNELS}):
        raise InputError(f"{', '.join(both)} changed since proposal {row.number} was judged: propose it again")
    plant.progress.line(
        f"  the code changed to {live[:12]} since proposal {row.number} was judged: the gate runs again"
    )
    edits = tuple(Edit(change.path, _moved_on(code, row, change, live)) for change in changes)
    number = submit(plant, Proposal(**row.only(PROPOSED), edits=edits), live)
    _become(plant.ledger, row, "superseded")
    return number


def judge_held_again(plant: Plant) -> list[int]:
    """Have the patches that wait for it judged again, as proposals of their own; returns their numbers."""
    made = []
    for row in due(plant.ledger, PatchPolicy.load(plant.workspace.policy("gates/patch.yaml"))):
        words = f"proposal {row.number} cannot be judged again now"
        made.append(
            in_turn(
                plant,
                partial(_judge_held_again, plant, row),
                "judging_again_waits",
                Subject("proposal", row.number),
                words,
            )
        )
    return [number for number in made if number is not None]


def _judge_held_again(plant: Plant, row: ProposalRow) -> int:
    live = make_ready(plant)
    what = "the lack of this device" if waits_here(row.evidence(plant.ledger)) else "a time limit"
    plant.say(f"  proposal {row.number} was held back by {what} alone; it is judged again")
    return judge_again(plant, row, live)


def due(ledger: Ledger, policy: PatchPolicy) -> list[ProposalRow]:
    """The proposals to judge again now, oldest first."""
    held = [
        (row, evidence)
        for row in ProposalRow.select(ledger, "WHERE outcome = 'hold' ORDER BY number")
        if ran_out(evidence := row.evidence(ledger)) or waits_here(evidence)
    ]
    times: dict[str, int] = {}
    for _, evidence in held:
        times[evidence["patch_id"]] = times.get(evidence["patch_id"], 0) + 1
    since = time.time() - policy.judge_again_after_seconds
    return [
        row
        for row, evidence in held
        if row.state == "judged"
        and times[evidence["patch_id"]] <= policy.judge_again
        and row.verdict is not None
        and (waits_here(evidence) or VerdictRow.get(ledger, row.verdict).created_at <= since)
    ]


def waits_here(evidence: Mapping[str, Any]) -> bool:
    """Was a patch held back only because the device that is here was not there?"""
    return missing_alone(evidence).get("waits_for") == devices.kind()


def _moved_on(code: Path, row: ProposalRow, change: Change, live: str) -> str:
    """The patch's version of a file, applied to the live one. In kernels.yaml, choices of other ops that were merged meanwhile stay.

    Raises: InputError where both chose for the same op, or the patch changed more in kernels.yaml than choices.
    """
    text = (change.content or b"").decode()
    if change.path != KERNELS:
        return text
    base, now = (repository.file_text(code, commit, KERNELS) for commit in (row.base_commit, live))
    changed = f"{KERNELS} changed since proposal {row.number} was judged"
    replayed = base
    for device in yaml.safe_load(text):
        old, new, held = (section_of(version, device) for version in (base, text, now))
        for op in (op for op in new if old.get(op) != new[op]):
            if held.get(op) != old.get(op):
                raise InputError(f"{changed}, in its choice of {op}: propose it again")
            replayed, now = (set_value(version, (device, op), new[op]) for version in (replayed, now))
    if yaml.safe_load(replayed) != yaml.safe_load(text):
        raise InputError(f"{changed}, and the patch changes more there than choices: propose it again")
    return now


def _record_decision(ledger: Ledger, kind: str, row: ProposalRow, by: str, why: str = "") -> None:
    """Record a decision once, with the hash of the patch."""
    detail = {"sha256": row.patch_sha256, "base": row.base_commit, "by": by}
    record_once(ledger, kind, Subject("proposal", row.number), detail | ({"why": why[:2000]} if why else {}))


def _become(ledger: Ledger, row: ProposalRow, state: str) -> None:
    with ledger.begin() as tx:
        tx.execute(proposals.update().where(proposals.c.number == row.number).values(state=state))
