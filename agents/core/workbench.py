"""The workbench, an agent's only access to the world. The factory implements it, in its sandbox."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from agents.core.proposal import Edit


@dataclass(frozen=True)
class Measurement:
    """One implementation of an op against another, alone, on the recipe's shapes: seconds of a forward and backward (``kernels.contract.bench``)."""

    seconds: float
    against_seconds: float
    ratio: float  # against over mine: above one is faster; the median of paired ratios
    ratio_low: float  # its lower quartile


@dataclass(frozen=True)
class Attempt:
    """An earlier proposal."""

    patch_id: str  # of ``Proposal.patch_id``
    outcome: str  # promote | hold | reject | pending
    reason: str = ""
    title: str = ""
    closed: bool = False  # its target is left alone for now, whatever the verdict was


@dataclass(frozen=True)
class AgentLines:
    """Lines of a file, from 1 on, that an agent wrote in a proposal that was merged."""

    first: int
    last: int
    agent: str
    proposal: int


class MeasurementError(Exception):
    """A measurement was not possible; the text says why."""


class ReadError(Exception):
    """The file does not exist or is not in scope."""


@dataclass(frozen=True)
class Checked:
    """A quick check of edits, no verdict. ``problems``: those of the first stage that found any; the gate would find them too."""

    stage: str  # scope | static | oracle | import
    problems: tuple[str, ...]
    times: tuple[str, ...] = ()
    """A line for each op whose choice changes: how fast it is alone. Measured by the code under test, so only for its author."""

    @property
    def ok(self) -> bool:
        return not self.problems


class Workbench(Protocol):
    def files(self, patchable: bool = False) -> list[str]:
        """The files that may be read (or patched, which are fewer), paths relative to the repository's root."""
        ...

    def read(self, path: str) -> str:
        """A file in scope, path relative to the repository's root. Raises: ReadError."""
        ...

    def written_by_agents(self, path: str) -> list[AgentLines]:
        """Which lines of a file in scope agents wrote, in order. Raises: ReadError."""
        ...

    def check(self, edits: Sequence[Edit], op: str = "", timed: bool = False) -> Checked:
        """Would the gate's first stages accept these edits? Checks ``op``, and each op whose choice changes, against fp64 in the
        sandbox. ``timed``: also times those ops, within the agent's seconds for measuring.
        """
        ...

    def measure(self, op: str, implementation: str, against: str, rows: int = 0) -> Measurement:
        """``rows``: of a micro-batch; 0: as many as the recipe has. Raises: MeasurementError."""
        ...

    def history(self, target: str) -> list[Attempt]:
        """Earlier proposals for a target, or for all of a kind (``quality:``), oldest first."""
        ...
