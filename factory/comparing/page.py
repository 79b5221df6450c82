"""A comparison in words, as JSON, and as a page of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agents.core.pages import render
from factory.comparing.comparing import SPREADS, WINDOW, Divergence, MetricComparison
from factory.comparing.reading import RunCurves
from factory.show.pages.pictures import curves

TEMPLATE = Path(__file__).with_name("comparison.html.jinja")
SHOWN = 6  # of a list of steps


def first_of(found: Sequence[MetricComparison]) -> Divergence | None:
    """The earliest divergence of all metrics."""
    return min((one.first for one in found if one.first), key=lambda first: first.x, default=None)


def words(found: Sequence[MetricComparison], ours: RunCurves, theirs: RunCurves, unit: str, given: bool) -> list[str]:
    """For a person, the first divergence first. ``unit``: 'step' or 'token'; ``given``: is the tolerance a person's?"""
    said = []
    if first := first_of(found):
        how = "as given" if given else f"{SPREADS:g} times the spread of the difference in up to {WINDOW} points before"
        said.append(
            f"first divergence: {unit} {first.x:,.0f}, {first.metric}: ours {first.ours:.6g}, theirs {first.theirs:.6g}, "
            f"difference {first.difference:+.3g}, tolerance {first.tolerance:.3g} ({how})"
        )
    else:
        said.append(f"no divergence in {', '.join(one.metric for one in found)}")
    for one in found:
        largest = f", at most {one.largest:.3g} apart" if one.largest is not None else ""
        parts = f"; they part at {unit} {one.first.x:,.0f}" if one.first else ""
        said.append(
            f"{one.metric}: {len(one.grid):,} points compared, {unit}s {one.grid[0][0]:,.0f}–{one.grid[-1][0]:,.0f}{largest}{parts}"
        )
        if one.coarser != "both":
            said.append(f"{one.metric}: {one.coarser} has fewer points, the other is interpolated there")
        said += [
            f"{one.metric}: {whose} is not finite at {_listed(xs, unit)}" for whose, xs in one.not_finite.items() if xs
        ]
    said += _units(ours, theirs) if unit == "step" else []
    return [*said, *ours.notes, *theirs.notes]


def to_json(
    found: Sequence[MetricComparison], ours: RunCurves, theirs: RunCurves, said: Sequence[str]
) -> dict[str, Any]:
    first = first_of(found)
    return {
        "ours": ours.name,
        "theirs": theirs.name,
        "first": first and asdict(first),
        "metrics": [asdict(one) for one in found],
        "says": list(said),
    }


def page(found: Sequence[MetricComparison], ours: RunCurves, theirs: RunCurves, said: Sequence[str], unit: str) -> str:
    """One self-contained file."""
    drawn = []
    for one in found:
        marks = [(one.first.x, "they part")] if one.first else []
        lines = {"ours": [(x, a) for x, a, _ in one.grid], "theirs": [(x, b) for x, _, b in one.grid]}
        apart = {"ours less theirs": [(x, a - b) for x, a, b in one.grid if math.isfinite(a) and math.isfinite(b)]}
        drawn.append({"name": one.metric, "curves": curves(lines, marks=marks), "apart": curves(apart, marks=marks)})
    head = {"Ours": ours.name, "Theirs": theirs.name, "Compared by": f"{unit}s"}
    return render(TEMPLATE, said=list(said), metrics=drawn, head=head, parted=first_of(found) is not None)


def _listed(xs: Sequence[float], unit: str) -> str:
    more = f" and {len(xs) - SHOWN:,} more" if len(xs) > SHOWN else ""
    return f"{unit}s {', '.join(f'{x:,.0f}' for x in xs[:SHOWN])}{more}"


def _units(ours: RunCurves, theirs: RunCurves) -> list[str]:
    """A step of one run may have other tokens than one of the other."""
    both = sorted(ours.tokens.keys() & theirs.tokens.keys())
    if both and abs(ours.tokens[both[-1]] - theirs.tokens[both[-1]]) > 0.01 * max(1.0, theirs.tokens[both[-1]]):
        mine, other = ours.tokens[both[-1]], theirs.tokens[both[-1]]
        return [
            f"WARNING: at step {both[-1]:,.0f} ours has seen {mine:,.0f} tokens and theirs {other:,.0f}: compare by --x tokens"
        ]
    return []
