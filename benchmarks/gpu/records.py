"""The records of a run: one JSON object a line, written and flushed as they come, so that a run that is cut still tells.

{"kind": "number",  "part", "item", "name", "value", "unit", "aim"?, "holds"?, "note"?}    any single finding, text included
{"kind": "judged",  "part", "item", "op", "implementation", "right", "wrong": [what: why], "not_reached", "seconds"}
{"kind": "timed",   "part", "item", "op", "width", "shape", "by", "side", "forward_s", "both_s", "low_s", "high_s", "share", "of", "host_s"}
{"kind": "not run", "part", "item", "what", "why"}
{"kind": "wrong",   "part", "item", "what", "why"}                   decides the exit code, and is the headline
{"kind": "ended",   "part", "item", "state": "done" | "crashed" | "hung", "seconds", "says"}
{"kind": "part",    "part", "state": "done" | "timed out" | "not run", "seconds", "limit_s", "why"?}
{"kind": "run",     …}                                               of the whole: the command line, when, the label
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from benchmarks.gpu import page
from kernels.contract.files import finite, finite_json, write_atomically

Record = dict[str, Any]


class Records:
    """All records of a run. On disk once ``name`` is known (the card's), in ``<out>/<name>.jsonl``; ``.md`` and ``.json`` by ``render``."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.every: list[Record] = []
        self._lines: IO[str] | None = None
        self._name = ""

    @property
    def begun(self) -> bool:
        """Is there a file?"""
        return self._lines is not None

    @property
    def lines(self) -> Path:
        return self.out / f"{self._name}.jsonl"

    @property
    def markdown(self) -> Path:
        return self.out / f"{self._name}.md"

    def named(self, name: str) -> None:
        """Begin the file, with what is there. An older run's file of that name is replaced. Raises: OSError."""
        self.out.mkdir(parents=True, exist_ok=True)
        self._name = name
        self._lines = open(self.lines, "w", encoding="utf-8")  # noqa: SIM115 (closed by ``close``)
        for record in self.every:
            self._write(record)

    def add(self, kind: str, **fields: Any) -> Record:
        return self.take({"kind": kind, **fields})

    def take(self, record: Mapping[str, Any]) -> Record:
        """Keep a record, on disk before this returns."""
        kept: Record = finite(dict(record))
        self.every.append(kept)
        if self._lines is not None:
            self._write(kept)
        return kept

    def _write(self, record: Record) -> None:
        assert self._lines is not None
        self._lines.write(json.dumps(record) + "\n")
        self._lines.flush()

    def render(self) -> None:
        """The Markdown and the JSON, each whole or as before. Raises: OSError."""
        if self._lines is not None:
            write_atomically(self.markdown, page.markdown(self.every))
            write_atomically(
                self.markdown.with_suffix(".json"), finite_json(page.document(self.every), indent=1) + "\n"
            )

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()
            self._lines = None


def read(path: Path) -> list[Record]:
    """The records of a ``.jsonl``; a last line that was cut is left out. Raises: OSError."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found
