"""All that an agent sees of the world. The factory implements it, in its sandbox; evidence in, edits out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from agents.proposal import Edit


class Workbench(Protocol):
    def read(self, path: str) -> str:
        """A file in scope, path relative to the repository's root."""
        ...

    def check(self, edits: Sequence[Edit]) -> list[str]:
        """What the scope rules object to; empty when nothing."""
        ...

    def measure(self, op: str, implementation: str, against: str = "reference") -> Mapping[str, Any] | None:
        """``kernels.bench.Comparison`` as a mapping: seconds, against_seconds, ratio, ratio_low, …; None when it
        could not be measured."""
        ...

    def history(self) -> Sequence[Mapping[str, Any]]:
        """Earlier proposals: number, agent, target, title, base_commit, outcome (None while it is not judged),
        oldest first."""
        ...
