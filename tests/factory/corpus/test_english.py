"""English text from the descriptions of installed packages: prose alone, under licences that allow a release."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from factory.corpus import write_english_shards
from factory.corpus.english import DOMAIN, LICENCES, PAGE, UNTRAINED, keep_prose, read_descriptions

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


def test_the_shards_have_the_packages_that_this_python_runs_with(tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.jsonl" for name in (DOMAIN, UNTRAINED)}
    counts = write_english_shards(files[DOMAIN], files[UNTRAINED])
    rows = {name: [json.loads(line) for line in file.read_text().splitlines()] for name, file in files.items()}
    sources = {name: Counter(row["source"] for row in held) for name, held in rows.items()}
    assert {name: len(held) for name, held in rows.items()} == counts
    for name, held in rows.items():
        assert {row["domain"] for row in held} == {name} and len({row["id"] for row in held}) == counts[name]
        long = [row for row in held if len(row["text"]) >= PAGE]
        assert len(long) >= counts[name] - len(sources[name]), "only the last document of a package is shorter"
    assert not sources[DOMAIN].keys() & sources[UNTRAINED].keys(), "no package is in both domains"
    everything = sources[DOMAIN] | sources[UNTRAINED]
    assert {"pydantic", "typer", "transformers"} <= everything.keys(), "packages that the factory depends on"
    assert everything.keys() <= {name for name, *_ in read_descriptions()}
    assert {row["license"] for held in rows.values() for row in held} <= set(LICENCES.values())
    assert len(sources[UNTRAINED]) > 24, "each half of the held-out documents has enough groups for an interval"
    first = [file.read_bytes() for file in files.values()]
    write_english_shards(*files.values())
    assert [file.read_bytes() for file in files.values()] == first
