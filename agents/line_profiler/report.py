"""A profile for people: the hottest lines and the kernel ops, as terminal tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from agents.line_profiler.table import Profile


def tables(profile: Profile, top: int = 20) -> RenderableType:
    """The hottest ``top`` lines, the ops, and how far the table can be trusted."""
    lines = Table(
        title=f"the training step, line by line (hottest {min(top, len(profile.lines))} of {len(profile.lines)})",
        title_justify="left",
    )
    lines.add_column("line", no_wrap=True, overflow="ellipsis", max_width=36)
    lines.add_column("source", no_wrap=True, overflow="ellipsis", max_width=58)
    for name in ("forward ms", "backward ms", "share", "calls", "roofline"):
        lines.add_column(name, justify="right", no_wrap=True)
    lines.add_column("bound", no_wrap=True)
    for line in profile.lines[:top]:
        where = f"{line.file}:{line.line}" if line.line else line.file
        roof = f"{line.roofline:.0%}" if line.bound != "host" else "–"
        lines.add_row(
            where,
            Text(line.source),
            f"{line.forward_s * 1e3:.2f}",
            f"{line.backward_s * 1e3:.2f}",
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
    return Group(lines, ops, Text(summary(profile)))


def summary(profile: Profile) -> str:
    """Step times and coverage, in words."""
    difference = profile.eager_step_s - profile.covered_s
    text = (
        f"eager step {profile.eager_step_s * 1e3:.0f} ms without a profiler; "
        f"the lines cover {profile.covered_s * 1e3:.0f} ms "
        f"({profile.coverage:.0%}), {difference * 1e3:+.0f} ms is Python and dispatch between operations, and noise; "
        f"profiling added {profile.overhead_s * 1e3:.0f} ms to a step, none of it in the table."
    )
    if profile.recipe["compile"]:
        text += " The recipe compiles its blocks, which hides their lines: the table is of the eager step."
        if profile.recipe_step_s is not None:
            text += f" Compiled, the step takes {profile.recipe_step_s * 1e3:.0f} ms."
    return text


def table(raw: Mapping[str, Any], top: int = 20) -> RenderableType:
    """As ``tables``, of a parsed profile.json."""
    return tables(Profile.from_mapping(raw), top)


def show(profile: Profile, console: Console | None = None, top: int = 20) -> None:
    (console or Console()).print(tables(profile, top))
