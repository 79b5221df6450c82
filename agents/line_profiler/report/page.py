"""``profile.html``: the source with a heat column, the graph, the roofline; one file, no script, opens offline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from agents.core.pages import render_page
from agents.line_profiler.lines import read_source_lines
from agents.line_profiler.profile_schema import Profile, ProfiledLine
from agents.line_profiler.report.drawing import choose_heat_colour, draw_graph, draw_roofline
from agents.line_profiler.report.summary_text import shorten_lines, write_profile_summary

AROUND = 3  # lines of source shown above and below one that was timed
OPEN = 0.05  # files with at least this share of the step are unfolded


def render_profile_page(profile: Profile) -> str:
    """The page."""
    return render_page(
        Path(__file__).with_name("profile.html.jinja"),
        profile=profile,
        name=profile.recipe.get("name", ""),
        summary=write_profile_summary(profile),
        shortened=shorten_lines,
        files=_files(profile),
        graph=draw_graph(profile),
        roofline=draw_roofline(profile),
    )


def _files(profile: Profile) -> list[dict[str, Any]]:
    """Each file's share of the step and its source around the timed lines, hottest file first."""
    by_file: defaultdict[str, list[ProfiledLine]] = defaultdict(list)
    for line in profile.lines:
        by_file[line.file].append(line)
    hottest = max((line.share for line in profile.lines), default=0.0)
    shares = {file: sum(line.share for line in lines) for file, lines in by_file.items()}
    return [
        {"name": file, "share": shares[file], "open": shares[file] >= OPEN, "rows": _source(file, lines, hottest)}
        for file, lines in sorted(by_file.items(), key=lambda pair: -shares[pair[0]])
    ]


def _source(file: str, lines: Iterable[ProfiledLine], hottest: float) -> list[dict[str, Any]]:
    """A row for each op of a timed line, for each other line of source, and for a gap (``number`` ⋮)."""
    timed: defaultdict[int, list[ProfiledLine]] = defaultdict(list)
    for line in lines:
        timed[line.line].append(line)
    text = read_source_lines(file)
    around = sorted({n for line in timed for n in range(line - AROUND, line + AROUND + 1) if 0 < n <= len(text)})
    rows: list[dict[str, Any]] = []
    before = 0
    for number in around or [0]:
        if before and number > before + 1:
            rows.append({"line": None, "number": "⋮", "code": ""})
        code = text[number - 1] if number else ""
        for at, line in enumerate(timed.get(number, [])):
            colour = choose_heat_colour(line.share, hottest)
            rows.append({"line": line, "number": number, "code": "" if at else code, "colour": colour})
        if number not in timed:
            rows.append({"line": None, "number": number, "code": code})
        before = number
    return rows
