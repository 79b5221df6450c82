"""The lines with numbers in README have the form that the programs print."""

from __future__ import annotations

import re

from factory.evals.statistics import Gain
from factory.gates.release.judge import TARGET
from factory.gates.release.judge_messages import make_change_message
from tests.support.paths import ROOT

NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def form(line: str) -> str:
    """The line with every digit replaced by 9: 2.764 → 9.999."""
    return NUMBER.sub(lambda found: re.sub(r"\d", "9", found[0]), " ".join(line.split()))


def block(first: str) -> list[str]:
    """The lines of the code block in README that has a line beginning with ``first``."""
    for text in (ROOT / "README.md").read_text("utf-8").split("```")[1::2]:
        lines = [line.strip() for line in text.strip("\n").splitlines()]
        if any(line.startswith(first) for line in lines):
            return lines
    raise AssertionError(f"README has no block with {first!r}")


def test_the_demo_output_in_the_readme_has_the_form_that_the_demo_prints() -> None:
    lines = [form(line) for line in block("held-out bits per byte")]
    gain = Gain(0.098, 0.009, 60, 50.0)
    said = make_change_message(TARGET, gain, None, None)
    for expected in (
        "held-out bits per byte chat code docs",
        "candidate 9 9.999 9.999 9.999",
        "candidate 9: PROMOTE → release 9",
        form(f"The candidate is better than candidate 1: {said}."),
    ):
        assert expected in lines, (expected, lines)
