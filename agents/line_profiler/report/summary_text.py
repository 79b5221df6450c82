"""A profile's summary as text."""

from __future__ import annotations

from agents.line_profiler.profile_schema import Profile
from kernels.contract.message import Message


def shorten_lines(lines: tuple[str, ...], most: int = 4) -> str:
    """The first ``most`` lines, and the number of the others."""
    return " → ".join(lines[:most]) + (f" → … {len(lines) - most} more" if len(lines) > most else "")


def write_profile_summary(profile: Profile) -> str:
    """Step times, coverage and cross-checks, as text."""
    difference = profile.step_s - profile.covered_s
    check = profile.cross_check
    numbers = {
        "step_ms": profile.step_s * 1e3,
        "covered_ms": profile.covered_s * 1e3,
        "coverage": profile.coverage,
        "difference_ms": difference * 1e3,
    }
    coverage = (
        Message(
            "line_profiler.compiled_coverage",
            "The compiled step takes {step_ms:.0f} ms without a profiler. The times of the lines add up to "
            "{covered_ms:.0f} ms ({coverage:.0%}), a difference of {difference_ms:+.0f} ms. The time of a fused kernel is divided among its lines "
            "in the proportion of their eager times. The eager step takes {eager_ms:.0f} ms.",
            **numbers,
            eager_ms=profile.eager_step_s * 1e3,
        )
        if profile.compiled
        else Message(
            "line_profiler.coverage",
            "The eager step takes {step_ms:.0f} ms without a profiler. The times of the lines add up to "
            "{covered_ms:.0f} ms ({coverage:.0%}), a difference of {difference_ms:+.0f} ms.",
            **numbers,
        )
    )
    parts = [
        coverage,
        Message(
            "line_profiler.overhead",
            "The stopwatch adds {added_ms:.0f} ms to a step. This cost was measured separately, and is subtracted in "
            "the table.",
            added_ms=profile.overhead_s * 1e3,
        ),
        Message(
            "line_profiler.cross_check",
            "In the eager step, torch.profiler measures {torch_ms:.0f} ms in operations. The times of its lines add "
            "up to {lines_ms:.0f} ms ({ratio:.0%}), a difference of {difference_ms:+.0f} ms.",
            torch_ms=check.torch_s * 1e3,
            lines_ms=check.lines_s * 1e3,
            ratio=check.ratio,
            difference_ms=(check.lines_s - check.torch_s) * 1e3,
        ),
    ]
    if (alone := profile.isolation) is not None:
        parts.append(
            Message(
                "line_profiler.alone",
                "{operations} distinct operations were timed outside the step. {full} of them had {warmup} warm-ups "
                "and {calls} timed calls each. The others had fewer, because the time limit was {budget:.0f} s. "
                "{failed:,|operation|operations} could not be called outside the step.",
                operations=alone.signatures,
                full=alone.full,
                warmup=alone.warmup,
                calls=alone.iterations,
                budget=alone.budget_s,
                failed=len(alone.not_measured),
            )
        )
    if profile.recipe["compile"] and not profile.compiled:
        parts.append(
            Message(
                "line_profiler.not_compiled",
                "The recipe compiles its blocks, but the table shows the eager step, because the compiled step was not profiled.",
            )
        )
    return " ".join(parts)
