"""The mutation tool, run on a project of one module and two tests: its changes, the tests that notice them, its memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants.operators import equivalents, mutants
from tests.support.git import git
from tests.support.paths import ROOT

MODULE = '''"""Words <= 1."""

LIMIT: int = 3
NAME = "one"


def allowed(count: int | None, more: int = 0) -> bool:
    """Not 1."""
    if count is None:
        raise ValueError(f"none of {1}")
    count += more
    return 0 < count <= LIMIT


def unseen(a: int, b: int) -> int:
    return max(a, b) - a
'''
TEST = """import pytest
from factory.thing import NAME, allowed

@pytest.mark.parametrize("name", [NAME])
def test_that_is_named_by_what_it_tests(name):
    assert name

def test_borders():
    assert [allowed(count) for count in (0, 1, 3, 4)] == [False, True, True, False]
"""


def test_each_mutation_changes_one_place_of_code_and_no_docstring() -> None:
    found = mutants("factory/thing.py", MODULE)
    assert {(m.inside, m.kind, m.change) for m in found} == {
        ("", "constant", "3 → 4"),
        ("", "constant", "3 → 2"),
        ("", "constant", "\"one\" → 'one?'"),
        ("allowed", "constant", "0 → 1"),
        ("allowed", "constant", "0 → (-1)"),
        ("allowed", "comparison", "count is None → (count is not None)"),
        ("allowed", "dropped statement", 'raise ValueError(f"none of {1}") → pass'),
        ("allowed", "dropped statement", "count += more → pass"),
        ("allowed", "comparison", "0 < count <= LIMIT → (0 <= count <= LIMIT)"),
        ("allowed", "comparison", "0 < count <= LIMIT → (0 < count < LIMIT)"),
        ("unseen", "function", "max(a, b) → min(a, b)"),
        ("unseen", "arithmetic", "max(a, b) - a → (max(a, b) + a)"),
    }
    for mutant in found:
        lines = zip(MODULE.splitlines(), mutant.applied(MODULE).splitlines(), strict=True)
        assert [number for number, (old, new) in enumerate(lines, 1) if old != new] == [mutant.line]


@pytest.mark.slow("a fork for each of 14 mutants, and one more for those that its own test does not notice")
def test_surviving_mutants_are_reported_and_known_mutants_are_not_run_again(tmp_path: Path) -> None:
    root = tmp_path / "project"
    for path, text in {"factory/thing.py": MODULE, "tests/factory/test_thing.py": TEST,
                       "tests/factory/test_far.py": "from factory import far\n\ndef test_far():\n    assert far.far == 2\n",
                       "factory/far.py": "from factory.thing import unseen\n\nfar = unseen(1, 3)\n"}.items():  # fmt: skip
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    (root / "factory" / "__init__.py").touch()  # else what is installed goes first
    git(root, "init", "--quiet")

    def run(*words: str) -> tuple[int, str]:
        command = [
            sys.executable,
            "-m",
            "tests.mutants",
            "--root",
            str(root),
            "--modules",
            "factory/thing.py",
            "--count",
            "99",
        ]
        command += ["--results", str(tmp_path / "known.jsonl"), *words]
        done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": ""}, capture_output=True, text=True)
        assert done.returncode in (0, 1) and not done.stderr, done.stderr
        return done.returncode, done.stdout

    code, said = run("--distant", "--json", "--at-least", "0.7")
    rows = json.loads(said[said.index("\n[") :])
    who = {(row["inside"], row["change"]): (row["who"], row["by"]) for row in rows}
    own, distant = "tests/factory/test_thing.py::test_borders", "tests/factory/test_far.py"
    assert who["", "3 → 4"] == ("own", own) and who["allowed", "0 < count <= LIMIT → (0 < count < LIMIT)"] == (
        "own",
        own,
    )
    assert who["allowed", "count += more → pass"] == ("nobody", "")
    assert who["", "\"one\" → 'one?'"] == ("nobody", ""), "that a case has another name is nothing that a test noticed"
    assert who["unseen", "max(a, b) → min(a, b)"] == ("distant", f"{distant}::test_far")
    assert len(rows) == 14 and code == (sum(row["who"] == "own" for row in rows) < 0.7 * 14)
    _, again = run("--distant")
    assert "factory/thing.py:11 in allowed, dropped statement: count += more → pass" in again and "s of" not in again


def test_each_listed_equivalent_mutant_has_a_reason_and_still_exists() -> None:
    listed = equivalents()
    for path in sorted({path for path, _, _ in listed}):
        there = {(path, m.inside, m.change) for m in mutants(path, (ROOT / path).read_text())}
        assert {row for row in listed if row[0] == path} <= there
