"""All that an agent sees of the world. The factory implements it, in its sandbox; evidence in, edits out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Measurement:
    """One implementation of an op against another, alone, on the recipe's shapes: seconds of a forward and backward (see ``kernels.bench``)."""

    seconds: float
    against_seconds: float
    ratio: float  # against over mine: above one is faster; the median of paired ratios
    ratio_low: float  # its lower quartile


@dataclass(frozen=True)
class Attempt:
    """A proposal made before."""

    patch_id: str  # of ``Proposal.patch_id``
    outcome: str  # promote | hold | reject | pending
    reason: str = ""


class MeasurementError(Exception):
    """What was asked for could not be measured; says why."""


class ReadError(Exception):
    """A file that is not there, or not in scope."""


class Workbench(Protocol):
    def read(self, path: str) -> str:
        """A file in scope, path relative to the repository's root. Raises: ReadError."""
        ...

    def measure(self, op: str, implementation: str, against: str) -> Measurement:
        """Raises: MeasurementError."""
        ...

    def history(self, target: str) -> list[Attempt]:
        """Earlier proposals for a target, oldest first."""
        ...
