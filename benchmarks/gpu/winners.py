"""Keep or replace: ours is kept where it wins by more than the spread, else the winner is named."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Verdict:
    """Of one op at one width, by the seconds of forward and backward."""

    op: str
    width: int
    winner: str
    side: str
    keep: bool
    ours: str | None  # the best of ours; None: none was timed
    ratio: float | None  # the best of the others over ours: above one, ours is faster; None: one side was not timed
    clear: bool  # is the difference larger than the spread?
    beyond: str = ""  # what is faster than the winner and computes something else, with its note

    def __str__(self) -> str:
        return self._says() + f"; faster, and something else: {self.beyond}" * bool(self.beyond)

    def _says(self) -> str:
        if self.ours is None:
            return f"nothing of ours was timed; fastest: {self.winner} ({self.side})"
        if self.ratio is None:
            return f"keep {self.ours}: nothing else could be timed"
        times = f"{self.ratio:.2f} times as fast as the best of the others"
        if self.keep:
            return f"keep {self.ours}: {times}"
        if self.side == "ours":
            return f"no clear winner: {self.ours} is {times}, within the spread"
        how = "" if self.clear else ", within the spread"
        return f"replace {self.ours} by {self.winner} ({self.side}): ours is {times}{how}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"says": str(self)}


def verdicts(timed: Sequence[dict[str, Any]]) -> list[Verdict]:
    """Of the records of kind "timed", by op and width as they came; those that compute something else (``comparable``) take no part.

    >>> row = {"op": "swiglu", "width": 1024, "comparable": True}
    >>> ours = row | {"by": "triton", "side": "ours", "both_s": 1.0, "low_s": 0.9, "high_s": 1.1}
    >>> theirs = row | {"by": "torch.compile", "side": "torch", "both_s": 2.0, "low_s": 1.9, "high_s": 2.1}
    >>> [str(verdict) for verdict in verdicts([ours, theirs])]
    ['keep triton: 2.00 times as fast as the best of the others']
    """
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for record in timed:
        groups.setdefault((record["op"], record["width"]), []).append(record)
    found = []
    for (op, width), group in groups.items():
        alike = [record for record in group if record["comparable"]]
        if alike:
            fastest = min(record["both_s"] for record in alike)
            beyond = [r for r in group if not r["comparable"] and r["both_s"] < fastest]
            words = ", ".join(f"{r['by']} ({fastest / r['both_s']:.2f} times as fast; {r['note']})" for r in beyond)
            found.append(replace(_of(op, width, alike), beyond=words))
    return found


def _of(op: str, width: int, group: list[dict[str, Any]]) -> Verdict:
    winner, mine, other = _fastest(group), _fastest(r for r in group if r["side"] == "ours"), None
    other = _fastest(r for r in group if r["side"] != "ours")
    assert winner is not None
    if mine is None or other is None:
        return Verdict(
            op, width, winner["by"], winner["side"], mine is not None, mine["by"] if mine else None, None, False
        )
    first, second = (mine, other) if mine["both_s"] <= other["both_s"] else (other, mine)
    clear = first["high_s"] < second["low_s"]
    ratio = other["both_s"] / mine["both_s"]
    return Verdict(op, width, winner["by"], winner["side"], clear and first is mine, mine["by"], ratio, clear)


def _fastest(group: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    return min(group, key=lambda r: float(r["both_s"]), default=None)
