"""Text that a person reads, kept in ``tests/golden/``: a change of it shows as a difference to review.

``pytest tests/test_messages.py tests/factory/cli/test_golden_output.py --write-golden`` writes the files again.
"""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parents[1] / "golden"


def compare_with_golden(request: pytest.FixtureRequest, name: str, text: str) -> None:
    """``text`` is what ``tests/golden/<name>`` holds; with ``--write-golden`` it is written there."""
    file = GOLDEN / name
    text = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
    if request.config.getoption("--write-golden"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    known = file.read_text() if file.exists() else ""
    difference = "\n".join(
        difflib.unified_diff(known.splitlines(), text.splitlines(), f"golden/{name}", "now", lineterm="")
    )
    assert known == text, f"{difference}\n\nIf the new text is right: pytest … --write-golden, and read the difference."
