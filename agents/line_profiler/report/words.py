"""A profile's summary, in words."""

from __future__ import annotations

from agents.line_profiler.table import Profile


def shortened(lines: tuple[str, ...], most: int = 4) -> str:
    """The first of them, and how many more there are."""
    return " → ".join(lines[:most]) + (f" → … {len(lines) - most} more" if len(lines) > most else "")


def summary(profile: Profile) -> str:
    """Step times, coverage and what was checked, in words."""
    difference = profile.eager_step_s - profile.covered_s
    check = profile.cross_check
    text = (
        f"The eager step takes {profile.eager_step_s * 1e3:.0f} ms without a profiler, the lines cover "
        f"{profile.covered_s * 1e3:.0f} ms ({profile.coverage:.0%}), difference {difference * 1e3:+.0f} ms. "
        f"The stopwatch added {profile.overhead_s * 1e3:.0f} ms to a step, measured separately and subtracted from the table. "
        f"torch.profiler sees {check.torch_s * 1e3:.0f} ms in operations on the same batch, the lines "
        f"{check.lines_s * 1e3:.0f} ms ({check.ratio:.0%}), difference {(check.lines_s - check.torch_s) * 1e3:+.0f} ms."
    )
    if (alone := profile.isolation) is not None:
        text += (
            f" Alone: {alone.signatures} distinct operations, each measured once; {alone.full} with {alone.warmup} warm-ups and "
            f"{alone.iterations} calls, the others with fewer to end within {alone.budget_s:.0f} s"
        )
        text += f"; {len(alone.not_measured)} could not be called alone." if alone.not_measured else "."
    if profile.recipe["compile"]:
        text += " The recipe compiles its blocks, which hides their lines: the table shows the eager step."
        if profile.recipe_step_s is not None:
            text += f" Compiled, the step takes {profile.recipe_step_s * 1e3:.0f} ms."
    return text
