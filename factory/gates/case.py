"""What a stage of a gate is given, and what it returns.

A stage is a module that is named as the stage and has ``run(case) -> StageResult``. A gate is an ordered tuple of such modules
(``factory.gates.staged_gate``): to add a stage, write its file, put it into the tuple, and its name at the same
place into ``STAGES`` of the gate's judge.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from factory.core.policy_file import StrictPolicy
from factory.core.progress import Progress
from factory.core.workspace import Workspace
from factory.gates.training_start import Start
from factory.git.repository import Applied
from factory.git.scope import AgentsPolicy, Change
from factory.ledger.plant import Plant
from factory.ledger.rows import Subject

Policy = TypeVar("Policy", bound=StrictPolicy)
StageEvidence = dict[str, Any]
"""``{"state": …, "reasons": […]}`` and what was measured, as the ledger stores it. The states are 'passed', 'failed', 'missing' (it could
not be measured) and 'not needed'."""


@dataclass(frozen=True)
class PatchCase(Generic[Policy]):
    """A patch that is being judged: everything that a stage may use."""

    plant: Plant
    subject: Subject  # the proposal
    policy: Policy
    agents: AgentsPolicy
    applied: Applied
    changes: list[Change]
    baseline: Path  # worktree of the base commit
    work: Path  # scratch folder, removed after the last stage
    start: Start | None  # where the gate's training starts; None: the trunk has no checkpoint yet
    tries: int  # how often this target was tried, this time included
    handed_on: Mapping[str, Any] = field(default_factory=dict)  # by earlier stages, by the stage's name
    after_stages: ExitStack = field(default_factory=ExitStack)  # closed after the last stage, whatever happened

    @property
    def workspace(self) -> Workspace:
        return self.plant.workspace

    @property
    def progress(self) -> Progress:
        return self.plant.progress

    @property
    def paths(self) -> list[str]:
        return [change.path for change in self.changes]

    @property
    def candidate(self) -> Path:
        """Worktree of the patch."""
        return self.applied.worktree

    def base_bytes(self, path: str) -> bytes | None:
        """The file before the patch; None: there was none."""
        file = self.baseline / path
        return file.read_bytes() if file.is_file() else None


@dataclass(frozen=True)
class StageResult:
    """``handed_on``: what a later stage needs of this one (``case.handed_on[name]``); it is not stored."""

    evidence: StageEvidence
    handed_on: Any = None


class Stage(Protocol):
    """A module of one stage."""

    __name__: str

    def run(self, case: PatchCase[Any]) -> StageResult:
        """Raises: FactoryError where the machine or a policy is at fault; any other exception holds the patch back."""
        ...


def passed(*reasons: str, **measured: Any) -> StageEvidence:
    return {"state": "passed", "reasons": list(reasons), **measured}


def failed(*reasons: str, **measured: Any) -> StageEvidence:
    return {"state": "failed", "reasons": list(reasons), **measured}


def missing(*reasons: str, **measured: Any) -> StageEvidence:
    """It could not be measured, which says nothing about the patch and holds it back."""
    return {"state": "missing", "reasons": list(reasons), **measured}


def not_needed(reason: str) -> StageEvidence:
    return {"state": "not needed", "reasons": [reason]}


NO_START = missing("the trunk has no checkpoint to train from yet: 'factory run' makes one")
NOTHING_HELD_OUT = missing("there is no held-out document to score weights on: ingest more documents")
