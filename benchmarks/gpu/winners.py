"""Keep or replace, of what was found right: by op and width (``verdicts``), and what to change of what is shipped (``decisions``)."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from kernels.contract.choice import CAPABILITY, UNTUNED, find_default_implementation, split_implementation_names


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

    lost: str = ""  # of ours, what takes no part: it fails, or is wrong

    def __str__(self) -> str:
        parts = [self._says(), self.lost]
        parts += [f"faster, and something else: {self.beyond}"] * bool(self.beyond)
        return "; ".join(filter(None, parts))

    def _says(self) -> str:
        if not self.winner:
            return "nothing right was timed"
        if self.ours is None:
            return f"nothing right of ours was timed; fastest: {self.winner} ({self.side})"
        if self.ratio is None:
            return f"keep {self.ours}: nothing else could be timed"
        times = f"{self.ratio:.2f} times as fast as the best of the others"
        if self.keep:
            return f"keep {self.ours}: {times}"
        if self.side == "ours":
            return f"no clear winner: {self.ours} is {times}, within the spread"
        how = "" if self.clear else ", within the spread"
        return f"{self.winner} ({self.side}) wins: {self.ours}, the best of ours, is {times}{how}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"says": str(self)}


def verdicts(timed: Sequence[dict[str, Any]], failed: Sequence[dict[str, Any]] = ()) -> list[Verdict]:
    """Of the records of the kinds "timed" and "failed", by op and width as they came; those that compute something else (``comparable``)
    or wrongly (``wrong``) take no part.

    >>> row = {"op": "swiglu", "width": 1024, "comparable": True, "wrong": ""}
    >>> ours = row | {"by": "triton", "side": "ours", "both_s": 1.0, "low_s": 0.9, "high_s": 1.1}
    >>> theirs = row | {"by": "torch.compile", "side": "torch", "both_s": 2.0, "low_s": 1.9, "high_s": 2.1}
    >>> [str(verdict) for verdict in verdicts([ours, theirs])]
    ['keep triton: 2.00 times as fast as the best of the others']
    >>> [str(verdict) for verdict in verdicts([ours | {"wrong": "off by 0.5"}, theirs])]
    ['nothing right of ours was timed; fastest: torch.compile (torch); triton is wrong: not compared']
    """
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for record in [*timed, *failed]:
        groups.setdefault((record["op"], record["width"]), [])
    for record in timed:
        groups[record["op"], record["width"]].append(record)
    found = []
    for (op, width), group in groups.items():
        alike = [record for record in group if record["comparable"] and not record["wrong"]]
        fastest = min((record["both_s"] for record in alike), default=0.0)
        beyond = [r for r in group if not r["comparable"] and r["both_s"] < fastest]
        words = ", ".join(f"{r['by']} ({fastest / r['both_s']:.2f} times as fast; {r['note']})" for r in beyond)
        lost = [f"{r['by']} is wrong: not compared" for r in group if r["wrong"]]
        lost += [f"ours failed: {r['by']}: {r['why']}" for r in failed if (r["op"], r["width"]) == (op, width)]
        found.append(replace(_of(op, width, alike), beyond=words, lost="; ".join(lost)))
    return found


def _of(op: str, width: int, group: list[dict[str, Any]]) -> Verdict:
    winner, mine = _fastest(group), _fastest(r for r in group if r["side"] == "ours")
    other = _fastest(r for r in group if r["side"] != "ours")
    if winner is None:
        return Verdict(op, width, "", "", False, None, None, False)
    if mine is None or other is None:
        return Verdict(
            op, width, winner["by"], winner["side"], mine is not None, mine["by"] if mine else None, None, False
        )
    first, second = (mine, other) if mine["both_s"] <= other["both_s"] else (other, mine)
    clear = first["high_s"] < second["low_s"]
    ratio = other["both_s"] / mine["both_s"]
    return Verdict(op, width, winner["by"], winner["side"], clear and first is mine, mine["by"], ratio, clear)


# -- what to change of what is shipped -------------------------------------------------------------------------------------
MARGIN = 1.03  # times as fast, from which a change is worth it


@dataclass(frozen=True)
class Decision:
    """Of one op, over the widths: what ``auto`` runs untuned beside the fastest right implementation that is registered."""

    op: str
    shipped: str  # as ``kernels.contract.choice.UNTUNED`` has it
    fastest: str  # by the device's time, the geometric mean over the widths; '': none was timed
    change: str  # 'yes', 'no', 'unclear'
    why: str
    where: str  # what to edit; '': nothing


def decisions(timed: Sequence[dict[str, Any]], failed: Sequence[dict[str, Any]], machine: str) -> list[Decision]:
    """Of the records of the kinds "timed" and "failed"; ``machine``: a class of ``kernels.contract.machine``.

    >>> row = {"op": "swiglu", "width": 1024, "comparable": True, "wrong": ""}
    >>> slow = row | {"by": "triton", "implementation": "triton", "both_s": 2.0, "low_s": 1.9, "high_s": 2.1}
    >>> fast = row | {"by": "eager", "implementation": "reference", "both_s": 1.0, "low_s": 0.9, "high_s": 1.1}
    >>> [decision] = decisions([slow, fast], [], "cuda-sm90-x")
    >>> decision.change, decision.fastest, decision.why, decision.where
    ('yes', 'reference', '2.00 times as fast as triton', "UNTUNED['cuda'][90] in kernels/contract/choice.py; for one machine: factory tune")
    >>> decisions([slow, fast | {"waits": ["kernels/swiglu/triton.py:9 swiglu"]}], [], "cuda-sm90-x")[0].change
    'no'
    """
    ops = dict.fromkeys(record["op"] for record in [*timed, *failed])
    return [
        _decided(op, [r for r in timed if r["op"] == op], [r for r in failed if r["op"] == op], machine) for op in ops
    ]


def _decided(op: str, timed: list[dict[str, Any]], failed: list[dict[str, Any]], machine: str) -> Decision:
    shipped = find_default_implementation(op, machine)
    right: dict[str, dict[int, dict[str, Any]]] = {}  # name → width → its record
    others: dict[str, dict[int, dict[str, Any]]] = {}  # that are not registered
    for r in timed:
        if r["comparable"] and not r["wrong"]:
            rows = right if r["implementation"] else others
            rows.setdefault(r["implementation"] or r["by"], {})[r["width"]] = r
    sick = {r["implementation"]: "is wrong" for r in timed if r["wrong"]} | {r["by"]: "fails" for r in failed}
    names = split_implementation_names(shipped)
    runs = next((name for name in names if name in right and name not in sick), None)
    broken = [f"{name} {sick[name]}" for name in names[: names.index(runs) if runs else None] if name in sick]
    widths = set(right[runs]) if runs else {width for rows in right.values() for width in rows}
    whole = {
        name: rows
        for name, rows in right.items()
        if widths <= rows.keys() and name not in sick and (name == runs or not waits(rows))
    }
    if not whole:
        why = "; ".join(broken) or "nothing right that is registered was timed at every width"
        return Decision(op, shipped, "", "unclear", why, "")
    mean = lambda rows: math.exp(statistics.fmean(math.log(rows[width]["both_s"]) for width in widths))
    fastest = min(whole, key=lambda name: mean(whole[name]))
    beside = mean(whole[fastest])
    beyond = ", ".join(
        f"{name} is {beside / mean(rows):.2f} times as fast"
        for name, rows in others.items()
        if widths <= rows.keys() and mean(rows) * MARGIN < beside
    )
    more = f"; not registered: {beyond}" if beyond else ""
    row = max(least for least in UNTUNED[machine.partition("-")[0]] if least <= capability(machine))
    where = (
        f"UNTUNED['{machine.partition('-')[0]}'][{row}] in kernels/contract/choice.py; for one machine: factory tune"
    )
    if broken or runs is None:
        why = "; ".join(broken) or f"nothing of {shipped} was timed"
        return Decision(op, shipped, fastest, "yes" if broken else "unclear", why + more, where)
    if missing := [name for name in names[: names.index(runs)] if name not in right]:
        why = f"{', '.join(missing)}: not timed; of the rest {fastest} is the fastest{more}"
        return Decision(op, shipped, fastest, "unclear", why, "")
    if fastest == runs:
        return Decision(op, shipped, fastest, "no", f"{runs} is the fastest{more}", "")
    times = mean(whole[runs]) / beside
    pairs = [(whole[runs][width], whole[fastest][width]) for width in widths]
    clear = times >= MARGIN and all(slow["low_s"] > fast["high_s"] for slow, fast in pairs)
    why = f"{times:.2f} times as fast as {runs}" + ("" if clear else ", not clearly at every width") + more
    return Decision(op, shipped, fastest, "yes" if clear else "unclear", why, where if clear else "factory tune")


def waits(rows: dict[int, dict[str, Any]]) -> bool:
    """Does the host wait for the device in a call? A step with it would, too, whatever the device's time is."""
    return any(r.get("waits") for r in rows.values())


def capability(machine: str) -> int:
    """Of a class of machine: 90 of "cuda-sm90-…"; that of the class alone where none is named."""
    found = re.match(r"cuda-sm(\d+)", machine)
    return int(found.group(1)) if found else CAPABILITY


def _fastest(group: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    return min(group, key=lambda r: float(r["both_s"]), default=None)
