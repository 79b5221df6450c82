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

from tests.mutants.operators import Mutant, equivalents, mutants
from tests.mutants.running import Warm, distant_tests, own_tests

SOURCE = ("agents", "factory", "kernels", "trainer")


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


def judged(root: Path, sample: list[Mutant], work: Path, known: Path, distant: bool) -> list[dict[str, object]]:
    """A row for each mutant of the sample; ``by``: the test that notices it, ``who``: 'own', 'distant', or 'nobody'."""
    warm, rows = Warm(root, work), []
    sources = {path: (root / path).read_text() for path in {m.path for m in sample}}
    own = {path: own_tests(root, path) for path in sources}
    digest = lambda *texts: hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
    state = {path: digest(*((root / test).read_text() for test in own[path])) for path in sources}
    before = {row["id"]: row for row in map(json.loads, known.read_text().splitlines())} if known.exists() else {}
    seen: dict[tuple[str, ...], dict] = {}
    with known.open("a") as kept:
        for number, mutant in enumerate(sample, 1):
            name = digest(mutant.path, mutant.inside, str(mutant.span[0] - sources[mutant.path].find("\n", mutant.span[0])), mutant.change,
                          sources[mutant.path])  # fmt: skip
            row = before.get(name)
            if row and (
                row["who"] == "own"
                or row["tests"] == state[mutant.path]
                and (row["who"] != "nobody" or row["distant"] or not distant)
            ):
                rows.append(row)
                continue
            files = tuple(own[mutant.path])
            if files not in seen:
                print(f"{len(files)} test files of {Path(mutant.path).parent}, without a mutant", flush=True)
                seen[files] = warm.baseline(list(files), [p for p in sources if own[p] == list(files)])
                for test in seen[files]["bad"]:
                    print(f"  left out, it fails without a mutant: {test}", flush=True)
            tests = {test: of for test, of in seen[files]["tests"].items() if test not in seen[files]["bad"]}
            lines = {f"{warm.tree / mutant.path}:{n}" for n in _lines(mutant, sources[mutant.path])}
            runs = {test: of[0] for test, of in tests.items() if lines & set(of[1])}
            if not mutant.inside or not runs:
                touch = f"{warm.tree / mutant.path}:"
                runs = {test: of[0] for test, of in tests.items() if any(line.startswith(touch) for line in of[1])}
            began = time.monotonic()
            by = (
                warm.killed(mutant, sources[mutant.path], sorted(runs, key=runs.__getitem__), sum(runs.values()))
                if runs
                else ""
            )
            who = "own" if by else "nobody"
            if not by and distant and (others := distant_tests(root, mutant.path)):
                who = "distant" if (by := warm.killed(mutant, sources[mutant.path], others, 150.0)) else who
            row = {"id": name, "tests": state[mutant.path], **asdict(mutant), "change": mutant.change, "ran": len(runs), "by": by, "who": who,
                   "distant": distant}  # fmt: skip
            rows.append(row)
            kept.write(json.dumps(row) + "\n")
            kept.flush()
            print(f"{number}/{len(sample)} {who:7} {time.monotonic() - began:4.0f} s of {len(runs)} tests "
                  f"{mutant.path}:{mutant.line} {mutant.kind}: {mutant.change}", flush=True)  # fmt: skip
    return rows


def _lines(mutant: Mutant, source: str) -> range:
    return range(mutant.line, mutant.line + source[slice(*mutant.span)].count("\n") + 1)


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
    parts = [sample[i :: given.jobs] for i in range(given.jobs)] if given.jobs > 1 else []
    for part in parts:
        if not (child := os.fork()):
            with tempfile.TemporaryDirectory(prefix="factory-mutants-") as folder:
                judged(root, part, Path(folder), given.results, given.distant)
            os._exit(0)
        children.append(child)
    failed = [code for child in children if (code := os.waitpid(child, 0)[1])]
    with tempfile.TemporaryDirectory(prefix="factory-mutants-") as folder:  # with jobs: what they found is known
        rows = judged(root, sample, Path(folder), given.results, given.distant) if not failed else []
    print(json.dumps(rows, indent=1) if given.json else table(rows))
    own = sum(row["who"] == "own" for row in rows)
    return 1 if failed or own < given.at_least * len(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
