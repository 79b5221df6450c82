"""Made-up text for the tests of ingest."""

from __future__ import annotations

import random

from factory.core.workspace import Workspace, code_root

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
    (workspace.root / "policies" / "data.yaml").write_text(text)


def use_small_vocabulary(workspace: Workspace) -> None:
    """The shipped policy, with a tokenizer that trains in no time."""
    shipped = (code_root() / "policies" / "data.yaml").read_text()
    use_policy(workspace, shipped.replace("vocab_size: 4096", "vocab_size: 400"))
