"""Three data sets as teams have them, made of the tests' fixed text: chats of one source, prose of three domains, a CSV file with columns of its own.

Each comes in two shards: the first for a release, the second for a better one.
"""

from __future__ import annotations

import ast
import csv
import hashlib
import io
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.text.library import library


@dataclass(frozen=True)
class Passage:
    module: str
    name: str
    text: str


def passages() -> list[Passage]:
    """Functions of the fixed text, in an order that mixes the modules; none stands inside another."""
    found = {}
    for module in library().values():
        tree = ast.parse(module.text)
        for node in [*tree.body, *(inner for top in tree.body if isinstance(top, ast.ClassDef) for inner in top.body)]:
            text = ast.get_source_segment(module.text, node) or ""
            if isinstance(node, ast.FunctionDef) and 150 < len(text) < 4000:
                found[hashlib.sha256(text.encode()).hexdigest()] = Passage(module.name, node.name, text)
    return [found[key] for key in sorted(found)]


def halves(of: Sequence[Passage]) -> tuple[Sequence[Passage], Sequence[Passage]]:
    return of[: len(of) // 2], of[len(of) // 2 :]


def chats(of: Iterable[Passage]) -> str:
    """ShareGPT rows; every one names the same source, as a data set's rows do, and none a licence."""
    rows = (
        {
            "conversations": [
                {"from": "human", "value": f"What does {one.name} of {one.module} look like?"},
                {"from": "gpt", "value": one.text},
            ],
            "source": "support-chats",
        }
        for one in of
    )
    return "".join(json.dumps(row) + "\n" for row in rows)


def prose(of: Iterable[Passage]) -> str:
    """Three domains, one source each; the licence is spelt as people spell it."""
    domains = ("guides", "notes", "recipes")
    rows = (
        {"text": one.text, "domain": domains[number], "source": f"the {domains[number]}", "license": "public-domain"}
        for one in of
        for number in (int(hashlib.sha256(one.name.encode()).hexdigest(), 16) % 3,)
    )
    return "".join(json.dumps(row) + "\n" for row in rows)


def table(of: Iterable[Passage]) -> str:
    """Columns that nothing here knows: heading, body, rights, and a number that nobody reads."""
    written = io.StringIO()
    writer = csv.writer(written)
    writer.writerow(["heading", "body", "rights", "score"])
    writer.writerows([one.name, one.text, "MIT", "nan"] for one in of)
    return written.getvalue()


@dataclass(frozen=True)
class OwnData:
    """``fields``: what data.yaml says of the columns, as a team would write it before the first ingest."""

    written: Callable[[Iterable[Passage]], str]
    suffix: str
    domains: tuple[str, ...]
    fields: str = ""


DATA = {
    "one-source chat": OwnData(chats, ".jsonl", ("chat",)),
    "three-domain prose": OwnData(prose, ".jsonl", ("guides", "notes", "recipes")),
    "CSV with a mapping": OwnData(
        table,
        ".csv",
        ("manual",),
        'fields:\n  - {files: "*.csv", text: "{heading}\\n\\n{body}", license: rights, domain: "=manual"}\n',
    ),
}


def write_shards(folder: Path, data: OwnData) -> list[Path]:
    found = []
    for number, half in enumerate(halves(passages())):
        path = folder / f"own-{number}{data.suffix}"
        path.write_text(data.written(half), encoding="utf-8")
        found.append(path)
    return found
