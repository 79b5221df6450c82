"""The records of a run: one JSON object a line, written and flushed as they come, so that a run that is cut still tells.

{"kind": "number",  "part", "item", "name", "value", "unit", "aim"?, "holds"?, "note"?}    any single finding, text included
{"kind": "judged",  "part", "item", "op", "implementation", "right", "wrong": [what: why], "not_reached", "seconds"}
{"kind": "timed",   "part", "item", "op", "width", "shape", "by", "side", "forward_s", "both_s", "low_s", "high_s", "share", "of", "host_s"}
{"kind": "not run", "part", "item", "what", "why"}
{"kind": "wrong",   "part", "item", "what", "why"}                   decides the exit code, and is the headline
{"kind": "failed",  "part", "item", "op", "by", "width", "why"}      one of ours that does not run in 'fast'; the exit code, and the headline
{"kind": "computing", "part", "item", "op", "chosen", "by", "why"}   what computes an op in a step
{"kind": "items",   "part", "names"}                                 of a part, before they run
{"kind": "ended",   "part", "item", "state": "done" | "failed" | "not run" | "crashed" | "hung", "seconds", "says"}
{"kind": "part",    "part", "state": "done" | "timed out" | "failed" | "not run" | "cut", "seconds", "limit_s", "why"?}
{"kind": "look",    "part", "when": "before" | "after", "clock", "power", "temperature", "utilisation", "processes"}   ``watch``
{"kind": "run",     …}                                               of the whole: the command line, when, the label; the first line
{"kind": "end",     "complete", "replaces"}                          the last line
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import IO, Any

from benchmarks.gpu import page
from kernels.contract.files import encode_finite_json, replace_non_finite, write_atomically

Record = dict[str, Any]


class Records:
    """All records of a run. On disk once ``name`` is known (the card's and the commit's), in ``<out>/<name>-partial.jsonl``; ``.md`` and
    ``.json`` by ``render``. A run that ``finish`` is told to be complete loses the "-partial", and alone may replace another's files."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.every: list[Record] = []
        self._lines: IO[str] | None = None
        self._name = self._complete = ""

    @property
    def begun(self) -> bool:
        """Is there a file?"""
        return self._lines is not None

    @property
    def files(self) -> bool:
        """Was there ever one?"""
        return bool(self._name)

    @property
    def lines(self) -> Path:
        return self.out / f"{self._name}.jsonl"

    @property
    def markdown(self) -> Path:
        return self.out / f"{self._name}.md"

    def named(self, name: str) -> None:
        """Begin the file, with what is there. Raises: OSError."""
        self.out.mkdir(parents=True, exist_ok=True)
        tries = (f"{name}-partial{f'-{number}' * (number > 1)}" for number in count(1))
        self._complete = name
        self._name = next(free for free in tries if not any(self.out.glob(f"{free}.*")))
        self._lines = open(self.lines, "w", encoding="utf-8")  # noqa: SIM115 (closed by ``close``)
        for record in self.every:
            self._write(record)

    def add(self, kind: str, **fields: Any) -> Record:
        return self.take({"kind": kind, **fields})

    def take(self, record: Mapping[str, Any]) -> Record:
        """Keep a record, on disk before this returns."""
        kept: Record = replace_non_finite(dict(record))
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
                self.markdown.with_suffix(".json"), encode_finite_json(page.document(self.every), indent=1) + "\n"
            )

    def finish(self, complete: bool) -> None:
        """The last record, and the name of a complete run: what was there of that name is replaced, and named. Raises: OSError."""
        if self._lines is None:
            return
        partial = self.markdown
        replaced = self.out / f"{self._complete}.md"
        self.add("end", complete=complete, replaces=said_of(replaced) if complete else "")
        if complete:
            os.replace(self.lines, replaced.with_suffix(".jsonl"))
            self._name = self._complete
        self.render()
        if complete:
            for left in (partial, partial.with_suffix(".json")):
                left.unlink(missing_ok=True)

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()
            self._lines = None


def read(path: Path) -> list[Record]:
    """The records of a ``.jsonl``; a last line that was cut is left out. Raises: OSError; ValueError: it is none."""
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    if not found or not all(isinstance(one, dict) and "kind" in one for one in found) or found[0]["kind"] != "run":
        raise ValueError("is not the .jsonl of a run of benchmarks.gpu")
    return found


def said_of(report: Path) -> str:
    """A report that is there, in words; '': there is none."""
    if not report.exists():
        return ""
    try:
        began = json.loads(report.with_suffix(".json").read_text(encoding="utf-8"))["run"]["began"]
    except (OSError, ValueError, LookupError, TypeError):
        return report.name
    return f"{report.name} of {began}"
