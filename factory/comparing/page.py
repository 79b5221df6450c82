"""Formats a comparison as lines for a person, as JSON, and as an HTML page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agents.core.pages import render_page
from factory.comparing.curve_comparison import ALLOWED_SPREADS, WINDOW, Divergence, MetricComparison
from factory.comparing.curve_files import RunCurves
from factory.show.pages.svg_charts import draw_curves
from kernels.contract.message import Message

TEMPLATE = Path(__file__).with_name("comparison.html.jinja")
SHOWN = 6  # a list of steps shows at most this many


def find_earliest_divergence(comparisons: Sequence[MetricComparison]) -> Divergence | None:
    """Return the earliest divergence of all metrics; None if no metric diverges."""
    return min((one.first for one in comparisons if one.first), key=lambda first: first.x, default=None)


def format_comparison(
    comparisons: Sequence[MetricComparison], ours: RunCurves, theirs: RunCurves, unit: str, is_tolerance_given: bool
) -> list[str]:
    """Return lines for a person, beginning with the first divergence. ``unit``: 'step' or 'token'.

    ``is_tolerance_given``: whether a person gave the tolerance.
    """
    said: list[str] = []
    if first := find_earliest_divergence(comparisons):
        by_spread = Message(
            "comparing.by_spread",
            "{factor:g} times the spread of the difference over the last {window} points",
            factor=ALLOWED_SPREADS,
            window=WINDOW,
        )
        said.append(
            Message(
                "comparing.first_divergence",
                "first divergence at {unit} {x:,.0f}, in {metric}: ours {ours:.6g}, theirs {theirs:.6g}, difference "
                "{difference:+.3g}, tolerance {tolerance:.3g} ({how})",
                **asdict(first),
                unit=unit,
                how="as given" if is_tolerance_given else by_spread,
            )
        )
    else:
        metrics = [one.metric for one in comparisons]
        said.append(Message("comparing.no_divergence", "no divergence in {metrics}", metrics=metrics))
    for one in comparisons:
        largest = f", largest difference {one.largest:.3g}" if one.largest is not None else ""
        diverge = f", diverging at {unit} {one.first.x:,.0f}" if one.first else ""
        said.append(
            Message(
                "comparing.metric_compared",
                "{metric}: {points:,|point|points} compared, {unit}s {first:,.0f}–{last:,.0f}{largest}{diverge}",
                metric=one.metric,
                points=len(one.grid),
                unit=unit,
                first=one.grid[0][0],
                last=one.grid[-1][0],
                largest=largest,
                diverge=diverge,
            )
        )
        if one.coarser != "both":
            said.append(
                Message(
                    "comparing.interpolated",
                    "{metric}: {coarser} has fewer points, so the other curve is interpolated at these points",
                    metric=one.metric,
                    coarser=one.coarser,
                )
            )
        for whose, xs in one.not_finite.items():
            if xs:
                said.append(
                    Message(
                        "comparing.values_not_finite",
                        "{metric}: {curve} is not finite at {places}",
                        metric=one.metric,
                        curve=whose,
                        places=_listed(xs, unit),
                    )
                )
    said += _units(ours, theirs) if unit == "step" else []
    return [*said, *ours.notes, *theirs.notes]


def convert_comparison_to_json(
    comparisons: Sequence[MetricComparison], ours: RunCurves, theirs: RunCurves, lines: Sequence[str]
) -> dict[str, Any]:
    first = find_earliest_divergence(comparisons)
    return {
        "ours": ours.name,
        "theirs": theirs.name,
        "first": first and asdict(first),
        "metrics": [asdict(one) for one in comparisons],
        "says": list(lines),
    }


def render_comparison(
    comparisons: Sequence[MetricComparison], ours: RunCurves, theirs: RunCurves, lines: Sequence[str], unit: str
) -> str:
    """Return the comparison as one self-contained HTML page."""
    drawn = []
    for one in comparisons:
        marks = [(one.first.x, "they diverge")] if one.first else []
        curves = {"ours": [(x, a) for x, a, _ in one.grid], "theirs": [(x, b) for x, _, b in one.grid]}
        apart = {"ours minus theirs": [(x, a - b) for x, a, b in one.grid if math.isfinite(a) and math.isfinite(b)]}
        drawn.append(
            {"name": one.metric, "curves": draw_curves(curves, marks=marks), "apart": draw_curves(apart, marks=marks)}
        )
    head = {"Ours": ours.name, "Theirs": theirs.name, "Compared by": f"{unit}s"}
    return render_page(
        TEMPLATE, said=list(lines), metrics=drawn, head=head, parted=find_earliest_divergence(comparisons) is not None
    )


def _listed(xs: Sequence[float], unit: str) -> str:
    more = f" and {len(xs) - SHOWN:,} more" if len(xs) > SHOWN else ""
    return f"{unit}s {', '.join(f'{x:,.0f}' for x in xs[:SHOWN])}{more}"


def _units(ours: RunCurves, theirs: RunCurves) -> list[str]:
    """Return a warning if the runs have seen different numbers of tokens at the same step; else []."""
    both = sorted(ours.tokens.keys() & theirs.tokens.keys())
    if both and abs(ours.tokens[both[-1]] - theirs.tokens[both[-1]]) > 0.01 * max(1.0, theirs.tokens[both[-1]]):
        mine, other = ours.tokens[both[-1]], theirs.tokens[both[-1]]
        return [
            Message(
                "comparing.other_tokens",
                "WARNING: at step {step:,.0f}, our run has seen {ours:,.0f} tokens and the other run {theirs:,.0f}. To "
                "compare by tokens, add '--x tokens'.",
                step=both[-1],
                ours=mine,
                theirs=other,
            )
        ]
    return []
