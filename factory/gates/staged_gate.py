"""Runs a gate of patches: runs its stages in order until one does not pass, judges the evidence and records the verdict."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Protocol

from agents.core.untrusted import fold_to_one_line
from factory.core.errors import FactoryError
from factory.core.path_removal import remove_path
from factory.core.policy_file import hash_policy
from factory.gates.release.judge import Verdict
from factory.gates.stage_interface import (
    PatchCase,
    Policy,
    Stage,
    StageEvidence,
    StageResult,
    make_failed_evidence,
    make_missing_evidence,
    read_reasons,
)
from factory.gates.training_start import find_training_start
from factory.git import repository
from factory.git.repository import AppliedPatch
from factory.git.scope import AgentsPolicy
from factory.ledger.ledger import record_event
from factory.ledger.plant import Plant
from factory.ledger.rows import Subject
from factory.ledger.writing import record_verdict
from kernels.contract.files import replace_non_finite
from kernels.contract.message import Message

LONGEST_REASON = 1000  # characters


class ReportedGain(Protocol):
    def to_json(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class StagedGate(Generic[Policy]):
    """A gate with its stages. ``judge`` decides on ``{"stages": {name: evidence}, "tries": n, …}``. ``gain`` computes the gain that reports show."""

    name: str
    policy: Policy
    stages: Sequence[Stage]
    judge: Callable[[Policy, Mapping[str, Any]], Verdict]
    gain: Callable[[Policy, Mapping[str, Any], int], ReportedGain | None]

    def judge_proposal(
        self,
        plant: Plant,
        number: int,
        applied: AppliedPatch,
        *,
        tries: int,
        patch_id: str,
    ) -> tuple[int, Verdict, dict[str, Any]]:
        """Judge a proposal and record the verdict. Returns (verdict id, verdict, evidence).

        Raises: IsolationError, ConfigError; after these, nothing is recorded.
        """
        subject = Subject("proposal", number)
        evidence = self.gather_evidence(plant, subject, applied, tries) | {"gate": self.name, "patch_id": patch_id}
        verdict = self.judge(self.policy, evidence)
        with plant.ledger.begin() as tx:
            recorded = record_verdict(
                tx,
                self.name,
                subject,
                against=applied.base,
                policy_sha256=hash_policy(self.policy),
                subject_sha256=applied.patch_sha256,
                outcome=verdict.outcome,
                reasons=verdict.reasons,
                evidence=evidence,
            )
            record_event(tx, "judged", subject, {"outcome": verdict.outcome, "verdict": recorded})
        return recorded, verdict, evidence

    def gather_evidence(self, plant: Plant, subject: Subject, applied: AppliedPatch, tries: int) -> dict[str, Any]:
        """Run the stages, and return their evidence up to the first stage that did not pass."""
        repo = plant.workspace.repository
        work = get_gate_folder(applied.worktree)
        remove_path(work)
        work.mkdir(parents=True)
        with ExitStack() as after_stages:
            after_stages.callback(remove_path, work)
            case = PatchCase(
                plant,
                subject,
                self.policy,
                AgentsPolicy.load(plant.workspace.policy_path("agents.yaml")),
                applied,
                repository.read_file_changes(repo, applied.base, applied.commit),
                repository.checkout_live_code(plant.workspace, applied.base),
                work,
                find_training_start(plant.ledger),
                tries,
                after_stages=after_stages,
            )
            found = self._run_stages(case)
        if repository.hash_patch(repo, applied.base, applied.commit) != applied.patch_sha256:
            changed = Message(
                "gates.branch_changed", "The proposal's branch was changed and no longer contains the proposed patch."
            )
            found["scope"] = convert_to_stored_evidence(make_failed_evidence(changed))
        gain = self.gain(self.policy, found, tries)
        evidence: dict[str, Any] = {
            "base": applied.base,
            "patch_sha256": applied.patch_sha256,
            "tries": tries,
            "stages": found,
            "files": case.changed_paths,
            "gain": gain.to_json() if gain else None,
        }
        return replace_non_finite(evidence)  # type: ignore[no-any-return]

    def _run_stages(self, case: PatchCase[Policy]) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for stage in self.stages:
            name = stage.__name__.rpartition(".")[2]
            began = time.monotonic()
            with case.progress.task(f"gate: {name}"):
                result = _run(stage, name, case)
            case = replace(case, handed_on={**case.handed_on, name: result.handed_on})
            found[name] = convert_to_stored_evidence(result.evidence) | {
                "stage_seconds": round(time.monotonic() - began, 2)
            }
            state = found[name]["state"]
            case.progress.line(
                Message(
                    "gates.stage",
                    "  {stage:<9} {state:<10} {reasons:.160}",
                    stage=name, state=state, reasons=" ".join(map(str, read_reasons(found[name]))),
                )
            )  # fmt: skip
            if state not in ("passed", "not needed"):
                break
        return found


def get_gate_folder(worktree: Path) -> Path:
    """Return the folder in which the gate works while it judges the patch in ``worktree``."""
    return worktree.with_name(worktree.name + "-gate")


def convert_to_stored_evidence(evidence: StageEvidence) -> StageEvidence:
    """Return the evidence with its reasons as JSON. Each text becomes one line without control characters, because it may quote the patch."""
    return evidence | {"reasons": [_one_line(reason.to_json()) for reason in read_reasons(evidence)]}


def _one_line(value: Any) -> Any:
    """Return a message's JSON in which every text is one line of at most ``LONGEST_REASON`` characters."""
    if isinstance(value, str):
        return fold_to_one_line(value, LONGEST_REASON)
    if isinstance(value, dict):
        return {fold_to_one_line(key, LONGEST_REASON): _one_line(part) for key, part in value.items()}
    return [_one_line(part) for part in value] if isinstance(value, list) else value


def _run(stage: Stage, name: str, case: PatchCase[Any]) -> StageResult:
    """Run a stage. An unexpected exception becomes missing evidence, which holds the patch and names the stage.

    Raises: FactoryError.
    """
    try:
        return stage.run(case)
    except FactoryError:
        raise
    except Exception as error:
        reason = Message(
            "gates.stage_error",
            "The stage {stage} ended with the error {kind}: {error}",
            stage=name, kind=type(error).__name__, error=error,
        )  # fmt: skip
        return StageResult(make_missing_evidence(reason, log=traceback.format_exc()))
