"""English text from the descriptions of installed packages: prose alone, under licences that allow a release."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from factory.corpus import write_english_shard
from factory.corpus.english import LICENCES, PAGE, keep_prose, read_descriptions

SENTENCE = "This is a paragraph that a person wrote, and it says in plain words what the package is good for."


def test_code_tables_links_and_headings_are_left_out() -> None:
    parts = [
        "# Heading that is longer than the shortest paragraph, so that its length does not leave it out of the corpus.",
        f"    {SENTENCE}",
        f"```\n{SENTENCE}\n```",
        "| a | table | of | many | cells | which | is | longer | than | the | shortest | paragraph | of | prose |.",
        f"[![badge](https://example.org/a.svg)](https://example.org) {SENTENCE}",
        SENTENCE.replace("plain words", "**plain**\nwords, `really`,"),
        "Too short.",
        "0.1 2.3 4.5 6.7 8.9 0.1 2.3 4.5 6.7 8.9 0.1 2.3 4.5 6.7 8.9 0.1 2.3 4.5 6.7 8.9 0.1 2.3 4.5 6.7 8.9.",
    ]
    found = list(keep_prose("\n\n".join(parts)))
    assert found[-1] == SENTENCE.replace("plain words", "plain words, really,") and len(found) == 2
    assert found[0].endswith(SENTENCE)


def test_the_shard_has_the_packages_that_this_python_runs_with(tmp_path: Path) -> None:
    count = write_english_shard(tmp_path / "english.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "english.jsonl").read_text().splitlines()]
    sources = Counter(row["source"] for row in rows)
    assert len(rows) == count and {row["domain"] for row in rows} == {"english"}
    assert {"pydantic", "typer", "transformers"} <= sources.keys(), "packages that the factory depends on"
    assert sources.keys() <= {name for name, *_ in read_descriptions()}
    assert {row["license"] for row in rows} <= set(LICENCES.values())
    assert len({row["id"] for row in rows}) == count
    long = [row for row in rows if len(row["text"]) >= PAGE]
    assert len(long) >= count - len(sources), "only the last document of a package is shorter"
    first = (tmp_path / "english.jsonl").read_bytes()
    write_english_shard(tmp_path / "again.jsonl")
    assert (tmp_path / "again.jsonl").read_bytes() == first
