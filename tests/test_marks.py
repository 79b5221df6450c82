"""The rules of conftest for the marks of tiers. The marks put each test into exactly one tier."""

from __future__ import annotations

import os
import sys

import pytest

from tests.support.paths import ROOT

PARAMETERS = '@pytest.mark.parametrize("x", ["a", "b"])\n'


WRONG = f"""
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
RIGHT = f"""
@pytest.mark.sample("a")
{PARAMETERS}def test_it(x): pass

@pytest.mark.sample("a")
@pytest.mark.slow("why")
{PARAMETERS}def test_slow(x): pass
"""
TIERS = {
    "not slow and not long": {"test_it[a]"},
    "slow and not long": {"test_slow[a]"},
    "long": {"test_it[b]", "test_slow[b]"},
}
END = "\n-- end --\n"


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str]]:
    """(exit code, output) of collecting WRONG, and RIGHT in each tier, by a fork of this process, which has imported our conftest."""
    runs = []
    for name, text in (("wrong", WRONG), ("right", RIGHT)):
        folder = tmp_path_factory.mktemp(name)
        (folder / f"test_{name}.py").write_text("import pytest\n\n" + text)
        words = [
            "-p",
            "tests.conftest",
            "-p",
            "no:langsmith_plugin",  # as pyproject.toml says
            "-p",
            "no:anyio",
            "-c",
            os.devnull,
            "--rootdir",
            str(folder),
            "--collect-only",
            "-q",
            str(folder),
        ]
        runs += [[*words, "-m", tier] for tier in (TIERS if name == "right" else [""])]
    printed = tmp_path_factory.mktemp("printed") / "words"
    child = os.fork()
    if not child:
        try:
            sys.stdout = open(printed, "w")  # noqa: SIM115 (as long as the process)
            for words in runs:
                print("", int(pytest.main(words)), sep="\n", end=END, flush=True)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    *said, rest = printed.read_text().split(END)
    assert len(said) == len(runs) and not rest.strip()
    return [(int(code), words) for words, _, code in (one.rpartition("\n") for one in said)]


def test_a_mark_without_a_reason_or_without_an_existing_case_is_refused(collected: list[tuple[int, str]]) -> None:
    code, said = collected[0]
    assert code == pytest.ExitCode.INTERRUPTED, said
    for words in (
        "test_silent: slow or long without a reason",
        "test_nothing: its sample names nothing; its cases are: a, b",
        "test_misnamed: its sample names c; its cases are: a, b",
        "test_none_is_left[a]: a case of a sample is long",
    ):
        assert words in said, said


def test_each_test_case_is_in_exactly_one_tier(collected: list[tuple[int, str]]) -> None:
    for (words, expected), (_, said) in zip(TIERS.items(), collected[1:], strict=True):
        assert words in (ROOT / "Makefile").read_text()
        assert {line.split("::")[1] for line in said.splitlines() if "::" in line} == expected, said
