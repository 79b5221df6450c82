"""Patches that were judged: what people and policies decided of them is carried out, and what is merged is looked at again.

Apart because a duty is one file, and one line of the table.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from factory.audit.auditing import audit
from factory.audit.drawing import waiting
from factory.audit.policy import AuditPolicy
from factory.code_loop import revalidating
from factory.code_loop.approvals import judge_held_again
from factory.code_loop.reverting import open_reverts
from factory.duties.duty import Duty, Look, always
from factory.ledger.plant import Plant
from factory.show.mlflow.answering import follow_proposals

if TYPE_CHECKING:
    from factory.code_loop.improving import LoopStage


def _waiting(look: Look, overdue: bool = False) -> list[int]:
    """The segments whose audit should be done now. ``overdue``: when so many wait that training waits for one."""
    policy = AuditPolicy.load(look.plant.workspace.policy("gates/audit.yaml"))
    found = waiting(look.db, policy)
    return found if not overdue or len(found) >= policy.most_waiting else []


def _audit(plant: Plant, segment: int) -> None:
    audit(plant, segment)
    open_reverts(plant)


def _improvement(look: Look) -> Iterable[object]:
    from factory.code_loop.improvements import as_written

    if as_written(look.plant.workspace).get("when", "off") == "off":
        return ()  # without the imports of what follows
    from factory.code_loop.improving import due

    return due(look.plant, look.db)


def _improve(plant: Plant, stage: LoopStage) -> None:
    from factory.code_loop.improving import do

    do(plant, stage)


OPEN_REVERTS = Duty(
    "open_reverts", "open a proposal that undoes each patch that an audit found out", always, lambda plant, _: open_reverts(plant), each="pass"
)  # fmt: skip
FOLLOW_APPROVALS = Duty(
    "follow_approvals", "merge, revert or close the proposals that were decided", always, lambda plant, _: follow_proposals(plant), each="pass"
)  # fmt: skip
JUDGE_MERGED_AGAIN = Duty(
    "judge_merged_again", "judge merged patches again where what they were measured on has changed", always,
    lambda plant, _: revalidating.follow(plant), trains=True, each="pass",
)  # fmt: skip
JUDGE_HELD_AGAIN = Duty(
    "judge_held_again", "judge patches again that only a time limit held", always, lambda plant, _: judge_held_again(plant), trains=True, each="pass"
)  # fmt: skip
OVERDUE_AUDIT = Duty(
    "audit", "replay a window of a segment, when too many wait", lambda look: _waiting(look, overdue=True), _audit, trains=True, fills_disk=True
)  # fmt: skip
AUDIT = Duty(
    "audit", "replay a window of a segment that trained with a patch", _waiting, _audit, trains=True, fills_disk=True, when_idle=True
)  # fmt: skip
IMPROVE = Duty(
    "improve", "profile, propose a patch, judge it and, as the policy says, merge it, a stage at a time", _improvement, _improve,
    trains=True, fills_disk=True, plans=True,
)  # fmt: skip
