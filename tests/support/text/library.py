"""Fixed text for tests: some modules of one version of Python's standard library, whatever Python runs the tests (README.md beside it)."""

from __future__ import annotations

import functools
import json
import lzma
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("library.jsonl.xz")


@dataclass(frozen=True)
class Member:
    """A function or class that is found in a module and has a docstring."""

    name: str
    kind: str  # 'function' | 'class'
    own: bool  # defined in this module, not imported into it
    doc: str  # as ``inspect.cleandoc`` leaves it


@dataclass(frozen=True)
class LibraryModule:
    source: str  # 'Lib/json/__init__.py'
    text: str
    members: tuple[Member, ...]  # by name; of argparse, ast, inspect and textwrap alone

    @property
    def name(self) -> str:
        """'json'."""
        return self.source.removeprefix("Lib/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@functools.cache
def library() -> dict[str, LibraryModule]:
    """The modules by name."""
    with lzma.open(FILE, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    found = [
        LibraryModule(row["source"], row["text"], tuple(Member(**member) for member in row["members"])) for row in rows
    ]
    return {module.name: module for module in found}


def write_library(root: Path) -> Path:
    """The modules as files of a library folder, for ``factory.corpus``; returns it."""
    for module in library().values():
        path = root / module.source.removeprefix("Lib/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(module.text, encoding="utf-8")
    return root
