"""What a person may ask of a bundle."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Wish:
    """What a person asked for."""

    out: Path | None = None
    data: bool = False
    traces: bool = False
    key: Path | None = None  # private, PEM; the workspace's own by default
    licence: str = "NOASSERTION"  # of the weights, as an SPDX expression
