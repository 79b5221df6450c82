"""Patches that only a time limit, or a device that was not there, held back are judged again by the daemon.

Later the machine may be less busy. A part for another device, which nothing here executes, stays out of the live code until a daemon of this
ledger runs where that device is.
The limits follow from what approved code takes then, on the machine as it is then (``factory.gates.patience``). A patch that never ends is held
back each time; after a few times it waits for a person.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from factory.code_loop.approvals import judge_again
from factory.code_loop.revalidating import REMIND_SECONDS
from factory.core import devices
from factory.core.errors import FactoryError, WorkspaceError
from factory.core.progress import Progress
from factory.gates.patch.policy import PatchPolicy
from factory.gates.patience import missing_alone, ran_out
from factory.git import repository
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.ledger.rows import ProposalRow, Subject, VerdictRow
from factory.ledger.writing import record_once


def judge_held_again(plant: Plant) -> list[int]:
    """Have the patches that wait for it judged again, as proposals of their own; returns their numbers.

    An error is shown once a day, and stops nothing else.
    """
    policy = PatchPolicy.load(plant.workspace.policy("gates/patch.yaml"))
    waiting = due(plant.ledger, policy)
    if not waiting:
        return []
    from factory.code_loop.submitting import clear_stale, refuse_without_isolation

    code = plant.workspace.repository
    made = []
    try:
        with plant.workspace.lock("code-loop"):
            clear_stale(plant)
            repository.require_settled(code)
            refuse_without_isolation(plant.workspace)
            for row in waiting:
                what = "the lack of this device" if waits_here(row.evidence(plant.ledger)) else "a time limit"
                plant.progress.line(f"  proposal {row.number} was held back by {what} alone; it is judged again")
                try:
                    made.append(judge_again(plant, row, repository.live_commit(code)))
                except FactoryError as error:
                    _say(plant.ledger, plant.progress, Subject("proposal", row.number), f"proposal {row.number}", error)
    except WorkspaceError:
        return made  # another process proposes now: the next pass tries again
    except FactoryError as error:
        _say(plant.ledger, plant.progress, "code_loop", "a proposal that a time limit held back", error)
    return made


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


def _say(ledger: Ledger, progress: Progress, subject: Subject | str, what: str, error: FactoryError) -> None:
    if record_once(ledger, "judging_again_waits", subject, {"why": str(error)}, REMIND_SECONDS):
        progress.line(f"  {what} cannot be judged again now: {error}")
