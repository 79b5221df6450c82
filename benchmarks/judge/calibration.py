"""``make judge-calibration``: how often the release judge is wrong, on simulated pairs of models that go through its real code.

A pair is two models' nats on the same held-out items. Sources (clusters) differ in size, items of one source rise and fall together, and the tails
are heavy (Student t with 5 degrees of freedom). Of each kind of suite, with ``--pairs`` pairs (1,000):

    no difference     how many candidates are promoted, and how many lines of 20 such candidates against one champion promote any
    interval          how often the 95 % interval of the target holds the true gain
    power             how many are promoted that are truly better, in every domain, by the gain that the verdict on another
                      candidate calls detectable, on the same items
    guard broken      how many are promoted that are better on the target but lose twice the margin in one domain
    sinking           how far a domain has sunk after 12 candidates that each lose 0.008 there
    halves            how many honest candidates are held for a gap between the sealed half and the dev half, a third of its size
    exam seen         how many are promoted that are better by 0.1 bits per byte on the sealed half alone, which they saw

``--cloze`` counts something else: of candidates that are as good as the champion in cloze (few items, some of which change sides), how many are
promoted with the gain that the verdict on another candidate says is seen with 80 %, where that counts cloze in; and where it sets cloze aside,
how many are of those that cloze does not hold.

    python -m benchmarks.judge.calibration --pairs 200 --json
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from factory.evals.parity import CHECKS
from factory.evals.power import stepped
from factory.evals.statistics import CLOZE
from factory.evals.tasks import DEV, EvalItem
from factory.gates.release.evidence import ReleaseEvidence
from factory.gates.release.gate import measured
from factory.gates.release.judge import PROMOTE, bounds, detectable, judge
from factory.gates.release.memorising import TASK
from factory.gates.release.policy import ReleasePolicy

DOMAINS = ("chat", "code", "docs")
LOOKS, RELEASES, SINKS, SEEN = 20, 12, 0.008, 0.1
BITS = 1.9  # a byte, of the champion
LEAST = 20  # candidates of which a share is told
POLICY = ReleasePolicy()


@dataclass(frozen=True)
class Kind:
    """How the items of a domain lie: ``uneven`` is the standard deviation of the logarithm of an item's size."""

    name: str
    sources: int
    items: int  # of a source
    uneven: float
    together: float  # correlation of the items of one source
    spread: float = 0.03  # bits per byte, standard deviation of an item's difference


KINDS = (
    Kind("many small sources", 100, 1, 0.3, 0.0),
    Kind("24 documents a domain", 24, 1, 0.8, 0.0),
    Kind("8 sources of 4", 8, 4, 0.5, 0.3),
    Kind("17 uneven sources of 6", 17, 6, 1.0, 0.5),
    Kind("30 sources of 10, clustered", 30, 10, 0.8, 0.5),
    Kind("20 sources, one holds most", 20, 1, 1.6, 0.0),
)


@dataclass(frozen=True)
class Pair:
    """Items of a champion and of a candidate that is truly better by ``gains`` bits per byte."""

    candidate: list[EvalItem]
    champion: list[EvalItem]


def better_by(pair: Pair, gain: float, tasks: tuple[str, ...] = (TASK, DEV)) -> Pair:
    """The same pair, of a candidate that is truly better by so many more bits per byte in every domain, on both halves or one."""
    by = {task: gain * math.log(2) for task in tasks}
    shifted = [replace(item, value=item.value - by.get(item.task, 0.0) * item.weight) for item in pair.candidate]
    return Pair(shifted, pair.champion)


Sizes = dict[tuple[str, str], np.ndarray]


def draw(kind: Kind, rng: np.random.Generator, gains: dict[str, float], sizes: Sizes | None = None) -> Pair:
    """``sizes``: the bytes of another pair's items, which this one is then measured on too; those that are drawn are put into an empty one."""
    ours, theirs = [], []
    sizes = {} if sizes is None else sizes
    heavy = lambda *shape: rng.standard_t(5, shape) / math.sqrt(5 / 3)
    for task, sources in ((TASK, kind.sources), (DEV, max(kind.sources // 3, 8))):
        for domain in DOMAINS:
            if (task, domain) not in sizes:
                sizes[task, domain] = rng.lognormal(0, kind.uneven, (sources, kind.items)) * 1000
            bytes_CI = sizes[task, domain]
            shared, own = heavy(sources, 1), heavy(sources, kind.items)
            off_CI = kind.spread * (math.sqrt(kind.together) * shared + math.sqrt(1 - kind.together) * own)
            for c in range(sources):
                for i in range(kind.items):
                    size, cluster = float(bytes_CI[c, i]), f"{task}/{domain}/{c}"
                    nats = BITS * math.log(2) * size
                    better = (gains[domain] + float(off_CI[c, i])) * math.log(2) * size
                    ours.append(EvalItem(task, f"{cluster}/{i}", domain, cluster, nats - better, size))
                    theirs.append(EvalItem(task, f"{cluster}/{i}", domain, cluster, nats, size))
    return Pair(ours, theirs)


def evidence_of(pair: Pair, look: int, lost: dict[str, float]) -> ReleaseEvidence:
    """As ``factory.gates.release.gate`` gathers it, all checks passed."""
    asked = sum(item.task == CLOZE for item in pair.champion)
    summary = {
        "bpb": dict.fromkeys(DOMAINS, BITS), "documents": dict.fromkeys(DOMAINS, 100), "noise_floor": dict.fromkeys(DOMAINS, 0.0005),
        "cloze": {"items": asked, "share_right": 0.3 if asked else None}, "parity": {name: {"ok": True, "detail": ""} for name in CHECKS},
    }  # fmt: skip
    found = measured(POLICY, DOMAINS, "candidate:1", (summary, pair.candidate), (summary, pair.champion))
    return replace(
        found,
        anomalies=(),
        releasable=1.0,
        look=look,
        lost=lost,
        sealed_looks=0.0,
        watched=0,
        fresh_documents=0,
        older_documents=100,
    )


def with_cloze(pair: Pair, rng: np.random.Generator, items: int, changed: float) -> Pair:
    """And so many cloze items of the sealed sources, of which a share changes sides, either way alike."""
    sources = sorted({(item.domain, item.cluster) for item in pair.champion if item.task == TASK})
    ours, theirs = list(pair.candidate), list(pair.champion)
    for number in range(items):
        domain, cluster = sources[number * len(sources) // items]
        change = float(rng.choice((-1.0, 0.0, 1.0), p=(changed / 2, 1 - changed, changed / 2)))
        ours.append(EvalItem(CLOZE, f"cloze/{number}", domain, cluster, change, 1.0))
        theirs.append(EvalItem(CLOZE, f"cloze/{number}", domain, cluster, 0.0, 1.0))
    return Pair(ours, theirs)


def promoted(evidence: ReleaseEvidence) -> bool:
    return judge(POLICY, evidence).outcome == PROMOTE


def calibrate(kind: Kind, pairs: int, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    none, nothing = dict.fromkeys(DOMAINS, 0.0), dict.fromkeys(DOMAINS, 0.0)
    false = held = broken = gaps = seen = 0
    for _ in range(pairs):
        pair = draw(kind, rng, none)
        honest = evidence_of(pair, 1, nothing)
        target = honest.target
        assert target is not None
        false += promoted(honest)
        gaps += any("which are drawn alike" in reason for reason in judge(POLICY, honest).reasons)
        seen += promoted(evidence_of(better_by(pair, SEEN, (TASK,)), 1, nothing))
        low, high = target.bound(0.025), target.bound(0.025, above=True)
        assert low is not None and high is not None
        held += low <= 0 <= high
        bad = dict.fromkeys(DOMAINS, 0.2) | {"docs": -2 * POLICY.guards.bits_per_byte_margin}
        broken += promoted(evidence_of(draw(kind, rng, bad), 1, nothing))
    lines = max(pairs // 5, 1)
    wrong = sum(any(_better(kind, rng, none, look) for look in range(1, LOOKS + 1)) for _ in range(lines))
    return power_of(kind, pairs, seed) | {
        "false_promotions": false / pairs, "false_in_a_line": wrong / lines, "lines": lines, "interval_holds": held / pairs,
        "guard_broken_promoted": broken / pairs, "honest_held_for_a_gap": gaps / pairs, "exam_seen_promoted": seen / pairs,
        "sunk": sink(kind, rng, lines // 4 or 1),
    }  # fmt: skip


def power_of(kind: Kind, pairs: int, seed: int) -> dict[str, Any]:
    """What a verdict says that it would have seen, and how many other candidates, better by that and measured on the same items, are promoted."""
    rng = np.random.default_rng([seed, KINDS.index(kind), 1])
    none, nothing = dict.fromkeys(DOMAINS, 0.0), dict.fromkeys(DOMAINS, 0.0)
    effective, told, power = [], [], 0
    for _ in range(pairs):
        sizes: Sizes = {}
        here, other = evidence_of(draw(kind, rng, none, sizes), 1, nothing), draw(kind, rng, none, sizes)
        gain = detectable(POLICY, here).gain
        assert here.target is not None
        effective.append(here.target.effective or 0.0)
        told.append(math.inf if gain is None else gain)
        power += gain is not None and promoted(evidence_of(better_by(other, gain), 1, nothing))
    return {
        "suite": kind.name, "sources": len(DOMAINS) * kind.sources, "effective": float(np.median(effective)), "pairs": pairs,
        "detectable_gain": float(np.median(told)), "power": power / pairs,
    }  # fmt: skip


LARGE = 1.0  # bits per byte
CLOZES = (
    (24, 0.0),
    (24, 0.05),
    (24, 0.15),
    (24, 0.3),
    (48, 0.05),
    (48, 0.15),
    (96, 0.05),
    (96, 0.15),
    (192, 0.15),
    (192, 0.3),
)
# items, share of them that change sides


def cloze_of(kind: Kind, items: int, changed: float, pairs: int, seed: int) -> dict[str, Any]:
    """What the judge says on one candidate, and how many other ones are promoted."""
    rng = np.random.default_rng([seed, KINDS.index(kind), items, int(100 * changed)])
    none, nothing = dict.fromkeys(DOMAINS, 0.0), dict.fromkeys((*DOMAINS, CLOZE), 0.0)
    told, gains, counted, aside = [], [], [], []
    passed = 0
    for _ in range(pairs):
        sizes: Sizes = {}
        one, other = (with_cloze(draw(kind, rng, none, sizes), rng, items, changed) for _ in range(2))
        here = evidence_of(one, 1, nothing)
        assert here.target is not None
        _, guards = bounds(POLICY, here, here.target, 1)
        told.append(stepped(guards, LARGE)[CLOZE].chance(LARGE))
        passed += promoted(evidence_of(better_by(other, LARGE), 1, nothing))
        found = detectable(POLICY, here)
        if found.gain is None:
            continue
        gains.append(found.gain)
        there = judge(POLICY, evidence_of(better_by(other, found.gain), 1, nothing))
        if not found.apart:
            counted.append(there.outcome == PROMOTE)
        elif not any(CLOZE in reason for reason in there.reasons if reason.startswith("Guard")):
            aside.append(there.outcome == PROMOTE)
    share = lambda seen: sum(seen) / len(seen) if len(seen) >= LEAST else math.nan
    return {
        "suite": f"{kind.name}; {items} cloze items, {changed:.0%} change sides", "pairs": pairs, "told": float(np.mean(told)),
        "promoted": passed / pairs, "no_gain_said": 1 - len(gains) / pairs, "cloze_counted_in": len(counted) / pairs,
        "power_counted_in": share(counted), "power_aside": share(aside), "detectable_gain": float(np.median(gains)) if gains else math.nan,
    }  # fmt: skip


def _better(kind: Kind, rng: np.random.Generator, gains: dict[str, float], look: int) -> bool:
    return promoted(evidence_of(draw(kind, rng, gains), look, dict.fromkeys(DOMAINS, 0.0)))


def sink(kind: Kind, rng: np.random.Generator, lines: int) -> float:
    """Mean bits per byte that one domain has lost after candidates that gain on the others and lose a little there."""
    sunk = []
    for _ in range(lines):
        measured = best = lost = 0.0
        look = 1
        for _ in range(RELEASES):
            found = evidence_of(
                draw(kind, rng, dict.fromkeys(DOMAINS, 0.1) | {"docs": -SINKS}), look, dict.fromkeys(DOMAINS, 0.0)
            )
            found = replace(found, lost=dict.fromkeys(DOMAINS, 0.0) | {"docs": best - measured})
            if promoted(found):
                measured += found.guards["docs"].gain or 0.0
                best, lost, look = max(best, measured), lost + SINKS, 1
            else:
                look += 1
        sunk.append(lost)
    return float(np.mean(sunk))


COLUMNS = {
    "sources": "sources", "effective": "effective", "false": "false_promotions", "in 20": "false_in_a_line", "interval": "interval_holds",
    "detects": "detectable_gain", "power": "power", "guard": "guard_broken_promoted", "sunk": "sunk", "halves": "honest_held_for_a_gap",
    "exam": "exam_seen_promoted",
}  # fmt: skip
OF_CLOZE = {
    "told": "told", "promoted": "promoted", "none": "no_gain_said", "counted": "cloze_counted_in", "power in": "power_counted_in",
    "power as.": "power_aside",
}  # fmt: skip
AS_NUMBERS = {"effective": ".1f", "detectable_gain": ".4f", "sunk": ".3f", "sources": "d"}


def report(rows: list[dict[str, Any]]) -> list[str]:
    """Of what was counted."""
    columns = {name: key for name, key in [*COLUMNS.items(), *OF_CLOZE.items()] if key in rows[0]}
    width = max(30, *(len(row["suite"]) + 2 for row in rows))
    lines = [f"{'suite':<{width}}" + "".join(f"{name:>10}" for name in columns)]
    for row in rows:
        shown = [format(row[key], AS_NUMBERS.get(key, ".1%")) for key in columns.values()]
        lines.append(f"{row['suite']:<{width}}" + "".join(f"{value:>10}" for value in shown))
    lines += [
        "",
        f"{rows[0]['pairs']} pairs of each kind" + ("; power ≥ 80 % is the aim" if "power" in rows[0] else ""),
    ]
    if "told" in rows[0]:
        lines += [
            f"told: how many pass cloze, as the judge tells it, on average; promoted: how many candidates better by {LARGE:.0f} are",
            "none: how often the verdict says that no gain is promoted with 80 %; counted: how often the gain that it says counts cloze in",
            "detects: the median gain that is said; power in: how many others are promoted with it where it counts cloze in; power as.: where it "
            "sets cloze aside, of those that cloze does not hold (of fewer than 20, no share is told)",
        ]
    if "lines" in rows[0]:
        lines += [
            "aims: false ≤ 5 %, also in a line of 20 candidates; interval 93–97 % (wider where one source holds most); guard ≤ 1 %; "
            "halves ≤ 1 %",
            f"{rows[0]['lines']} lines of {LOOKS} candidates",
            f"exam: promoted though better by {SEEN} bits per byte on the sealed half alone",
            f"sunk: bits per byte that a domain has lost after {RELEASES} candidates that each lose {SINKS}",
        ]
    return lines


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=1000, help="of each kind of suite (1000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="kinds whose name holds this")
    parser.add_argument(
        "--power", action="store_true", help="the columns detects and power alone, a quarter of the time"
    )
    parser.add_argument("--cloze", action="store_true", help="the guard of cloze alone, on few and on more items")
    parser.add_argument("--json", action="store_true", help="print JSON")
    asked = parser.parse_args(arguments)
    rows = []
    for kind in KINDS:
        if asked.only in kind.name:
            print(f"{kind.name} …", file=sys.stderr, flush=True)
            if asked.cloze:
                rows += [cloze_of(kind, *cloze, asked.pairs, asked.seed) for cloze in CLOZES]
                continue
            rows.append((power_of if asked.power else calibrate)(kind, asked.pairs, asked.seed))
    print(json.dumps(rows) if asked.json else "\n".join(report(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
