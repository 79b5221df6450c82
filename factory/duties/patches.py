"""Patches that were judged: what people and policies decided of them is carried out, and what is merged is looked at again."""

from __future__ import annotations

from factory.duties.duty import Duty, Look, always
from factory.ledger.plant import Plant


def _open_reverts(plant: Plant, _: None) -> None:
    from factory.audit.reverts import open_reverts

    open_reverts(plant)


def _follow_approvals(plant: Plant, _: None) -> None:
    from factory.show.mlflow.answering import follow_proposals

    follow_proposals(plant)


def _judge_merged_again(plant: Plant, _: None) -> None:
    from factory.code_loop.revalidating import follow

    follow(plant)


def _judge_held_again(plant: Plant, _: None) -> None:
    from factory.code_loop.judging_again import judge_held_again

    judge_held_again(plant)


def _audit(plant: Plant, segment: int) -> None:
    from factory.audit.auditing import audit
    from factory.audit.reverts import open_reverts

    audit(plant, segment)
    open_reverts(plant)


def _waiting(look: Look) -> list[int]:
    from factory.audit.policy import AuditPolicy
    from factory.audit.waiting import waiting

    return waiting(look.db, AuditPolicy.load(look.plant.workspace.policy("gates/audit.yaml")))


def _overdue(look: Look) -> list[int]:
    from factory.audit.policy import AuditPolicy

    found = _waiting(look)
    most = AuditPolicy.load(look.plant.workspace.policy("gates/audit.yaml")).most_waiting
    return found if len(found) >= most else []


OPEN_REVERTS = Duty(
    "open_reverts", "open a proposal that undoes each patch that an audit found out", always, _open_reverts, each="pass"
)
FOLLOW_APPROVALS = Duty(
    "follow_approvals", "merge, revert or close the proposals that were decided", always, _follow_approvals, each="pass"
)
JUDGE_MERGED_AGAIN = Duty(
    "judge_merged_again",
    "judge merged patches again where what they were measured on has changed",
    always,
    _judge_merged_again,
    trains=True,
    each="pass",
)
JUDGE_HELD_AGAIN = Duty(
    "judge_held_again",
    "judge patches again that only a time limit held",
    always,
    _judge_held_again,
    trains=True,
    each="pass",
)
OVERDUE_AUDIT = Duty(
    "audit", "replay a window of a segment, when too many wait", _overdue, _audit, trains=True, fills_disk=True
)
AUDIT = Duty(
    "audit",
    "replay a window of a segment that trained with a patch",
    _waiting,
    _audit,
    trains=True,
    fills_disk=True,
    when_idle=True,
)
