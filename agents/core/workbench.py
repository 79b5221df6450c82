"""The workbench: the protocol by which an agent reads, checks and measures. The factory implements it with its sandbox."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from agents.core.proposal import Edit
from kernels.contract.message import CodedError


@dataclass(frozen=True)
class Measurement:
    """The times of two implementations of an op, outside the training step, on the recipe's shapes. ``seconds``: of a forward and backward
    pass (``kernels.contract.bench``)."""

    seconds: float
    against_seconds: float
    ratio: float  # the other's time over this one's, the median of pairs: above one is faster
    ratio_low: float  # its lower quartile


@dataclass(frozen=True)
class EarlierProposal:
    """An earlier proposal and its verdict."""

    patch_id: str  # as ``Proposal.patch_id``
    outcome: str  # promote | hold | reject | pending; declined: an agent proposed nothing, and ``reason`` says why
    reason: str = ""
    title: str = ""
    closed: bool = False  # agents may not try its target again for now, whatever the verdict was


@dataclass(frozen=True)
class AgentWrittenLines:
    """Lines of a file, from 1 on, that an agent wrote in a proposal that was merged."""

    first: int
    last: int
    agent: str
    proposal: int


class MeasurementError(CodedError):
    """A measurement was not possible. The message gives the reason."""


class UnreadableFileError(CodedError):
    """The file does not exist or is not in scope."""


@dataclass(frozen=True)
class QuickCheck:
    """The result of a quick check of edits, which is not a verdict. ``problems``: of the first stage that found any. The gate would find them too."""

    stage: str  # scope | static | oracle | import
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems


@dataclass(frozen=True)
class Variant:
    """One of several patches that an agent tries together."""

    name: str
    edits: tuple[Edit, ...]


@dataclass(frozen=True)
class TriedVariant:
    """A row of a table of tries. ``times``: lines about each changed op alone and about whole training steps, beside the present code. The code under
    test measures them, so only its author sees them. ``known``: nothing was run, because the same edits were tried before in this run."""

    name: str
    check: QuickCheck
    times: tuple[str, ...] = ()
    known: bool = False


@dataclass(frozen=True)
class TryTable:
    """The results of variants, in order, and a line about the budget of tries."""

    rows: tuple[TriedVariant, ...]
    budget: str


class Workbench(Protocol):
    """The operations that an agent may use."""

    def files(self, patchable: bool = False) -> list[str]:
        """Paths, relative to the repository's root, of the files that the agent may read; with ``patchable``, of those that it may patch."""
        ...

    def read(self, path: str) -> str:
        """The text of a file; ``path`` is relative to the repository's root. Raises: UnreadableFileError."""
        ...

    def find_agent_written_lines(self, path: str) -> list[AgentWrittenLines]:
        """The lines of a file that agents wrote, in order. Raises: UnreadableFileError."""
        ...

    def check(self, edits: Sequence[Edit], op: str = "") -> QuickCheck:
        """Run the gate's first stages on these edits. It compares ``op``, and each op that they change, against fp64 in the sandbox."""
        ...

    def try_variants(self, variants: Sequence[Variant], op: str = "", target: str = "") -> TryTable:
        """Check variants as ``check`` does. Then time the correct ones beside the present code, within the agent's budget of tries: the changed ops
        alone, and whole training steps. ``target``: the name under which later runs find the results.
        """
        ...

    def list_earlier_tries(self, target: str) -> list[str]:
        """What earlier runs tried on a target, a line each, oldest first."""
        ...

    def measure(self, op: str, implementation: str, against: str, rows: int = 0) -> Measurement:
        """Time an implementation of an op ``against`` another. ``rows``: rows of a micro-batch; 0: as in the recipe. Raises: MeasurementError."""
        ...

    def list_earlier_proposals(self, target: str) -> list[EarlierProposal]:
        """Earlier proposals for a target, or for all targets of a kind (``quality:``), oldest first."""
        ...
