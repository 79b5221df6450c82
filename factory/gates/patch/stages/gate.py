"""The patch gate (DESIGN §5) with its stages in order, from cheap to expensive. The first stage that does not pass ends the gate.

All code that a patch could have changed runs in the sandbox. The gate believes only observations that approved code makes from outside.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from factory.core.workspace import Workspace
from factory.gates.patch.judge import StepGain, find_measured_gain, judge_patch
from factory.gates.patch.policy import PatchPolicy
from factory.gates.patch.stages import evals, exploits, isolated, matrix, oracle, scope, static, training
from factory.gates.stage_interface import Stage
from factory.gates.staged_gate import StagedGate

STAGES: tuple[Stage, ...] = (scope, static, oracle, exploits, isolated, matrix, training, evals)


def make_patch_gate(workspace: Workspace) -> StagedGate[PatchPolicy]:
    """Make the patch gate with the workspace's policy. Raises: ConfigError."""
    return StagedGate("patch", PatchPolicy.load(workspace.policy_path("gates/patch.yaml")), STAGES, judge_patch, _gain)


def _gain(policy: PatchPolicy, stages: Mapping[str, Any], tries: int) -> StepGain | None:
    return find_measured_gain(policy.training, stages.get("training", {}), tries)
