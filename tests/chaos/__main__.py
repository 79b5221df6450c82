"""``python -m tests.chaos``: injects faults at the effects of all scenarios and prints a table. After an interruption it continues.

``--way kill`` covers a kill at every effect: it recovers once from each crash state (``crashes``) of a run. Every change of recovery code must
pass it. It takes some hours.

The other ways need a run of the factory for each injection, except power cuts. The default ``--each 1`` injects each *fault* once. A fault is a
way to fail at a place. A *place* is the kind of an effect (a write, a rename, a program's start …), its path with all numbers and hashes
replaced, and its program. In a database, where all transactions are written to the same files, the program's effect before also counts.

The hundredth line of a metrics.jsonl is the same place as the first: the same code writes both. One injection of each fault can miss a state
that depends on the position: the last line before a checkpoint, the second of two files. The effect of a place is therefore chosen at random
(``--seed``). ``--each 5`` takes five, ``--each 0`` takes all, which needs two days of two cores. After ``--way kill`` in the same folder, a
fault is first injected into the shortest recovery that reaches its place.

In the table, ``faults`` counts the injected faults by the place where they happened. ``killed at`` counts the effects of all crash states from
which a recovery started. Both refer to one undisturbed run. Another order of processes can add or remove a place or two.

``--work FOLDER`` keeps the undisturbed run. With the same folder and results, the numbers refer to the same effects.
"""

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
from tests.chaos.campaign import AGAIN, END, IN_A_RUN, KILLED, TEAR, Injection, Site, Straight
from tests.chaos.scenarios import SCENARIOS
from tests.chaos.shim import ERRORS, FREE, NAMES, SEGMENT, SYNCS, WRITES, Effect, places

MEMORY, ROOM_BYTES = Path("/dev/shm"), 4 << 30
WAYS = ("kill", "tear", "pair", "error", "power")
Fault = tuple[str, str]  # an injection's mode, a place


def injections(
    effects: list[Effect], targets: list[Effect], ways: Iterable[str], chance: random.Random
) -> list[Injection]:
    """Return all injections at ``targets`` of a scenario. A kill after an effect is the same as a kill before the next."""
    made = [e for e in targets if not e.error]
    found: list[Injection] = []
    for effect in made:
        number = effect.number
        if "kill" in ways:
            found.append(Injection(KILLED, number))
        if "tear" in ways and effect.kind in WRITES and effect.size > 1:
            found.append(Injection(TEAR, number))
        if "pair" in ways:
            first = chance.randint(1, number)  # the recovery from there reaches about the same effect
            found.append(Injection(AGAIN, number - first + 1, first))
        if "error" in ways:
            found += [Injection(mode, number) for mode in ERRORS if mode != "ENOSPC" or effect.kind not in FREE]
        if "power" in ways and effect.kind in NAMES | SYNCS:
            found += [Injection(loss, number) for loss in power.LOSSES]
    if "kill" in ways and made:
        found.append(Injection(KILLED, made[-1].number + 1))
    return found


def states(straight: Straight, kind: str | None, among: set[int] | None = None) -> list[Injection]:
    """Return a kill for each crash state of a run, or only for the states before effects of a kind or with these numbers."""
    assert straight.crashes
    found = {e.number for e in straight.effects if kind in (None, e.kind)}
    found |= {len(straight.effects) + 1} if kind is None else set()
    found &= found if among is None else among
    return [Injection(KILLED, one.number) for one in straight.crashes.states.values() if found & set(one.effects)]


def faults(every: list[Injection], effects: list[Effect], root: Path) -> dict[Injection, Fault]:
    """Return the fault (mode and place) of each injection."""
    known = places(effects, root)
    return {i: (i.mode, known.get(i.number + max(0, i.state - 1), END)) for i in every}


def last_of_places(effects: list[Effect], root: Path) -> set[int]:
    """Return the last effect of each place, and the end. Recoveries from before these reach all places with the least work."""
    return {*{place: number for number, place in places(effects, root).items()}.values(), len(effects) + 1}


def fault_of(row: dict[str, Any]) -> Fault:
    """Return the fault of a result: what was injected, and where."""
    return row["mode"], SEGMENT.sub("*", row["effect"])


def shorter(fault: Fault, shortest: dict[str, list[tuple[int, int]]]) -> Injection | None:
    """Return the same fault in the shortest recovery. A second kill needs a recovery; a run from the scenario's start is none."""
    mode, place = fault
    for state, number in shortest.get(place, []) if mode in IN_A_RUN else []:
        if mode != AGAIN or state > 1:
            return Injection(mode, number, state)
    return None


def drawn(every: list[Injection], effects: list[Effect], root: Path, chance: random.Random) -> list[Injection]:
    """Return all injections in a random order in which each fault comes once before any comes twice."""
    kinds, seen = faults(every, effects, root), Counter[Fault]()
    ranked = []
    for injection in chance.sample(every, len(every)):
        ranked.append((seen[kinds[injection]], len(ranked), injection))
        seen[kinds[injection]] += 1
    return [injection for *_, injection in sorted(ranked, key=lambda r: r[:2])]


def table(
    rows: list[dict[str, Any]], known: dict[str, set[Fault]], effects: dict[str, int], met: dict[str, set[Fault]]
) -> str:
    """Return the table of injections and their results.

    For scenarios with an undisturbed run: ``known`` has all faults, ``effects`` the number of effects, ``met`` the injected faults.
    """
    head = (
        "scenario",
        "killed at",
        "faults",
        "injected",
        "recovered",
        "recovery s (median)",
        "(worst)",
        "steps again (worst)",
        "lost",
    )
    lines = [head]
    for name in dict.fromkeys(row["scenario"] for row in rows):
        mine = [row for row in rows if row["scenario"] == name and row["fired"]]
        if not mine:
            continue
        seconds = [row["seconds"] for row in mine if row["passes"]] or [0.0]
        wrong = [row for row in mine if row["wrong"]]
        faults = known.get(name, set())
        lines.append(
            (
                name, f"{sum(row['alike'] for row in mine if row['mode'] == KILLED)} of {effects[name] + 1}" if name in effects else "",
                f"{len(faults & met[name])} of {len(faults)}" if faults else "",
                str(len(mine)), str(len(mine) - len(wrong)),
                f"{statistics.median(seconds):.1f}", f"{max(seconds):.1f}",
                str(max(row["steps"] for row in mine)), str(len(wrong)),
            )
        )  # fmt: skip
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def memory() -> Path | None:
    """Return a file system in memory for the runs, since copying takes half of a short run; None if none is large enough or executable."""
    if not MEMORY.is_dir():
        return None
    status = os.statvfs(MEMORY)
    return None if status.f_flag & os.ST_NOEXEC or status.f_bavail * status.f_frsize < ROOM_BYTES else MEMORY


class Counted:
    """Counts how often each fault fired, from a file of results to which other campaigns may append."""

    def __init__(self, results: Path) -> None:
        self.results, self.offset, self.faults = results, 0, Counter[Fault]()

    def look(self) -> Counter[Fault]:
        """Read the new results. Returns the counts."""
        if self.results.exists():
            with open(self.results, "rb") as file:
                file.seek(self.offset)
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self.offset += len(whole)
            self.faults.update(fault_of(row) for row in map(json.loads, whole.splitlines()) if row["fired"])
        return self.faults


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--scenario", action="append", choices=list(SCENARIOS), help="only this scenario (can be repeated)"
    )
    parser.add_argument(
        "--way",
        action="append",
        choices=WAYS,
        help="only this way (can be repeated)",
    )
    parser.add_argument("--kind", help="only at effects of this kind, as 'spawn' or 'rename'")
    parser.add_argument(
        "--each",
        type=int,
        metavar="K",
        default=1,
        help="at most K injections of each fault except kills, chosen with --seed (default 1; 0: all)",
    )
    parser.add_argument(
        "--last", action="store_true", help="kill before the last effect of each place only: what the other ways need"
    )
    parser.add_argument(
        "--across",
        action="store_true",
        help="count injections of other scenarios too, also those of a simultaneous campaign with the same --results",
    )
    parser.add_argument("--count", action="store_true", help="only print the numbers of effects, injections and faults")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("workspace") / "chaos.jsonl",
        help="file of results; an existing file is continued",
    )
    parser.add_argument("--work", type=Path, help="a folder for the runs; default: a temporary one in memory")
    given = parser.parse_args()
    given.results.parent.mkdir(parents=True, exist_ok=True)
    lines = given.results.read_text().splitlines() if given.results.exists() else []
    rows = [{"run": "", "alike": 1, "digest": "", "state": 0} | json.loads(line) for line in lines]
    ways = given.way or WAYS
    known: dict[str, set[Fault]] = {}
    made, kept, counts = dict[str, int](), list[dict[str, Any]](), dict[str, Counter[Fault]]()
    anywhere = Counted(given.results)
    with tempfile.TemporaryDirectory(prefix="factory-chaos-", dir=memory()) as folder:
        site = Site((given.work or Path(folder)).resolve(), crashes="kill" in ways)
        try:
            for name in given.scenario or SCENARIOS:
                chance = random.Random(f"{given.seed} {name}")
                straight = site.straight(name)
                effects, made[name] = straight.effects, len(straight.effects)
                # Crash states belong to one undisturbed run. Places are the same in all runs.
                mine = [r for r in rows if r["scenario"] == name and (r["mode"] != KILLED or r["run"] == straight.run)]
                straight.recovered |= {
                    r["digest"] for r in mine if r["run"] == straight.run and r["digest"] and not r["wrong"]
                }
                done = {Injection(r["mode"], r["number"], r["state"]) for r in mine}
                targets = [e for e in effects if given.kind in (None, e.kind)]
                every = injections(effects, targets, [way for way in ways if way != "kill"], chance)
                if "kill" in ways:
                    among = last_of_places(effects, site.site) if given.last else None
                    every = states(straight, given.kind, among) + every
                kinds = faults(every, effects, site.site)
                known[name] = set(kinds.values())
                chosen = sorted(drawn(every, effects, site.site, chance), key=lambda i: i.mode != KILLED)
                print(
                    f"{name}: {len(effects)} effects, {len(every)} injections of {len(set(kinds.values()))} faults",
                    flush=True,
                )
                met = anywhere.look() if given.across else Counter(fault_of(r) for r in mine if r["fired"])
                counts[name] = met
                shortest: dict[str, list[tuple[int, int]]] | None = None
                for count, injection in enumerate([] if given.count else chosen, 1):
                    fault = kinds[injection]
                    if given.across:
                        anywhere.look()
                    if given.each and injection.mode != KILLED and met[fault] >= given.each:
                        continue
                    if given.each and injection.mode in IN_A_RUN:
                        if shortest is None:
                            shortest = site.shortest(
                                name, {r["number"]: r["seconds"] for r in mine if r["mode"] == KILLED}
                            )
                        again = shorter(fault, shortest)
                        injection = again if again and again not in done else injection
                    if injection in done:
                        continue
                    done.add(injection)
                    result = site.inject(name, injection)
                    with open(given.results, "a") as file:
                        file.write(result.to_json() + "\n")
                    mine.append(json.loads(result.to_json()))
                    if result.fired and not given.across:
                        met[fault_of(mine[-1])] += 1
                    state = "✗" if result.wrong else "✓" if result.fired else "–"
                    print(
                        f"{state} {name} {count}/{len(chosen)}:"
                        f" {injection.mode} {injection.number}{f' from {injection.state}' if injection.state else ''}: {result.effect}",
                        flush=True,
                    )
                    for line in result.wrong:
                        print(f"    {line}", flush=True)
                kept += mine
        finally:
            site.close()
    if not given.count:
        print(table(kept, known, made, {name: set(count) for name, count in counts.items()}))
    return 1 if any(row["wrong"] for row in kept) else 0


if __name__ == "__main__":
    sys.exit(main())
