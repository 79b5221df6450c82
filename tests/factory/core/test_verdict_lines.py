"""A verdict is at most five lines for a person, whatever its reasons are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from factory.core.verdict_lines import MOST_LINES, WIDTH, format_verdict_lines


@given(st.lists(st.text(max_size=2000), max_size=12))
def test_a_verdict_is_at_most_five_short_lines_in_the_order_of_its_reasons(reasons: list[str]) -> None:
    outcome, *lines = format_verdict_lines("HOLD", reasons, 3, "reports/proposal-3.html")
    assert outcome == "HOLD" and len(lines) < MOST_LINES
    assert all(len(line) <= WIDTH and len(line.splitlines()) == 1 and line.isprintable() for line in lines)


def test_what_does_not_fit_is_in_the_report_that_the_last_line_names() -> None:
    reasons = [f"reason {number}" for number in range(1, 5)]
    assert format_verdict_lines("REJECT", reasons, 3, "page") == ["REJECT", *reasons]
    cut = format_verdict_lines("REJECT", [*reasons, "reason 5"], 3, "page")
    assert cut[:4] == ["REJECT", *reasons[:3]] and len(cut) == MOST_LINES
    assert getattr(cut[4], "code", "") == "verdict_lines.more" and cut[4].endswith("page")
    (outcome, *lines) = format_verdict_lines("HOLD", ["word " * 400], 3, "page")
    assert len(lines) == MOST_LINES - 1 and lines[0] == ("word " * 22).strip()
