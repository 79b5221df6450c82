"""``profile.html``: the source with a heat column, the graph, the roofline; one file, no script, opens offline.

Source lines are untrusted text: everything that comes from a profile is escaped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from html import escape

from agents.line_profiler.lines import source_lines
from agents.line_profiler.report.drawing import graph, heat, roofline
from agents.line_profiler.report.words import shortened, summary
from agents.line_profiler.table import Profile, ProfiledLine

AROUND = 3  # lines of source shown above and below one that was timed
STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 2em auto; max-width: 1180px; color: #222; }
table { border-collapse: collapse; } td, th { padding: 1px 8px; text-align: right; white-space: pre; }
th { font-weight: 600; border-bottom: 1px solid #999; } td.text, th.text { text-align: left; white-space: pre-wrap; }
.source td { font: 12px/1.35 ui-monospace, monospace; } .number { color: #999; }
summary { cursor: pointer; font-weight: 600; margin: .6em 0; }
svg { max-width: 100%; height: auto; font: 11px ui-monospace, monospace; }
.edge { fill: none; stroke: #4477aa; stroke-width: 1.2; opacity: .55; } .edge:hover { opacity: 1; stroke-width: 3; }
.grid { stroke: #ddd; } .roof { fill: none; stroke: #222; stroke-width: 2; } circle { fill: #cc4433; opacity: .6; }
"""


def html(profile: Profile) -> str:
    """The page."""
    name = escape(str(profile.recipe.get("name", "")))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>profile: {name}</title>'
        f"<style>{STYLE}</style></head><body><h1>The training step of {name}, line by line</h1>"
        f"<p>{escape(summary(profile))}</p><p>{escape(profile.device)}, torch {escape(profile.torch)}, measured roofs: "
        f"{profile.matmul_flops_per_s / 1e9:,.0f} GFLOP/s, {profile.memory_bytes_per_s / 1e9:,.1f} GB/s.</p>"
        f"<h2>Source</h2>{_source(profile)}"
        f"<h2>Roofline</h2><p>One dot a line that has FLOPs; larger is a larger share of the step.</p>{roofline(profile)}"
        f"<h2>Graph</h2><p>Who reads what whom wrote, forward pass and optimiser, layers folded: solid always, dotted on a "
        f"condition.</p>{graph(profile)}"
        f"<h2>Fusion candidates</h2>{_fusions(profile)}<h2>Stream candidates</h2>{_streams(profile)}</body></html>"
    )


def _source(profile: Profile) -> str:
    by_file: defaultdict[str, list[ProfiledLine]] = defaultdict(list)
    for line in profile.lines:
        by_file[line.file].append(line)
    hottest = max((line.share for line in profile.lines), default=0.0)
    parts = []
    for file, lines in sorted(by_file.items(), key=lambda pair: -sum(line.share for line in pair[1])):
        share = sum(line.share for line in lines)
        opened = " open" if share >= 0.05 else ""
        parts.append(
            f"<details{opened}><summary>{escape(file)} — {share:.1%}</summary>{_file(file, lines, hottest)}</details>"
        )
    return "".join(parts)


def _file(file: str, lines: Iterable[ProfiledLine], hottest: float) -> str:
    timed: defaultdict[int, list[ProfiledLine]] = defaultdict(list)
    for line in lines:
        timed[line.line].append(line)
    text = source_lines(file)
    shown = sorted({n for line in timed for n in range(line - AROUND, line + AROUND + 1) if 0 < n <= len(text)})
    heads = ("share", "forward ms", "backward ms", "host ms", "alone ms", "calls", "roofline")
    rows = [
        "<tr>" + "".join(f"<th>{head}</th>" for head in heads) + '<th class="text">bound</th><th></th><th></th></tr>'
    ]
    before = 0
    for number in shown or [0]:
        if before and number > before + 1:
            rows.append(f'<tr>{"<td></td>" * 8}<td class="number">⋮</td><td></td></tr>')
        code = text[number - 1] if number else ""
        found = timed.get(number, [])
        for at, line in enumerate(found):
            rows.append(_row(line, number, code if at == 0 else "", hottest))
        if not found:
            rows.append(
                f'<tr>{"<td></td>" * 8}<td class="number">{number}</td><td class="text">{escape(code)}</td></tr>'
            )
        before = number
    return f'<table class="source">{"".join(rows)}</table>'


def _row(line: ProfiledLine, number: int, code: str, hottest: float) -> str:
    cells = (
        f"{line.share:.2%}",
        f"{line.forward_s * 1e3:.2f}",
        f"{line.backward_s * 1e3:.2f}",
        f"{line.host_s * 1e3:.2f}",
        "–" if line.isolated_s is None else f"{line.isolated_s * 1e3:.2f} ± {(line.isolated_spread_s or 0) * 1e3:.2f}",
        f"{line.calls:.0f}",
        f"{line.roofline:.0%}" if line.bytes else "–",
    )
    colour = heat(line.share, hottest)
    about = escape(f"{line.op or 'no kernel op'}; {', '.join(line.operations)}", quote=True)
    first = f'<td style="background:{colour}">{cells[0]}</td>'
    rest = "".join(f"<td>{cell}</td>" for cell in cells[1:])
    return (
        f'<tr title="{about}">{first}{rest}<td class="text">{escape(line.bound)}</td><td class="number">{number}</td>'
        f'<td class="text">{escape(code)}</td></tr>'
    )


def _fusions(profile: Profile) -> str:
    rows = [
        f"<tr><td>{c.gain_s * 1e3:.2f}</td><td>{c.gain_share:.1%}</td><td>{c.bytes_saved / 1e6:,.1f}</td>"
        f'<td>{c.intermediates}</td><td class="text">{escape(" → ".join(c.lines))}</td></tr>'
        for c in profile.fusion_candidates
    ]
    about = "Memory-bound lines whose intermediates nobody else reads; the gain is at most the bytes saved at the measured bandwidth."
    heads = "<tr><th>gain ms</th><th>of step</th><th>MB saved</th><th>intermediates</th><th class=text>lines</th></tr>"
    return f"<p>{about}</p><table>{heads}{''.join(rows)}</table>" if rows else "<p>None.</p>"


def _streams(profile: Profile) -> str:
    rows = [
        f"<tr><td>{c.gain_s * 1e3:.2f}</td><td>{c.gain_share:.1%}</td><td>{c.times}</td>"
        f'<td class="text">{"backward" if c.backward else "forward"}</td><td class="text">{escape(c.fork)}</td>'
        f'<td class="text">{escape(shortened(c.branches[0], 8))}\n∥ {escape(shortened(c.branches[1], 8))}</td></tr>'
        for c in profile.stream_candidates
    ]
    about = "Branches from one tensor that need nothing of each other; the gain is at most the shorter branch's time."
    heads = "<tr><th>gain ms</th><th>of step</th><th>times</th><th class=text></th><th class=text>fork</th><th class=text>branches</th></tr>"
    return f"<p>{about}</p><table>{heads}{''.join(rows)}</table>" if rows else "<p>None.</p>"
