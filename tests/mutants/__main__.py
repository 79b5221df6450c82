"""``python -m tests.mutants --modules trainer/contract --count 40``: how many random mutants do a module's own fast tests notice?

A row for each survivor. ``--distant`` runs the other fast tests that import the module over those. What was found is kept (``--results``): a run
that was stopped goes on, and after tests were mended the survivors alone run again. Mutants of no effect are listed in ``equivalent.yaml``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.mutants.operators import Mutant, equivalents, mutants
from tests.mutants.running import Warm, distant_tests, own_tests

SOURCE = ("agents", "factory", "kernels", "models", "trainer")


def chosen(every: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """A sample in which a kind of change has the share of the square root of its number: most are of constants."""
    kinds = Counter(mutant.kind for mutant in every)
    draw = lambda m: random.Random(f"{seed} {m.path} {m.inside} {m.kind} {m.change} {m.span[0]}").random()
    keys = {mutant: draw(mutant) ** kinds[mutant.kind] ** 0.5 for mutant in every}
    return sorted(sorted(every, key=lambda m: -keys[m])[:count], key=lambda m: (m.path, m.span))


def changed_lines(root: Path, base: str) -> dict[str, set[int]]:
    """The lines of Python files that are not as in a commit, by path."""
    diff = subprocess.run(
        ["git", "diff", "-U0", base, "--", *SOURCE], cwd=root, capture_output=True, text=True, check=True
    )
    found: dict[str, set[int]] = {}
    for line in diff.stdout.splitlines():
        if line.startswith("+++ "):
            lines = found.setdefault(line[6:], set())
        elif hunk := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            lines |= set(range(int(hunk[1]), int(hunk[1]) + int(hunk[2] or 1)))
    return {path: lines for path, lines in found.items() if path.endswith(".py") and lines}


def modules(root: Path, given: list[str]) -> list[str]:
    """Raises: SystemExit for a path that holds no Python file."""
    found: list[str] = []
    for word in given:
        path = root / word
        files = [path] if path.suffix == ".py" and path.is_file() else sorted(path.rglob("*.py"))
        if not files:
            raise SystemExit(f"--modules {word}: there is no Python file at {path}")
        found += [str(file.relative_to(root)) for file in files]
    return sorted(set(found))


class Judge:
    """Runs tests over mutants of some modules, in one copy of the checkout."""

    def __init__(self, root: Path, paths: set[str], work: Path, known: Path) -> None:
        self.root, self.known, self.warm = root, known, Warm(root, work)
        self.sources = {path: (root / path).read_text() for path in paths}
        self.own = {path: own_tests(root, path) for path in paths}
        self.state = {path: digest(*((root / test).read_text() for test in self.own[path])) for path in paths}
        self.before = (
            {row["id"]: row for row in map(json.loads, known.read_text().splitlines())} if known.exists() else {}
        )
        self.seen: dict[str, dict[str, Any]] = {}  # by test file

    def row(self, mutant: Mutant, distant: bool) -> dict[str, Any]:
        """``by``: the test that notices it; ``who``: 'own', 'distant', or 'nobody'."""
        source, state = self.sources[mutant.path], self.state[mutant.path]
        name = digest(mutant.path, source, str(mutant.span), mutant.after)
        row = self.before.get(name)
        if row and (
            row["who"] == "own" or row["tests"] == state and (row["who"] != "nobody" or row["distant"] or not distant)
        ):
            return row | {"seconds": None}
        began, who, runs = time.monotonic(), "own", self._running(mutant, self.own[mutant.path])
        if not (by := self._killed(mutant, runs)):
            who = "nobody"
            if distant and (by := self._killed(mutant, self._running(mutant, distant_tests(self.root, mutant.path)))):
                who = "distant"
        row = asdict(mutant) | {
            "id": name,
            "tests": state,
            "change": mutant.change,
            "by": by,
            "who": who,
            "distant": distant,
        }
        with self.known.open("a") as kept:
            kept.write(json.dumps(row) + "\n")
        return row | {"seconds": time.monotonic() - began}

    def _killed(self, mutant: Mutant, runs: dict[str, float]) -> str:
        order = sorted(runs, key=runs.__getitem__)
        return self.warm.killed(mutant, self.sources[mutant.path], order, sum(runs.values())) if runs else ""

    def _running(self, mutant: Mutant, files: list[str]) -> dict[str, float]:
        """The tests that run the mutant's lines, with their seconds; for what the module runs when it is imported, all that run any of it."""
        tests: dict[str, Any] = {}
        for file in files:
            if file not in self.seen:
                print(f"{file}, without a mutant", flush=True)
                self.seen[file] = self.warm.baseline([file], self.sources)
                for test in self.seen[file]["bad"]:
                    print(f"  left out, it fails without a mutant: {test}", flush=True)
            tests |= {test: of for test, of in self.seen[file]["tests"].items() if test not in self.seen[file]["bad"]}
        module = f"{self.warm.tree / mutant.path}:"
        last = mutant.line + self.sources[mutant.path][slice(*mutant.span)].count("\n")
        lines = {f"{module}{number}" for number in range(mutant.line, last + 1)}
        runs = {test for test, of in tests.items() if lines & set(of[1])} if mutant.inside else set()
        # else any may read what the module made, or start a process that runs the line
        return {test: of[0] for test, of in tests.items() if test in (runs or tests)}


def digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def judged(root: Path, sample: list[Mutant], known: Path, distant: bool) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory(prefix="factory-mutants-") as folder:
        judge = Judge(root, {mutant.path for mutant in sample}, Path(folder), known)
        for number, mutant in enumerate(sample, 1):
            rows.append(row := judge.row(mutant, distant))
            if row["seconds"] is not None:
                where = f"{mutant.path}:{mutant.line} {mutant.kind}: {mutant.change}"
                print(f"{number}/{len(sample)} {row['who']:7} {row['seconds']:4.0f} s {where}", flush=True)
    return rows


def table(rows: list[dict]) -> str:
    by_room: dict[str, Counter] = {}
    for row in rows:
        by_room.setdefault(str(Path(row["path"]).parent), Counter())[row["who"]] += 1
    lines = [f"{'room':32} mutants    own  distant  nobody"]
    for room, count in [*sorted(by_room.items()), ("all", sum(by_room.values(), Counter()))]:
        n = count.total()
        lines.append(
            f"{room:32} {n:7} {count['own']:4} {count['own'] / max(n, 1):4.0%} {count['distant']:6} {count['nobody']:7}"
        )
    for row in rows:
        if row["who"] != "own":
            lines.append(f"{row['path']}:{row['line']} in {row['inside'] or 'the module'}, {row['kind']}: {row['change']}"
                         + (f"   [noticed by {row['by']}]" if row["by"] else ""))  # fmt: skip
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--modules", nargs="+", default=[], metavar="PATH", help="files or folders of Python code")
    parser.add_argument(
        "--changed", nargs="?", const="main", metavar="BASE", help="the lines that are not as in BASE (main)"
    )
    parser.add_argument("--count", type=int, default=40, help="how many mutants (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side, each with every so-many-th mutant")
    parser.add_argument("--distant", action="store_true", help="run other tests over survivors too: minutes for each")
    parser.add_argument(
        "--at-least", type=float, default=0.0, metavar="SHARE", help="fail below this share noticed by own tests"
    )
    parser.add_argument("--results", type=Path, default=Path(tempfile.gettempdir()) / "factory-mutants.jsonl")
    parser.add_argument("--json", action="store_true", help="print rows as JSON at the end")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[2], help=argparse.SUPPRESS)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and the fork ends too
    root = given.root.resolve()
    lines = changed_lines(root, given.changed) if given.changed else {}
    paths = modules(root, given.modules) if given.modules else sorted(lines)
    listed = equivalents()
    every = [m for path in paths for m in mutants(path, (root / path).read_text())
             if (m.path, m.inside, m.change) not in listed and (not given.changed or m.line in lines.get(path, ()))]  # fmt: skip
    sample = chosen(every, given.count, given.seed)
    if not sample:
        print("there is nothing to change")
        return 0
    print(f"{len(sample)} of {len(every)} mutants in {len({m.path for m in sample})} modules", flush=True)
    children = []
    for part in (sample[i :: given.jobs] for i in range(given.jobs if given.jobs > 1 else 0)):
        if not (child := os.fork()):
            judged(root, part, given.results, given.distant)
            os._exit(0)
        children.append(child)
    ends = [os.waitpid(child, 0)[1] for child in children]
    rows = (
        [] if any(ends) else judged(root, sample, given.results, given.distant)
    )  # with jobs: what they found is known
    print(json.dumps(rows, indent=1) if given.json else table(rows))
    own = sum(row["who"] == "own" for row in rows)
    return 1 if any(ends) or own < given.at_least * len(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
