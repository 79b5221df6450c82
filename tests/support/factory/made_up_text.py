"""Made-up text for the tests of ingest."""

from __future__ import annotations

import random
from typing import Any

import sqlalchemy as sa

from factory.core.workspace import Workspace, find_checkout_root
from factory.ledger.ledger import Ledger, held_out

_SYLLABLES = [
    "ba",
    "de",
    "fi",
    "go",
    "lu",
    "ma",
    "ne",
    "pi",
    "ro",
    "su",
    "ta",
    "ve",
    "wi",
    "xo",
    "yu",
    "za",
    "ker",
    "lin",
    "mor",
    "tan",
]


def prose(seed: int, words: int = 120) -> str:
    """Sentences of invented words; two seeds share no run of words."""
    rng = random.Random(seed)
    made = ["".join(rng.choices(_SYLLABLES, k=rng.randint(1, 4))) for _ in range(words)]
    lines = [" ".join(made[i : i + 12]).capitalize() + "." for i in range(0, words, 12)]
    return "\n".join(lines)


def use_policy(workspace: Workspace, text: str) -> None:
    """One that says nothing of the tokenizer gets one that little text can train."""
    if "\ntokenizer:" not in f"\n{text}":
        text += "\ntokenizer: {vocab_size: 400}\n"
    (workspace.root / "policies" / "data.yaml").write_text(text)


def use_small_vocabulary(workspace: Workspace) -> None:
    """The shipped policy, with a tokenizer that trains in no time."""
    shipped = (find_checkout_root() / "policies" / "data.yaml").read_text()
    use_policy(workspace, shipped.replace("vocab_size: 4096", "vocab_size: 400"))


MIT = {"license": "MIT"}


def texts(first: int, count: int, words: int = 120) -> list[dict[str, Any]]:
    return [{"id": f"d{i}", "text": prose(i, words), "source": f"s{i}", **MIT} for i in range(first, first + count)]


def held_out_texts(ledger: Ledger) -> list[tuple[str, str]]:
    rows = ledger.select_rows(sa.select(held_out.c.key, held_out.c.content).order_by(held_out.c.key))
    return [(row["key"], row["content"]["text"]) for row in rows]
