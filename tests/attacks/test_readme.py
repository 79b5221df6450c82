"""The table of attacks names existing tests."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

HERE = Path(__file__).parent


def test_every_test_that_the_table_names_is_there() -> None:
    table = (HERE / "README.md").read_text()
    named = set(re.findall(r"`(test_[a-z0-9_]+\*?)`", table)) - {"test_readme"}
    there = {
        name
        for file in HERE.parent.rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text(), re.M)
    }
    assert len(named) > 30 and [name for name in named if not any(fnmatch(test, name) for test in there)] == []
    own = {name for file in HERE.glob("test_*.py") for name in re.findall(r"^def (test_\w+)", file.read_text(), re.M)}
    about_the_tests = {
        "test_every_test_that_the_table_names_is_there",
        "test_every_attack_applies_to_the_present_code",
        "test_every_cheat_applies_to_the_present_code",
        "test_removed_code_that_the_old_code_executed_is_not_listed",
    }
    assert own - named == about_the_tests
