"""Each message has a code, data and one text; each text for people has a code; the texts are those of ``tests/golden/messages/``."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.support.golden import GOLDEN, compare_with_golden
from tests.support.messages import ROOMS, ROOT, SQL, Prose, Site, files, read_source, sites_and_prose, wrong

PROSE_AT_MOST = 40  # assertions on text in all tests; SQL aside; 428 in November 2026
PROSE_CHARACTERS, PROSE_SPACES = 36, 4


@cache
def said() -> tuple[list[Site], list[Prose]]:
    return sites_and_prose(files())


def room_of(file: str) -> str:
    parts = file.split("/")
    return "-".join(parts[:2]) if len(parts) > 2 else parts[0]


def test_messages_keep_the_rules() -> None:
    assert wrong(said()[0]) == []


def test_every_text_has_a_code() -> None:
    assert [str(one) for one in said()[1]] == []


@pytest.mark.parametrize("room", sorted({room_of(path.relative_to(ROOT).as_posix()) for path in files(*ROOMS)}))
def test_the_messages_of_a_room_equal_its_golden_file(room: str, request: pytest.FixtureRequest) -> None:
    texts = sorted({(site.code, site.template) for site in said()[0] if room_of(site.file) == room})
    if texts:
        compare_with_golden(request, f"messages/{room}.txt", "\n".join(f"{code}\n    {text}" for code, text in texts))
    else:
        assert not (GOLDEN / f"messages/{room}.txt").exists()


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ('raise InputError("ingest.gone", "")', "a code without a text"),
        ('Message("ingest.gone")', "a code without a text"),
        ('raise InputError("ingest.gone", "{file} is gone.")', "no data for ['file']"),
        ('raise InputError("gates.gone", "{file} is gone.", file=1)', "the code begins with the name of the file"),
        ('raise InputError("ingest.gone", "{file.name} is gone.", file=1)', "a template has plain names"),
        ('Message("ingest.Gone", "It is gone.")', "a code is lower-case words"),
        ('raise InputError("ingest.gone", "{file is gone.", file=1)', "expected '}'"),
        ('Message("ingest.gone", "It is gone.") if x else Message("ingest.gone", "It is lost.")', "said at 2 places"),
    ],
)  # fmt: skip
def test_a_message_that_breaks_a_rule_is_named(source: str, told: str) -> None:
    sites, prose = read_source("factory/ingest/inbox.py", source)
    (found,) = wrong(sites)
    assert told in found and not prose


@pytest.mark.parametrize(
    "source",
    [
        'raise InputError(f"{file} is not there: put it back")',
        'lines.append("the file is not there any more")',
        'why = "the file is not there any more"',
        'Message("ingest.gone", "Because {why}.", why="the file is not there any more")',
    ],
)
def test_a_text_without_a_code_is_named(source: str) -> None:
    _, (found,) = read_source("factory/ingest/inbox.py", source)
    assert "a text without a code" in str(found)


@pytest.mark.parametrize(
    "source",
    [
        'raise InputError("ingest.gone", "{file} is gone: put it back.", file=path)',
        'def f():\n    """What it does in several words of prose."""',
        'db.read("SELECT id FROM shards WHERE state = :state ORDER BY id")',
        'raise ValueError("a shard is not a folder of any kind")',
        'assert done, "the loop above ends only when it is done"',
        'path = "a/b/c.txt"',
    ],
)
def test_source_that_keeps_the_rules_is_not_named(source: str) -> None:
    sites, prose = read_source("factory/ingest/inbox.py", source)
    assert not wrong(sites) and not prose


def prose_asserted(source: str) -> list[tuple[int, str]]:
    """Assertions on text of 36 or more characters with four or more spaces, and ``pytest.raises(match=…)`` with one."""
    found = []
    for node in ast.walk(ast.parse(source)):
        parts: list[ast.expr] = [node.test] if isinstance(node, ast.Assert) else []
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "raises":
            parts += [word.value for word in node.keywords if word.arg == "match"]
        texts = [
            one.value
            for part in parts
            for one in ast.walk(part)
            if isinstance(one, ast.Constant) and isinstance(one.value, str) and not SQL.match(one.value)
        ]
        found += [
            (node.lineno, text) for text in texts if len(text) >= PROSE_CHARACTERS and text.count(" ") >= PROSE_SPACES
        ][:1]  # type: ignore[attr-defined]
    return found


def test_tests_compare_codes_and_data_not_text() -> None:
    places = []
    for file in sorted(Path(ROOT / "tests").rglob("*.py")):
        places += [f"{file.relative_to(ROOT)}:{line}: {text[:80]!r}" for line, text in prose_asserted(file.read_text())]
    assert len(places) <= PROSE_AT_MOST, "\n".join([f"{len(places)} assertions on text:", *places])


def test_an_assertion_on_text_is_counted() -> None:
    long = "a shard of this name was there before"
    assert len(prose_asserted(f"assert {long!r} in said")) == 1
    assert len(prose_asserted(f"with pytest.raises(E, match={long!r}): pass")) == 1
    assert prose_asserted("assert 'a shard' in said") == [] == prose_asserted(f"x = {long!r}")
