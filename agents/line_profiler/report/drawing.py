"""Two drawings of a profile as SVG: the graph of lines, and the roofline."""

from __future__ import annotations

import math
from collections.abc import Sequence

from agents.core.pages import escape_html
from agents.line_profiler.profile_schema import Profile, ProfiledLine

ROW, LEFT, WIDE = 22, 330, 1100  # pixels: a row of the graph, where its boxes begin, the whole width
PLOT_W, PLOT_H, MARGIN = 900, 420, 60


def choose_heat_colour(share: float, hottest: float) -> str:
    """A colour from white (nothing) to red (the hottest line); by the square root, so that small shares are visible."""
    part = math.sqrt(max(0.0, share) / hottest) if hottest > 0 else 0.0
    return f"hsl(8 85% {97 - 45 * min(1.0, part):.0f}%)"


def draw_graph(profile: Profile) -> str:
    """Lines from top to bottom in the order in which they first run; solid arcs: always, dotted: on a condition.

    Arcs that go down are left of the boxes, arcs that go back up (to the next layer) right of them.
    """
    by_name = {line.name: line for line in profile.lines}
    names = list(dict.fromkeys(name for edge in profile.edges for name in (edge.source, edge.target)))
    row = {name: number for number, name in enumerate(names)}
    hottest = max((line.share for line in profile.lines), default=0.0)
    right = LEFT + 480
    parts = []
    for edge in profile.edges:
        a, b = row[edge.source], row[edge.target]
        y1, y2 = a * ROW + ROW / 2, b * ROW + ROW / 2
        x = LEFT if b > a else right
        bend = min(LEFT - 10, 14 + 7 * abs(b - a)) * (-1 if b > a else 1)
        dash = ' stroke-dasharray="2 4"' if edge.conditional else ""
        about = f"{edge.source} → {edge.target}: {edge.bytes / 1e6:.1f} MB" + (", conditional" * edge.conditional)
        parts.append(
            f'<path class="edge" d="M{x} {y1:.0f} C{x + bend:.0f} {y1:.0f} {x + bend:.0f} {y2:.0f} {x} {y2:.0f}"{dash}>'
            f"<title>{escape_html(about)}</title></path>"
        )
    for name in names:
        line, y = by_name.get(name), row[name] * ROW
        share = line.share if line else 0.0
        label = f"{name}  {line.source}" if line else name
        parts.append(
            f'<rect x="{LEFT}" y="{y + 2}" width="480" height="{ROW - 4}" fill="{choose_heat_colour(share, hottest)}" stroke="#999"/>'
            f'<text x="{LEFT + 6}" y="{y + 15}">{escape_html(label[:62])}<title>{escape_html(label)}</title></text>'
            f'<text x="{right - 6}" y="{y + 15}" text-anchor="end">{share:.1%}</text>'
        )
    return f'<svg class="graph" viewBox="0 0 {WIDE} {len(names) * ROW + 4}" role="img">{"".join(parts)}</svg>'


def draw_roofline(profile: Profile) -> str:
    """FLOP/s against FLOPs a byte, both logarithmic (Williams et al. 2009, doi 10.1145/1498765.1498785)."""
    shown = [line for line in profile.lines if line.flops > 0 and line.bytes > 0 and line.seconds > line.host_s]
    peak, bandwidth = profile.matmul_flops_per_s, profile.memory_bytes_per_s
    intensities = [line.flops / line.bytes for line in shown] + [peak / bandwidth]
    rates = [_rate(line) for line in shown] + [peak]
    x_range = (math.floor(math.log10(min(intensities))), math.ceil(math.log10(max(intensities)) + 0.3))
    y_range = (math.floor(math.log10(min(rates))), math.ceil(math.log10(max(rates)) + 0.1))

    def at(intensity: float, rate: float) -> tuple[float, float]:
        x = MARGIN + (math.log10(intensity) - x_range[0]) / (x_range[1] - x_range[0]) * (PLOT_W - 2 * MARGIN)
        y = PLOT_H - MARGIN - (math.log10(rate) - y_range[0]) / (y_range[1] - y_range[0]) * (PLOT_H - 2 * MARGIN)
        return x, y

    parts = [
        *_axis_x(range(x_range[0], x_range[1] + 1), at, y_range),
        *_axis_y(range(y_range[0], y_range[1] + 1), at, x_range),
    ]
    left = max(10.0 ** x_range[0], 10.0 ** y_range[0] / bandwidth)
    corners = [at(left, left * bandwidth), at(peak / bandwidth, peak), at(10.0 ** x_range[1], peak)]
    parts.append(f'<polyline class="roof" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in corners)}"/>')
    hottest = max((line.share for line in shown), default=0.0)
    for line in shown:
        x, y = at(line.flops / line.bytes, _rate(line))
        about = f"{line.name}: {line.source}\n{_rate(line) / 1e9:.1f} GFLOP/s, {line.roofline:.0%} of the roofline"
        radius = 3 + 9 * math.sqrt(line.share / hottest if hottest else 0.0)
        parts.append(
            f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}"><title>{escape_html(about)}</title></circle>'
        )
    return f'<svg viewBox="0 0 {PLOT_W} {PLOT_H}" role="img">{"".join(parts)}</svg>'


def _rate(line: ProfiledLine) -> float:
    return line.flops / (line.forward_s + line.backward_s)


def _axis_x(decades: Sequence[int], at, y_range: tuple[int, int]) -> list[str]:  # type: ignore[no-untyped-def]
    parts = []
    for decade in decades:
        (x, y), (_, top) = at(10.0**decade, 10.0 ** y_range[0]), at(10.0**decade, 10.0 ** y_range[1])
        parts.append(f'<line class="grid" x1="{x:.1f}" y1="{y:.1f}" x2="{x:.1f}" y2="{top:.1f}"/>')
        parts.append(f'<text x="{x:.1f}" y="{y + 16:.1f}" text-anchor="middle">1e{decade}</text>')
    parts.append(f'<text x="{PLOT_W / 2}" y="{PLOT_H - 14}" text-anchor="middle">FLOPs a byte</text>')
    return parts


def _axis_y(decades: Sequence[int], at, x_range: tuple[int, int]) -> list[str]:  # type: ignore[no-untyped-def]
    parts = []
    for decade in decades:
        (x, y), (end, _) = at(10.0 ** x_range[0], 10.0**decade), at(10.0 ** x_range[1], 10.0**decade)
        parts.append(f'<line class="grid" x1="{x:.1f}" y1="{y:.1f}" x2="{end:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{x - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">1e{decade}</text>')
    parts.append(f'<text x="8" y="{MARGIN - 20}">FLOP/s</text>')
    return parts
