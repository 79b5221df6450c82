"""A profile for people: the slowest lines and the kernel ops, as terminal tables."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from agents.line_profiler.profile_schema import Profile
from agents.line_profiler.report.summary_text import shorten_lines, write_profile_summary
from kernels.contract.message import Message


def make_profile_table(profile: Profile, top: int = 20) -> RenderableType:
    """The slowest ``top`` lines, the ops, and how well the table agrees with the clock."""
    lines = Table(
        title=Message(
            "line_profiler.lines",
            "the {shown} slowest of the {lines} lines of the training step",
            shown=min(top, len(profile.lines)),
            lines=len(profile.lines),
        ),
        title_justify="left",
    )
    lines.add_column("line", no_wrap=True, overflow="ellipsis", max_width=34)
    lines.add_column("source", no_wrap=True, overflow="ellipsis", max_width=50)
    for name in ("forward ms", "backward ms", "host ms", "alone ms", "share", "calls", "roofline"):
        lines.add_column(name, justify="right", no_wrap=True)
    lines.add_column("bound", no_wrap=True)
    for line in profile.lines[:top]:
        where = f"{line.file}:{line.line}" if line.line else line.file
        roof = f"{line.roofline:.0%}" if line.bytes else "–"
        lines.add_row(
            where,
            Text(line.source),
            f"{line.forward_s * 1e3:.2f}",
            f"{line.backward_s * 1e3:.2f}",
            f"{line.host_s * 1e3:.2f}",
            "–" if line.isolated_s is None else f"{line.isolated_s * 1e3:.2f}",
            f"{line.share:.1%}",
            f"{line.calls:.0f}",
            roof,
            line.bound,
        )
    ops = Table(title="kernel ops", title_justify="left")
    for name in ("op", "implementation"):
        ops.add_column(name)
    for name in ("calls", "forward ms", "backward ms", "share"):
        ops.add_column(name, justify="right")
    for op in sorted(profile.ops, key=lambda o: -o.share):
        ops.add_row(
            op.op,
            op.implementation,
            f"{op.calls:.0f}",
            f"{op.forward_s * 1e3:.2f}",
            f"{op.backward_s * 1e3:.2f}",
            f"{op.share:.1%}",
        )
    return Group(lines, ops, make_candidates_table(profile), Text(write_profile_summary(profile)))


def make_candidates_table(profile: Profile, top: int = 5) -> RenderableType:
    """The ``top`` fusion and stream candidates."""
    title = Message(
        "line_profiler.candidates",
        "lines that could be fused, and branches that could run at the same time (the gains are upper bounds)",
    )
    found = Table(title=title, title_justify="left")
    found.add_column("what")
    found.add_column("lines", max_width=90)
    found.add_column("gain ms", justify="right", no_wrap=True)
    found.add_column("share", justify="right", no_wrap=True)
    for chain in profile.fusion_candidates[:top]:
        what = f"fuse, saves {chain.bytes_saved / 1e6:,.0f} MB"
        found.add_row(what, Text(shorten_lines(chain.lines)), f"{chain.gain_s * 1e3:.2f}", f"{chain.gain_share:.1%}")
    for pair in profile.stream_candidates[:top]:
        lines = f"{shorten_lines(pair.branches[0], 2)}  ∥  {shorten_lines(pair.branches[1], 2)}"
        what = "two streams, backward" if pair.backward else "two streams"
        found.add_row(what, Text(lines), f"{pair.gain_s * 1e3:.2f}", f"{pair.gain_share:.1%}")
    return found
