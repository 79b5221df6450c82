"""What tests of approvals and of revalidation share: a plant with judged proposals, and a gate that says what it is told."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from factory.code_loop import approvals
from factory.core.workspace import Workspace, WorkspaceConfig, find_checkout_root
from factory.gates.release.judge import Verdict
from factory.gates.staged_gate import StagedGate
from factory.git import repository
from factory.git.scope import AgentsPolicy
from factory.ledger.ledger import Ledger, events, proposals, verdicts
from factory.ledger.plant import Plant
from tests.support.git import git

FILES = {"kernels/ops.py": "x = 1\n", "kernels/new.txt.py": "z = 1\n", "README.md": "# target\n"}
NEW = {"kernels/ops.py": "x = 2\n", "kernels/fused.py": "y = 1\n"}


class PatchPlant(Plant):
    """A repository of three files, a workspace, and a proposal that the gate judged."""

    def __init__(self, folder: Path, mlflow_uri: str = "") -> None:
        self.target = folder / "target"
        for path, text in FILES.items():
            (self.target / path).parent.mkdir(parents=True, exist_ok=True)
            (self.target / path).write_text(text)
        git(folder, "init", "-q", "-b", "main", str(self.target))
        git(self.target, "add", "-A")
        git(self.target, "commit", "-q", "-m", "base")
        workspace = Workspace.create(
            folder / "workspace", WorkspaceConfig(repository=str(self.target), mlflow_uri=mlflow_uri)
        )
        super().__init__(workspace, Ledger.create(workspace.ledger_url))
        self.base = self.head()

    def head(self) -> str:
        return repository.get_live_commit(self.target)

    def judged(
        self, number: int = 1, outcome: str = "promote", edits: dict[str, str] | None = None, target: str = "kernel:ops"
    ) -> dict[str, Any]:
        """As the code loop leaves it, without the minutes of the gate."""
        agents = AgentsPolicy.load(find_checkout_root() / "policies" / "agents.yaml")
        branch, worktrees = f"factory/search/{number}-x", self.workspace.worktrees
        made = list((edits or NEW).items())
        applied = repository.apply_proposal(
            self.target, self.head(), made, policy=agents, branch=branch, message=f"m {number}", worktrees=worktrees
        )
        repository.remove_worktree(self.target, applied.worktree)
        with self.ledger.begin() as tx:
            verdict = tx.execute(
                verdicts.insert().values(
                    gate="patch", subject=f"proposal:{number}", policy_sha256="", subject_sha256=applied.patch_sha256,
                    outcome=outcome, reasons=["so it measured"], evidence={}, created_at=time.time(),
                )
            ).inserted_primary_key  # fmt: skip
            assert verdict is not None
            tx.execute(
                proposals.insert().values(
                    number=number, agent="search", target=target, title="Fuse", hypothesis="h", predicted_gain=1.1,
                    base_commit=applied.base, branch=branch, commit=applied.commit, patch_sha256=applied.patch_sha256,
                    state="judged", verdict=verdict[0], created_at=time.time(),
                )
            )  # fmt: skip
        return self.row(number)

    def row(self, number: int = 1) -> dict[str, Any]:
        row = self.ledger.select_first(sa.select(proposals).where(proposals.c.number == number))
        assert row is not None
        return row

    def words(self) -> list[tuple[str, str]]:
        kinds = ("proposal_approved", "proposal_rejected", "proposal_reverted")
        found = self.ledger.select_rows(sa.select(events).where(events.c.kind.in_(kinds)).order_by(events.c.id))
        return [(event["kind"].removeprefix("proposal_"), event["detail"]["by"]) for event in found]

    def approve(self, number: int = 1) -> str | None:
        return approvals.merge_promoted_proposal(self, number, "ada")

    def files(self) -> dict[str, str]:
        """Of the checkout, as they are; git must agree that nothing differs from HEAD."""
        assert git(self.target, "status", "--porcelain") == ""
        return {p: (self.target / p).read_text() for p in git(self.target, "ls-files").split()}


def given_verdict(monkeypatch: pytest.MonkeyPatch, outcome: str) -> list[tuple[int, str, str]]:
    """Instead of the gate's minutes; what it was asked to judge is kept: (number, base, hash of the patch)."""
    judged = []

    def decide(_gate: Any, plant: Plant, number: int, applied: Any, *_: Any, **__: Any) -> Any:
        judged.append((number, applied.base, applied.patch_sha256))
        evidence = {"stages": {}}
        with plant.ledger.begin() as tx:
            key = tx.execute(
                verdicts.insert().values(
                    gate="patch", subject=f"proposal:{number}", policy_sha256="", subject_sha256=applied.patch_sha256,
                    outcome=outcome, reasons=["now"], evidence=evidence, created_at=time.time(),
                )
            ).inserted_primary_key  # fmt: skip
        return key[0], Verdict(outcome, ("now",)), evidence  # type: ignore[index]

    monkeypatch.setattr(StagedGate, "judge_proposal", decide)
    return judged
