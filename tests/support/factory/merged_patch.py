"""A plant that trains with patches which an agent wrote, the gate promoted and a person approved."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from factory.code_loop.approvals import merge_promoted_proposal
from factory.core.workspace import Workspace, find_checkout_root
from factory.git import repository
from factory.git.scope import AgentsPolicy
from factory.ledger.ledger import Ledger, proposals, verdicts
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow, Subject
from factory.ledger.writing import record_verdict
from factory.training.certifying import GATE, PREFLIGHT
from factory.training.planning import plan_trunk


def edited(target: Path, path: str, old: str, new: str) -> dict[str, str]:
    """The file with ``old``, which it holds once, replaced."""
    text = (target / path).read_text()
    assert text.count(old) == 1, f"{path} holds {old!r} {text.count(old)} times"
    return {path: text.replace(old, new)}


def merge_patch(
    workspace: Workspace, ledger: Ledger, number: int, edits: Mapping[str, str], drift: float | None = 0.0
) -> str:
    """Propose, judge and approve ``edits`` without the gate's minutes; returns the live commit. ``drift``: as the gate measured it, a share of
    what leaving out one of ten steps caused; None: it was not measured."""
    target = workspace.repository
    agents = AgentsPolicy.load(find_checkout_root() / "policies" / "agents.yaml")
    branch = f"factory/search/{number}-x"
    base = repository.get_live_commit(target)
    applied = repository.apply_proposal(
        target, base, edits.items(), policy=agents, branch=branch, message=f"m {number}", worktrees=workspace.worktrees
    )
    repository.remove_worktree(target, applied.worktree)
    training = {"state": "passed", "reasons": [], "drift": drift, "control_drift": 1.0, "steps": 10}
    with ledger.begin() as tx:
        verdict = tx.execute(
            verdicts.insert().values(
                gate="patch", subject=f"proposal:{number}", policy_sha256="", subject_sha256=applied.patch_sha256,
                outcome="promote", reasons=["so it measured"], created_at=time.time(),
                evidence={} if drift is None else {"stages": {"training": training}},
            )
        ).inserted_primary_key  # fmt: skip
        assert verdict is not None
        tx.execute(
            proposals.insert().values(
                number=number, agent="search", target="kernel:ops", title="Fuse", hypothesis="h", predicted_gain=1.1,
                base_commit=base, branch=branch, commit=applied.commit, patch_sha256=applied.patch_sha256,
                state="judged", verdict=verdict[0], created_at=time.time(),
            )
        )  # fmt: skip
    commit = merge_promoted_proposal(Plant(workspace, ledger), number, "ada")
    assert commit is not None
    return commit


def plan_certified(workspace: Workspace, ledger: Ledger, steps: int | None = None) -> int:
    """The next trunk segment, whose code counts as certified: for tests that are about what comes after. Returns its id."""
    number = plan_trunk(Plant(workspace, ledger), steps)
    row = SegmentRow.get(ledger, number)
    with ledger.begin() as tx:
        for gate in (GATE, PREFLIGHT):
            record_verdict(
                tx, gate, Subject("segment", number), against=None, policy_sha256="", subject_sha256=f"segment {number}", outcome="promote",
                reasons=["so it was measured"], evidence={"old_commit": "", "new_commit": row.code_commit},
            )  # fmt: skip
    return number
