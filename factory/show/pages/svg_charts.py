"""Draws bars, intervals and curves as inline SVG. This module escapes names, so templates may mark the result as safe."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from agents.core.pages import escape_html, format_number

Points = Sequence[tuple[float, float]]
BINS = 240  # a curve has at most this many points
LARGEST = 1e100
WIDTH, LEGEND = 800, 28  # pixels


def _legend(colours: Mapping[str, str], left: float) -> str:
    """A legend in the ``LEGEND`` pixels above a drawing. ``colours``: ``{name: CSS variable}``."""
    out, x = [], left
    for name, colour in colours.items():
        out.append(f'<rect x="{x:.0f}" y="2" width="11" height="11" rx="3" fill="var(--{colour})"/>')
        out.append(f'<text class="dim" x="{x + 17:.0f}" y="12">{escape_html(name[:24])}</text>')
        x += 44 + 7 * len(name[:24])
    return "".join(out)


def _drawing(height: float, *parts: str, legend: str = "") -> str:
    above = LEGEND if legend else 0
    body = "".join(parts)
    moved = f'<g transform="translate(0 {above})">{body}</g>' if above else body
    return f'<svg viewBox="0 0 {WIDTH} {height + above:.0f}" role="img">{legend}{moved}</svg>'


def draw_bars(
    groups: Mapping[str, Mapping[str, float | None]],
    series: Sequence[str],
    intervals: Mapping[tuple[str, str], tuple[float, float]] | None = None,
) -> str:
    """Horizontal bars from zero, one row for each group: ``{"code": {"candidate": 2.1, "byte trigram": 2.9}}``. Missing values are left out.

    ``intervals``: by (group, series), the interval (low, high) of a bar that has one.
    """
    values = [v for group in groups.values() for v in group.values() if v is not None and _finite(v)]
    if not values or max(values) <= 0:
        return ""
    found = {key: ends for key, ends in (intervals or {}).items() if all(map(_finite, ends))}
    left, thick, largest = 120, 17, max([*values, *(high for _, high in found.values())])
    y, out = 4.0, []
    for name, group in groups.items():
        shown = [(i, s, group.get(s)) for i, s in enumerate(series) if _finite(group.get(s))]
        out.append(
            f'<text x="{left - 14}" y="{y + thick * len(shown) / 2 + 4:.1f}" text-anchor="end">{escape_html(name[:18])}</text>'
        )
        for i, one, value in shown:
            assert value is not None
            ends = found.get((name, one))
            length = max(value, 0) / largest * 600
            out.append(
                f'<rect x="{left}" y="{y:.1f}" width="{length:.1f}" height="{thick - 3}" rx="2.5" fill="var(--c{min(i, 3)})"/>'
            )
            weight = ' font-weight="600"' if i == 0 else ' class="dim"'
            if ends:
                low, high = (max(end, 0) / largest * 600 for end in ends)
                middle = y + (thick - 3) / 2
                out.append(
                    f'<line x1="{left + low:.1f}" x2="{left + high:.1f}" y1="{middle:.1f}" y2="{middle:.1f}" stroke="var(--ink)" stroke-width="1.6"/>'
                )
                length = max(length, high)
            words = (
                f"{format_number(value)}  ({format_number(ends[0])} … {format_number(ends[1])})"
                if ends
                else format_number(value)
            )
            out.append(f'<text x="{left + length + 7:.1f}" y="{y + 11:.1f}"{weight}>{words}</text>')
            y += thick
        y += 16
    present = {s: f"c{min(i, 3)}" for i, s in enumerate(series) if any(_finite(g.get(s)) for g in groups.values())}
    return _drawing(y - 8, *out, legend=_legend(present, left))


def draw_intervals(rows: Mapping[str, tuple[float, float, float]]) -> str:
    """A point with its interval in each row, ``{name: (value, low, high)}``, and a zero line. Values right of zero are better."""
    rows = {name: row for name, row in rows.items() if all(_finite(v) for v in row)}
    if not rows:
        return ""
    low, high = min(0.0, *(r[1] for r in rows.values())), max(0.0, *(r[2] for r in rows.values()))
    span = (high - low) or 1.0
    left = 120
    x = lambda value: left + 12 + (value - low) / span * 400
    out, y = [], 16
    for name, (value, lower, upper) in rows.items():
        colour = "good" if lower > 0 else "bad" if upper < 0 else "soft"
        out.append(f'<text x="{left - 14}" y="{y + 4}" text-anchor="end">{escape_html(name[:18])}</text>')
        out.append(
            f'<line x1="{x(lower):.1f}" x2="{x(upper):.1f}" y1="{y}" y2="{y}" stroke="var(--{colour})" stroke-width="2.5"'
            f' stroke-linecap="round"/><circle cx="{x(value):.1f}" cy="{y}" r="4.5" fill="var(--{colour})"/>'
        )
        out.append(f'<text x="{left + 436}" y="{y + 4}" class="dim">{value:+.4f}  ({lower:+.4f} … {upper:+.4f})</text>')
        y += 26
    zero = f'<line class="zero" x1="{x(0):.1f}" x2="{x(0):.1f}" y1="2" y2="{y - 12}" stroke-dasharray="2 3"/>'
    foot = f'<text class="dim" x="{x(0):.1f}" y="{y + 2}" text-anchor="middle">0</text>'
    return _drawing(y + 8, zero, *out, foot)


def draw_curves(lines: Mapping[str, Points], *, marks: Sequence[tuple[float, str]] = ()) -> str:
    """Lines over steps, each averaged into at most ``BINS`` points. ``marks``: steps with a name, such as a branch or a new generation."""
    made = {name: _binned([p for p in points if _finite(p[0]) and _finite(p[1])]) for name, points in lines.items()}
    made = {name: points for name, points in made.items() if len(points) > 1}
    if not made:
        return ""
    xs, ys = [x for p in made.values() for x, _ in p], [y for p in made.values() for _, y in p]
    x0, x1, y0, y1 = min(xs), max(xs), min(ys), max(ys)
    left, right, top, bottom = 52, 790, 12, 270
    x = lambda v: left + (v - x0) / ((x1 - x0) or 1) * (right - left)
    y = lambda v: bottom - (v - y0) / ((y1 - y0) or 1) * (bottom - top)
    out = []
    for tick in _ticks(y0, y1, 5):
        out.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        out.append(f'<text class="dim" x="{left - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in _ticks(x0, x1, 6):
        out.append(f'<text class="dim" x="{x(tick):.1f}" y="{bottom + 20}" text-anchor="middle">{tick:,.0f}</text>')
    for step, name in marks:
        if x0 < step < x1:
            out.append(
                f'<line class="zero" x1="{x(step):.1f}" x2="{x(step):.1f}" y1="{top}" y2="{bottom}" stroke-dasharray="2 4"/>'
            )
            out.append(
                f'<text class="dim" x="{x(step) - 5:.1f}" y="{top + 4}" text-anchor="end">{escape_html(name)}</text>'
            )
    for i, points in enumerate(made.values()):
        path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points)
        out.append(
            f'<polyline points="{path}" fill="none" stroke="var(--l{i % 5})" stroke-width="1.8" stroke-linejoin="round"/>'
        )
    return _drawing(bottom + 30, *out, legend=_legend({name: f"l{i % 5}" for i, name in enumerate(made)}, left))


def _finite(value: object) -> bool:
    """Whether a value can be drawn. Beyond ``LARGEST``, the distance between two values may be infinite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def _binned(points: Points) -> list[tuple[float, float]]:
    """The points, with neighbours averaged so that at most ``BINS`` are left."""
    size = max(1, math.ceil(len(points) / BINS))
    chunks = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(p[0] for p in chunk) / len(chunk), sum(p[1] for p in chunk) / len(chunk)) for chunk in chunks]


def _ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers between two bounds, about ``count`` of them."""
    raw = (high - low) / count
    if not raw > 1e-300:
        return [low]
    size = 10 ** math.floor(math.log10(raw))
    step = size * next(m for m in (1, 2, 5, 10) if raw <= m * size * 1.0001)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
