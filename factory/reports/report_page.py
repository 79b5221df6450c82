"""The pieces a report is laid out with: one self-contained HTML page, tables, bars, intervals, curves as inline SVG.

Whatever comes in is untrusted text (documents, samples, model output, patches): every string passes ``text`` on its way out,
and the page's content policy allows no script, no image and no address, so that a slip could not reach anything either.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Mapping, Sequence

Points = Sequence[tuple[float, float]]

STYLE = """
:root{color-scheme:light dark;--ink:#1b1d22;--soft:#666c78;--line:#e3e5ea;--paper:#fff;--panel:#f6f7f9;--c0:#2456d6;--c1:#8a93a6;
--c2:#c3c8d3;--c3:#dfe2e9;--good:#1a7f4b;--warn:#9a6700;--bad:#c0322b;--l0:#2456d6;--l1:#d0661a;--l2:#1a7f4b;--l3:#8a3ffc;--l4:#b3246b}
@media(prefers-color-scheme:dark){:root{--ink:#e6e8ec;--soft:#98a0ae;--line:#2b2f37;--paper:#14161a;--panel:#1c1f25;--c0:#7aa2ff;
--c1:#7b8496;--c2:#4d5565;--c3:#383e4a;--good:#57c98b;--warn:#e0b34a;--bad:#ff7b72;--l0:#7aa2ff;--l1:#f0a060;--l2:#57c98b;--l3:#b58aff;
--l4:#f27bb0}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:880px;margin:0 auto;padding:48px 24px 80px}
h1{font-size:30px;line-height:1.2;margin:0 0 6px;letter-spacing:-.015em}
h2{font-size:18px;margin:44px 0 10px;letter-spacing:-.005em}
p{margin:0 0 10px}.soft{color:var(--soft)}.small{font-size:13px}
.pill{display:inline-block;padding:2px 12px;border-radius:99px;font-size:14px;font-weight:600;color:var(--paper);vertical-align:5px;
margin-left:10px}
.good{background:var(--good)}.warn{background:var(--warn)}.bad{background:var(--bad)}
.is-good{color:var(--good)}.is-bad{color:var(--bad)}.is-warn{color:var(--warn)}
ul.why{padding-left:20px;margin:14px 0 0}ul.why li{margin:3px 0}ul.why li:first-child{font-weight:600}
dl{display:grid;grid-template-columns:repeat(auto-fit,minmax(130px,1fr));gap:14px 20px;margin:26px 0 0;padding:16px 18px;
background:var(--panel);border-radius:10px}
dt{color:var(--soft);font-size:12.5px}dd{margin:0;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:14px;font-variant-numeric:tabular-nums}
th{text-align:left;font-weight:600;color:var(--soft);font-size:12.5px}
th,td{padding:6px 14px 6px 0;border-bottom:1px solid var(--line);vertical-align:top;overflow-wrap:anywhere}
td.n,th.n{text-align:right;white-space:nowrap}td:first-child{min-width:9em}.pairs td:first-child{width:32%;color:var(--soft)}
code,pre{font:12.5px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
pre{margin:0;white-space:pre-wrap;overflow-wrap:anywhere}
.sample{border:1px solid var(--line);border-radius:10px;margin:0 0 12px;overflow:hidden}
.sample .ask{padding:10px 14px;background:var(--panel);font-weight:500}.sample pre{padding:12px 14px}
.sample .note{padding:0 14px 10px}
pre.diff{border:1px solid var(--line);border-radius:10px;padding:12px 0;white-space:pre;overflow-x:auto}
pre.diff span{display:block;padding:0 14px}pre.diff .add{background:color-mix(in srgb,var(--good) 14%,transparent)}
pre.diff .del{background:color-mix(in srgb,var(--bad) 14%,transparent)}pre.diff .at{color:var(--soft)}
svg{display:block;width:100%;height:auto;font:12px system-ui,sans-serif;overflow:visible}
svg text{fill:var(--ink)}svg .dim{fill:var(--soft)}svg .grid{stroke:var(--line)}svg .zero{stroke:var(--soft)}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;font-size:13px;color:var(--soft);margin:0 0 8px}
.legend i{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:6px;vertical-align:-1px}
@media print{main{padding:0}h2{break-after:avoid}.sample,tr{break-inside:avoid}}
"""


def text(value: object) -> str:
    """Any value as HTML text: escaped, without control or direction-changing characters, always encodable."""
    plain = str(value).encode("utf-8", "replace").decode("utf-8")
    plain = re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ufffe\uffff]", "\ufffd", plain)
    return html.escape(plain, quote=True)


def number(value: object, digits: int = 3) -> str:
    """A number for a person, ``–`` for what was not measured."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{digits}f}"


def page(title: str, body: Iterable[str]) -> str:
    """A whole document. ``title`` is escaped here, ``body`` is HTML already."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{text(title)}</title>'
        f"<style>{STYLE}</style></head>\n<body><main>\n"
        + "\n".join(part for part in body if part)
        + "\n</main></body></html>\n"
    )


def section(title: str, *parts: str, lead: str = "") -> str:
    """A heading with what belongs to it; nothing at all when there is nothing to show."""
    shown = [part for part in parts if part]
    if not shown:
        return ""
    words = f'<p class="soft">{text(lead)}</p>' if lead else ""
    return f"<section><h2>{text(title)}</h2>{words}{''.join(shown)}</section>"


def facts(pairs: Mapping[str, object]) -> str:
    """Named values side by side."""
    return "<dl>" + "".join(f"<div><dt>{text(k)}</dt><dd>{text(v)}</dd></div>" for k, v in pairs.items()) + "</dl>"


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, numeric: Sequence[int] = ()) -> str:
    """A table; every cell is escaped unless it is an ``Html``. ``numeric``: the columns that are aligned right.

    No columns: the rows are names and values, and need no heading.
    """
    made = [list(row) for row in rows]
    if not made:
        return ""

    def cells(tag: str, row: Sequence[object]) -> str:
        marks = [' class="n"' if i in numeric else "" for i in range(len(row))]
        return "".join(f"<{tag}{mark}>{_cell(value)}</{tag}>" for mark, value in zip(marks, row))

    head = f"<thead><tr>{cells('th', columns)}</tr></thead>" if columns else ""
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in made)
    kind = "" if columns else ' class="pairs"'
    return f'<div class="scroll"><table{kind}>{head}<tbody>{body}</tbody></table></div>'


class Html(str):
    """Text that is HTML already, made by this module."""


def code(value: object) -> Html:
    return Html(f"<code>{text(value)}</code>")


def mark(good: bool | None, words: str) -> Html:
    """Words in the colour of good, bad or unsure news, with a sign for those who see no colour."""
    kind, sign = {True: ("good", "✓"), False: ("bad", "✗"), None: ("warn", "?")}[good]
    return Html(f'<span class="is-{kind}">{sign} {text(words)}</span>')


def pill(outcome: str) -> str:
    kind = {"promote": "good", "approved": "good", "hold": "warn", "reject": "bad", "rejected": "bad"}.get(
        outcome, "warn"
    )
    return f'<span class="pill {kind}">{text(outcome)}</span>'


def _cell(value: object) -> str:
    return str(value) if isinstance(value, Html) else text(value)


# -- pictures -----------------------------------------------------------------------------------------------------------
def legend(names: Sequence[str], kind: str) -> str:
    parts = [
        f'<span><i style="background:var(--{kind}{i % 5})"></i>{text(name)}</span>' for i, name in enumerate(names)
    ]
    return f'<div class="legend">{"".join(parts)}</div>'


def bars(groups: Mapping[str, Mapping[str, float | None]], series: Sequence[str]) -> str:
    """Horizontal bars from zero, a group a row: ``{"code": {"candidate": 2.1, "byte trigram": 2.9}}``; absent ones are left out."""
    values = [v for group in groups.values() for v in group.values() if v is not None and _finite(v)]
    if not values or max(values) <= 0:
        return ""
    left, width, thick, largest = 120, 800, 17, max(values)
    y, out = 4.0, []
    for name, group in groups.items():
        shown = [(i, s, group.get(s)) for i, s in enumerate(series) if _finite(group.get(s))]
        out.append(
            f'<text x="{left - 14}" y="{y + thick * len(shown) / 2 + 4:.1f}" text-anchor="end">{text(name[:18])}</text>'
        )
        for i, _, value in shown:
            assert value is not None
            length = max(value, 0) / largest * 600
            out.append(
                f'<rect x="{left}" y="{y:.1f}" width="{length:.1f}" height="{thick - 3}" rx="2.5" fill="var(--c{min(i, 3)})"/>'
            )
            weight = ' font-weight="600"' if i == 0 else ' class="dim"'
            out.append(f'<text x="{left + length + 7:.1f}" y="{y + 11:.1f}"{weight}>{number(value)}</text>')
            y += thick
        y += 16
    present = [s for s in series if any(_finite(group.get(s)) for group in groups.values())]
    colours = [f'<span><i style="background:var(--c{min(series.index(s), 3)})"></i>{text(s)}</span>' for s in present]
    return f'<div class="legend">{"".join(colours)}</div><svg viewBox="0 0 {width} {y - 8:.0f}" role="img">{"".join(out)}</svg>'


def intervals(rows: Mapping[str, tuple[float, float, float]]) -> str:
    """Point and interval a row, ``{name: (value, low, high)}``, around a zero line: right of it is better."""
    rows = {name: row for name, row in rows.items() if all(_finite(v) for v in row)}
    if not rows:
        return ""
    low, high = min(0.0, *(r[1] for r in rows.values())), max(0.0, *(r[2] for r in rows.values()))
    span = (high - low) or 1.0
    left, width = 120, 800
    x = lambda value: left + 12 + (value - low) / span * 400
    out, y = [], 16
    for name, (value, lower, upper) in rows.items():
        colour = "good" if lower > 0 else "bad" if upper < 0 else "soft"
        out.append(f'<text x="{left - 14}" y="{y + 4}" text-anchor="end">{text(name[:18])}</text>')
        out.append(
            f'<line x1="{x(lower):.1f}" x2="{x(upper):.1f}" y1="{y}" y2="{y}" stroke="var(--{colour})" stroke-width="2.5"'
            f' stroke-linecap="round"/><circle cx="{x(value):.1f}" cy="{y}" r="4.5" fill="var(--{colour})"/>'
        )
        out.append(f'<text x="{left + 436}" y="{y + 4}" class="dim">{value:+.4f}  ({lower:+.4f} … {upper:+.4f})</text>')
        y += 26
    zero = f'<line class="zero" x1="{x(0):.1f}" x2="{x(0):.1f}" y1="2" y2="{y - 12}" stroke-dasharray="2 3"/>'
    foot = f'<text class="dim" x="{x(0):.1f}" y="{y + 2}" text-anchor="middle">0</text>'
    return f'<svg viewBox="0 0 {width} {y + 8}" role="img">{zero}{"".join(out)}{foot}</svg>'


def curves(lines: Mapping[str, Points], *, marks: Sequence[tuple[float, str]] = (), bins: int = 240) -> str:
    """Lines over steps, each averaged into at most ``bins`` points; ``marks`` are named steps (a branch, a new generation)."""
    made = {
        name: _binned([p for p in points if _finite(p[0]) and _finite(p[1])], bins) for name, points in lines.items()
    }
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
            out.append(f'<text class="dim" x="{x(step) - 5:.1f}" y="{top + 4}" text-anchor="end">{text(name)}</text>')
    for i, points in enumerate(made.values()):
        path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points)
        out.append(
            f'<polyline points="{path}" fill="none" stroke="var(--l{i % 5})" stroke-width="1.8" stroke-linejoin="round"/>'
        )
    return legend(list(made), "l") + f'<svg viewBox="0 0 800 {bottom + 30}" role="img">{"".join(out)}</svg>'


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _binned(points: Points, bins: int) -> list[tuple[float, float]]:
    """Neighbours averaged so that at most ``bins`` points are left."""
    size = max(1, math.ceil(len(points) / bins))
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
