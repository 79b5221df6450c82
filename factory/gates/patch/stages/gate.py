"""The patch gate (DESIGN §5): its stages in order, from cheap to expensive. The first that does not pass ends it.

All code that a patch could have changed runs in the sandbox; the gate believes only what approved code observes from outside.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from factory.core.progress import Progress
from factory.core.workspace import Workspace
from factory.gates.case import Stage
from factory.gates.patch.judge import Gain, judge_patch, told_gain
from factory.gates.patch.policy import PatchPolicy
from factory.gates.patch.stages import evals, exploits, isolated, oracle, scope, static, training
from factory.gates.release.judge import Verdict
from factory.gates.staged_gate import StagedGate
from factory.git.repository import Applied
from factory.ledger.ledger import Ledger

GATE = "patch"
STAGES: tuple[Stage, ...] = (scope, static, oracle, exploits, isolated, training, evals)


def decide(
    workspace: Workspace,
    ledger: Ledger,
    number: int,
    applied: Applied,
    progress: Progress,
    *,
    tries: int,
    patch_id: str,
) -> tuple[int, Verdict, dict[str, Any]]:
    """Judge a proposal: (verdict id, verdict, evidence). Raises: IsolationError, ConfigError; nothing is recorded then."""
    policy = PatchPolicy.load(workspace.policy("gates/patch.yaml"))
    gate = StagedGate(GATE, policy, STAGES, judge_patch, _gain)
    return gate.decide(workspace, ledger, number, applied, progress, tries=tries, patch_id=patch_id)


def _gain(policy: PatchPolicy, stages: Mapping[str, Any], tries: int) -> Gain | None:
    return told_gain(policy.training, stages.get("training", {}), tries)
