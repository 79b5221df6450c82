"""The interface of a gate's stages: their input and their result.

A stage is a module with the stage's name and a function ``run(case) -> StageResult``. A gate is an ordered tuple of such modules
(``factory.gates.staged_gate``). To add a stage, write its file, add the module to the tuple, and add its name at the same
place in ``STAGES`` of the gate's judge.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from factory.core.policy_file import StrictPolicy
from factory.core.progress import Progress
from factory.core.workspace import Workspace
from factory.gates.training_start import TrainingStart
from factory.git.repository import AppliedPatch
from factory.git.scope import AgentsPolicy, FileChange
from factory.ledger.plant import Plant
from factory.ledger.rows import Subject
from kernels.contract.message import Message

CODE_SUFFIXES = (".py", ".cpp", ".h", ".cu", ".cuh")
Policy = TypeVar("Policy", bound=StrictPolicy)
StageEvidence = dict[str, Any]
"""``{"state": …, "reasons": […]}`` and the measurements of a stage. The states are 'passed', 'failed', 'missing' (the stage could not measure) and
'not needed'. A reason is a message. The ledger stores the message's JSON (``read_reasons``)."""


@dataclass(frozen=True)
class PatchCase(Generic[Policy]):
    """A patch to judge, with all values that a stage may use."""

    plant: Plant
    subject: Subject  # the proposal
    policy: Policy
    agents: AgentsPolicy
    applied: AppliedPatch
    changes: list[FileChange]
    baseline: Path  # worktree of the base commit
    work: Path  # a scratch folder, which is removed after the last stage
    start: TrainingStart | None  # where the gate's training starts; None: the trunk has no checkpoint yet
    tries: int  # number of tries on this target, this one included
    handed_on: Mapping[str, Any] = field(default_factory=dict)  # name of an earlier stage → its ``handed_on``
    after_stages: ExitStack = field(default_factory=ExitStack)  # closed after the last stage, also after an error

    @property
    def workspace(self) -> Workspace:
        return self.plant.workspace

    @property
    def progress(self) -> Progress:
        return self.plant.progress

    @property
    def changed_paths(self) -> list[str]:
        return [change.path for change in self.changes]

    @property
    def candidate(self) -> Path:
        """The worktree of the patch."""
        return self.applied.worktree

    def read_base_file(self, path: str) -> bytes | None:
        """Return the content of a file before the patch. None: the file did not exist."""
        file = self.baseline / path
        return file.read_bytes() if file.is_file() else None


def changes_code(paths: Iterable[str]) -> bool:
    """True if a patch of these files changes Python, C++ or CUDA C++, so that code runs which nobody approved."""
    return any(path.endswith(CODE_SUFFIXES) for path in paths)


@dataclass(frozen=True)
class StageResult:
    """``handed_on``: values for later stages, which read them as ``case.handed_on[name]``. They are not stored."""

    evidence: StageEvidence
    handed_on: Any = None


class Stage(Protocol):
    """The interface of a stage's module."""

    __name__: str

    def run(self, case: PatchCase[Any]) -> StageResult:
        """Run the stage. Raises: FactoryError for a fault of the machine or a policy. Any other exception holds the patch."""
        ...


def make_passed_evidence(*reasons: Message, **measured: Any) -> StageEvidence:
    """Return the evidence of a stage that passed."""
    return {"state": "passed", "reasons": list(reasons), **measured}


def make_failed_evidence(*reasons: Message, **measured: Any) -> StageEvidence:
    """Return evidence that rejects the patch."""
    return {"state": "failed", "reasons": list(reasons), **measured}


def make_missing_evidence(*reasons: Message, **measured: Any) -> StageEvidence:
    """Return the evidence of a stage that could not measure. It says nothing about the patch, and holds it."""
    return {"state": "missing", "reasons": list(reasons), **measured}


def make_not_needed_evidence(reason: Message) -> StageEvidence:
    """Return the evidence of a stage that this patch does not need."""
    return {"state": "not needed", "reasons": [reason]}


def read_reasons(stage: Mapping[str, Any]) -> list[Message]:
    """Return the reasons in a stage's evidence. The evidence may be as the stage returned it, or as the ledger stores it.

    >>> [(one.code, str(one)) for one in read_reasons({"reasons": [Message("gates.no_start", "No.").to_json(), "as older factories wrote it"]})]
    [('gates.no_start', 'No.'), ('', 'as older factories wrote it')]
    """
    return [Message.from_json(reason) for reason in stage.get("reasons") or []]


NO_START = make_missing_evidence(
    Message("gates.no_start", "The trunk has no checkpoint to train from yet. 'factory run' makes the first one.")
)
NOTHING_HELD_OUT = make_missing_evidence(
    Message(
        "gates.nothing_held_out",
        "No document is held out, so no weights can be scored. Ingest more documents: 'factory ingest PATH'.",
    )
)


def make_stage_failed_message(name: str) -> Message:
    """Return the reason for a failed stage that gave no reason."""
    return Message("gates.stage_failed", "The stage {stage} failed.", stage=name)


def make_no_evidence_message(name: str) -> Message:
    """Return the reason for a stage that left no evidence."""
    return Message("gates.no_evidence", "The evidence of the stage {stage} is missing.", stage=name)


def make_unknown_tries_message() -> Message:
    """Return the reason for evidence without the number of tries."""
    return Message("gates.tries_unknown", "The evidence does not give the number of tries on this patch's target.")
