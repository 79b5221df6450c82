"""``python -m tests.chaos``: every effect of every scenario, in every way; goes on where it was stopped, and ends with a table."""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.chaos import power
from tests.chaos.campaign import Injection, Site
from tests.chaos.scenarios import SCENARIOS
from tests.chaos.shim import ERRORS, NAMES, SYNCS, WRITES, Effect

MEMORY, ROOM_BYTES = Path("/dev/shm"), 4 << 30
WAYS = ("kill", "tear", "pair", "error", "power")


def injections(
    effects: list[Effect], places: list[Effect], ways: Iterable[str], chance: random.Random
) -> list[Injection]:
    """All that can be injected at ``places`` into a scenario with these effects. To kill after an effect is to kill before the next."""
    made = [e for e in places if not e.error]
    found: list[Injection] = []
    for effect in made:
        number = effect.number
        if "kill" in ways:
            found.append(Injection("kill before", number))
        if "tear" in ways and effect.kind in WRITES and effect.size > 1:
            found.append(Injection("tear", number))
        if "pair" in ways:
            found.append(Injection("kill before", number, chance.randrange(1, max(2, len(effects) - number))))
        if "error" in ways:
            found += [Injection(mode, number) for mode in ERRORS]
        if "power" in ways and effect.kind in NAMES | SYNCS:
            found += [Injection(loss, number) for loss in power.LOSSES]
    if "kill" in ways and made:
        found.append(Injection("kill after", made[-1].number))
    return found


def drawn(every: list[Injection], effects: list[Effect], root: Path, chance: random.Random) -> list[Injection]:
    """All of them, in an order in which every way at every kind of place comes before any comes twice."""
    places = {e.number: (e.kind, e.place(root), e.program) for e in effects}
    seen: Counter[object] = Counter()
    ranked = []
    for injection in chance.sample(every, len(every)):
        group = (injection.mode, bool(injection.again), places[injection.number])
        ranked.append((seen[group], len(ranked), injection))
        seen[group] += 1
    return [injection for *_, injection in sorted(ranked, key=lambda r: r[:2])]


def table(rows: list[dict[str, Any]]) -> str:
    """What was injected, and what became of it."""
    head = ("scenario", "injected", "recovered", "recovery s (median)", "(worst)", "steps again (worst)", "lost")
    lines = [head]
    for name in dict.fromkeys(row["scenario"] for row in rows):
        mine = [row for row in rows if row["scenario"] == name and row["fired"]]
        if not mine:
            continue
        seconds = [row["seconds"] for row in mine]
        wrong = [row for row in mine if row["wrong"]]
        lines.append(
            (
                name, str(len(mine)), str(len(mine) - len(wrong)), f"{statistics.median(seconds):.1f}", f"{max(seconds):.1f}",
                str(max(row["steps"] for row in mine)), str(len(wrong)),
            )
        )  # fmt: skip
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def memory() -> Path | None:
    """A file system in memory with room for the runs, from which programs may be loaded: half of a short run is copying. None: there is none."""
    if not MEMORY.is_dir():
        return None
    status = os.statvfs(MEMORY)
    return None if status.f_flag & os.ST_NOEXEC or status.f_bavail * status.f_frsize < ROOM_BYTES else MEMORY


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument(
        "--scenario", action="append", choices=list(SCENARIOS), help="only this one (again: this one too)"
    )
    parser.add_argument("--way", action="append", choices=WAYS, help="only this way")
    parser.add_argument("--kind", help="only at effects of this kind, as 'spawn' or 'rename'")
    parser.add_argument("--every", type=int, default=1, help="only every so-many-th injection, drawn with --seed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--results", type=Path, default=Path("workspace") / "chaos.jsonl", help="goes on from what is there"
    )
    parser.add_argument("--work", type=Path, help="a folder for the runs; else one that is removed, in memory")
    given = parser.parse_args()
    given.results.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in given.results.read_text().splitlines()] if given.results.exists() else []
    done = {(row["scenario"], row["mode"], row["number"], row["again"]) for row in rows}
    with tempfile.TemporaryDirectory(prefix="factory-chaos-", dir=memory()) as folder:
        site = Site((given.work or Path(folder)).resolve())
        try:
            for name in given.scenario or SCENARIOS:
                chance = random.Random(f"{given.seed} {name}")
                effects, _ = site.straight(name)
                places = [e for e in effects if given.kind in (None, e.kind)]
                every = injections(effects, places, given.way or WAYS, chance)
                chosen = drawn(every, effects, site.site, chance)[: max(1, len(every) // given.every)]
                print(f"{name}: {len(places)} effects, {len(chosen)} injections", flush=True)
                for count, injection in enumerate(chosen, 1):
                    if (name, injection.mode, injection.number, injection.again) in done:
                        continue
                    result = site.inject(name, injection)
                    with open(given.results, "a") as file:
                        file.write(result.to_json() + "\n")
                    rows.append(json.loads(result.to_json()))
                    state = "✗" if result.wrong else "✓" if result.fired else "–"
                    print(
                        f"{state} {name} {count}/{len(chosen)} {injection.mode} {injection.number} {injection.again or ''} {result.effect}",
                        flush=True,
                    )
                    for line in result.wrong:
                        print(f"    {line}", flush=True)
        finally:
            site.close()
    print(table(rows))
    return 1 if any(row["wrong"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
