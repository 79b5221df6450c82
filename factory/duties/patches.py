"""Duties about judged patches: decisions of people and policies are carried out, and merged patches are audited and judged again.

A separate file, because each topic of duties is one file.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from factory.audit.audit_segment import audit_segment
from factory.audit.audit_windows import find_due_audits
from factory.audit.policy import AuditPolicy
from factory.code_loop import revalidating
from factory.code_loop.judging_again import judge_held_patch_again, list_due_judgements
from factory.code_loop.reverting import propose_reverts_of_blamed_patches
from factory.duties.duty import Duty, DutyState, always_due
from factory.ledger.plant import Plant
from factory.show.mlflow.approval_answers import carry_out_proposal_decisions
from kernels.contract.message import Message

if TYPE_CHECKING:
    from factory.code_loop.improving import LoopStage


def _waiting(state: DutyState, overdue: bool = False) -> list[int]:
    """Return the segments to audit now. With ``overdue``, only if so many segments wait for an audit that training must wait."""
    policy = AuditPolicy.load(state.plant.workspace.policy_path("gates/audit.yaml"))
    found = find_due_audits(state.db, policy)
    return found if not overdue or len(found) >= policy.most_waiting else []


def _audit(plant: Plant, segment: int) -> None:
    audit_segment(plant, segment)
    propose_reverts_of_blamed_patches(plant)


def _improvement(state: DutyState) -> Iterable[object]:
    from factory.code_loop.improvements import read_unchecked_improve_policy

    if read_unchecked_improve_policy(state.plant.workspace).get("when", "off") == "off":
        return ()  # before the heavy imports
    from factory.code_loop.improving import list_due_stages

    return list_due_stages(state.plant, state.db)


def _improve(plant: Plant, stage: LoopStage) -> None:
    from factory.code_loop.improving import do_stage

    do_stage(plant, stage)


OPEN_REVERTS = Duty(
    "open_reverts", Message("duties.open_reverts", "open a proposal that undoes each patch that failed its audit"), always_due,
    lambda plant, _: propose_reverts_of_blamed_patches(plant), each="pass",
)  # fmt: skip
FOLLOW_APPROVALS = Duty(
    "follow_approvals", Message("duties.follow_approvals", "merge, revert or close proposals after a decision"), always_due,
    lambda plant, _: carry_out_proposal_decisions(plant), each="pass",
)  # fmt: skip
JUDGE_MERGED_AGAIN = Duty(
    "judge_merged_again", Message("duties.judge_merged_again", "judge merged patches again when their environment has changed"), always_due,
    lambda plant, _: revalidating.revalidate_in_daemon(plant), trains=True, each="pass",
)  # fmt: skip
OVERDUE_AUDIT = Duty(
    "audit", Message("duties.overdue_audit", "if too many segments wait for an audit, replay a window of a segment before more training"),
    lambda state: _waiting(state, overdue=True), _audit, trains=True, fills_disk=True,
)  # fmt: skip
AUDIT = Duty(
    "audit", Message("duties.audit", "replay a window of a segment that was trained with a patch"), _waiting, _audit, trains=True, fills_disk=True,
    when_idle=True,
)  # fmt: skip
JUDGE_HELD_AGAIN = Duty(
    "judge_held_again", Message("duties.judge_held_again", "when the machine is quiet, judge a patch again that only noise, a time limit or a "
                                                           "missing device held"),
    lambda state: list_due_judgements(state.plant, state.db), judge_held_patch_again, trains=True, fills_disk=True, when_idle=True,
)  # fmt: skip
IMPROVE = Duty(
    "improve", Message("duties.improve", "profile, propose a patch, judge it and merge it if the policy allows, one stage at a time"), _improvement,
    _improve, trains=True, fills_disk=True, plans=True,
)  # fmt: skip
