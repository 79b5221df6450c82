"""What conftest holds every mark of a tier to. Which test is in which tier is the marks' to say: none of them is in two, or in none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PARAMETERS = '@pytest.mark.parametrize("x", ["a", "b"])\n'


def collected(folder: Path, text: str, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text("import pytest\n\n" + text)
    words = ("-p", "tests.conftest", "-c", os.devnull, "--rootdir", str(folder), "--collect-only", "-q", *words)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", *words, str(folder)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_a_mark_that_says_nothing_or_names_no_case_is_refused(tmp_path: Path) -> None:
    text = f"""
@pytest.mark.slow
def test_silent(): pass

@pytest.mark.sample()
{PARAMETERS}def test_nothing(x): pass

@pytest.mark.sample("c")
{PARAMETERS}def test_misnamed(x): pass

@pytest.mark.sample("a")
@pytest.mark.long("why")
{PARAMETERS}def test_none_is_left(x): pass
"""
    done = collected(tmp_path, text)
    assert done.returncode == pytest.ExitCode.INTERRUPTED, done.stdout
    for words in (
        "test_silent: slow or long without a reason",
        "test_nothing: its sample names nothing; its cases are: a, b",
        "test_misnamed: its sample names c; its cases are: a, b",
        "test_none_is_left[a]: a case of a sample is long",
    ):
        assert words in done.stdout, done.stdout


def test_each_case_is_in_one_tier(tmp_path: Path) -> None:
    text = f"""
@pytest.mark.sample("a")
{PARAMETERS}def test_it(x): pass

@pytest.mark.sample("a")
@pytest.mark.slow("why")
{PARAMETERS}def test_slow(x): pass
"""
    tiers = {
        "not slow and not long": {"test_it[a]"},
        "slow and not long": {"test_slow[a]"},
        "long": {"test_it[b]", "test_slow[b]"},
    }
    for words, expected in tiers.items():
        assert words in (ROOT / "Makefile").read_text()
        done = collected(tmp_path, text, "-m", words)
        assert {line.split("::")[1] for line in done.stdout.splitlines() if "::" in line} == expected, done.stdout
