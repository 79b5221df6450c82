"""Has merged patches judged again when their surroundings change, in ``factory propose`` and in the daemon.

Such a change is another torch, driver, device or recipe, a throughput drop, a failed benchmark, or a candidate that the release gate rejected.
The gate judges the reverse patch as a normal proposal: the baseline is the live code, and the candidate is the code without the patch. The gate
promotes the reverse patch only if the step is now faster without the patch. The patch stays until a person approves the reverse patch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence

import sqlalchemy as sa

from agents.core.proposal import Edit, Proposal
from factory.code_loop.submitting import remove_remains_and_get_live_commit, run_under_code_loop_lock, submit_proposal
from factory.core.workspace import Workspace
from factory.gates.recipe import gate as recipe_gate
from factory.gates.release.judge import REJECT
from factory.gates.training_start import TrainingStart, find_training_start
from factory.git import repository
from factory.ledger.ledger import Ledger, anomalies, events, record_event
from factory.ledger.plant import Plant
from factory.ledger.rows import UNDO_TARGET, ProposalRow, Subject, VerdictRow
from kernels.contract.machine import describe_this_machine
from kernels.contract.message import Message

AGENT = "revalidator"
AUDIT = "audit"  # the gate of the verdicts of factory.audit, and of reverts that an audit or a diagnosis asks for
VALIDATED = "proposal_validated"
BENCHMARKS_FAILED = "benchmarks_fell"


def revalidate_in_daemon(plant: Plant) -> list[int]:
    """Revalidate merged patches in a pass of the daemon, and return the new proposals. An error is shown once a day, and does not stop the daemon."""
    start = find_training_start(plant.ledger)
    if start is None or not any(_moved(plant.ledger, row.number, start) for row in _merged(plant.ledger)):
        return []
    act = lambda: revalidate_merged_patches(plant, remove_remains_and_get_live_commit(plant))
    words = Message("code_loop.cannot_revalidate", "a merged patch cannot be judged again now")
    return run_under_code_loop_lock(plant, act, "revalidation_waits", "code_loop", words) or []


def revalidate_merged_patches(plant: Plant, base: str) -> list[int]:
    """Propose to undo every merged patch whose surroundings changed, and return the proposals' numbers.

    The caller holds the ``code-loop`` lock. Raises: IsolationError, RepositoryError.
    """
    made = []
    start = find_training_start(plant.ledger)
    for row in _merged(plant.ledger) if start is not None else ():
        assert start is not None
        changed = _moved(plant.ledger, row.number, start)
        if changed is None:
            record_validated_conditions(
                plant.ledger, row.number, start
            )  # the process that merged the patch was killed before it recorded the conditions
        if not changed:
            continue
        plant.progress.line(
            Message(
                "code_loop.surroundings_changed",
                "  {changed} changed since proposal {proposal} was judged; the gate now judges whether to undo the "
                "proposal",
                changed=changed,
                proposal=row.number,
            )
        )
        drafted = draft_reverse_patch(plant.workspace, row, base, changed)
        if drafted is not None:
            made.append(submit_proposal(plant, drafted, base))
        record_validated_conditions(plant.ledger, row.number, start)
    return made


def draft_reverse_patch(workspace: Workspace, row: ProposalRow, base: str, changed: list[str]) -> Proposal | None:
    """Return a proposal of the reverse patch on top of ``base``; None if the patch's files changed since, or if the patch only added files."""
    code = workspace.repository
    live = {change.path for change in repository.read_file_changes(code, row.patch_commit, base)}
    back = [c for c in repository.read_file_changes(code, row.patch_commit, row.base_commit) if c.content is not None]
    if not back or any(change.path in live for change in back):
        return None
    edits = tuple(Edit(change.path, (change.content or b"").decode()) for change in back)
    hypothesis = Message(
        "code_loop.undo",
        "Proposal {proposal} ({title}) made the training step faster when it was judged, but {changed} changed "
        "since then. Prediction: the training step is now faster without the patch. The prediction is refuted if "
        "the step is not faster.",
        proposal=row.number,
        title=row.title[:100],
        changed=changed,
    )
    return Proposal(AGENT, f"{UNDO_TARGET}:{row.number}", f"Undo proposal {row.number}", hypothesis, 1.0, edits)


def read_gain_conditions(ledger: Ledger, start: TrainingStart) -> dict[str, str]:
    """Return the present conditions on which a measured gain depends, besides the code."""
    machine = describe_this_machine()
    sizes = {key: start.recipe[key] for key in ("model", "batch", "precision", "compile")}
    drops = sa.select(sa.func.max(anomalies.c.segment).label("newest")).where(anomalies.c.kind == "throughput_drop")
    slow = ledger.select_first(drops)
    fell = ledger.select_first(
        sa.select(sa.func.max(events.c.id).label("newest")).where(events.c.kind == BENCHMARKS_FAILED)
    )
    newest = VerdictRow.find_first(ledger, "WHERE gate = 'release' ORDER BY id DESC")
    return {
        "torch": machine.torch,
        "device": f"{machine.name}, {machine.processor}"
        + (f", {os.cpu_count()} processors" if machine.threads else ""),
        "driver": machine.driver,
        "recipe": hashlib.sha256(json.dumps(sizes, sort_keys=True).encode()).hexdigest()[:16],
        "throughput": f"dropped in segment {slow['newest']}" if slow and slow["newest"] else "",
        "benchmarks": f"fell, event {fell['newest']}" if fell and fell["newest"] else "",
        "evals": f"{newest.subject} rejected" if newest and newest.outcome == REJECT else "",
    }


def record_failed_benchmarks(ledger: Ledger, tests: Sequence[str]) -> None:
    """Record in the ledger that the benchmarks ``tests`` failed."""
    with ledger.begin() as tx:
        record_event(tx, BENCHMARKS_FAILED, "benchmarks", {"tests": list(tests)})


def _moved(ledger: Ledger, number: int, start: TrainingStart) -> list[str] | None:
    """Return the conditions that changed since a merged patch was judged; [] if it was judged under the present conditions; None without a record."""
    now, before = read_gain_conditions(ledger, start), read_validated_conditions(ledger, number)
    if not before:
        return None
    alike = lambda then: all(
        then.get(key, value) == value for key, value in now.items()
    )  # an older record lacks some keys
    return [] if any(map(alike, before)) else sorted(key for key in now if before[-1].get(key, now[key]) != now[key])


def read_validated_conditions(ledger: Ledger, number: int) -> list[dict[str, str]]:
    """Return the conditions under which a merged patch was judged, oldest first."""
    sql = "SELECT detail FROM events WHERE kind = :kind AND subject = :subject ORDER BY id"
    return [row["detail"] for row in ledger.read(sql, kind=VALIDATED, subject=str(Subject("proposal", number)))]


def record_validated_conditions(ledger: Ledger, number: int, start: TrainingStart) -> None:
    """Record that a merged patch was judged under the present conditions."""
    with ledger.begin() as tx:
        record_event(tx, VALIDATED, Subject("proposal", number), read_gain_conditions(ledger, start))


def _merged(ledger: Ledger) -> list[ProposalRow]:
    """Return the approved patches that made the step faster. Left out are recipes that learn better, and reverts that an audit asked for: they do
    not depend on torch, driver or device."""
    approved = ProposalRow.select(ledger, "WHERE state = 'approved' ORDER BY number")
    return [row for row in approved if row.gate not in (recipe_gate.GATE, AUDIT)]
