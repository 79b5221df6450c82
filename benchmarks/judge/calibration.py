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

``--cloze`` counts what comes of few cloze items, of which some change sides between two models (``benchmarks.judge.sides``):

    aside             how many verdicts set cloze aside
    equal             of candidates that are as good in everything, how many no guard holds: before (cloze always guarded), and now
    better            of candidates better by 0.1 in every domain and as good in cloze, how many are promoted: before, and now
    detects, power    the gain that a verdict says is seen, and how many others with it are promoted, of those that cloze does not hold
    harm              of those better by 0.1 that lose 0.3 of the cloze items, how many are promoted, held and rejected: before, and now

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
from factory.evals.statistics import CLOZE, run_holm_step_down
from factory.evals.tasks import DEV, EvalItem
from factory.gates.release.evidence import ReleaseEvidence
from factory.gates.release.gate import make_evidence_of_evaluations
from factory.gates.release.guards import (
    compute_detectable_gain,
    compute_guard_floors,
    list_guard_names,
    list_unreliable_guards,
)
from factory.gates.release.held_out_gaps import TASK
from factory.gates.release.judge import HOLD, PROMOTE, REJECT, judge
from factory.gates.release.policy import ReleasePolicy

DOMAINS = ("chat", "code", "docs")
LOOKS, RELEASES, SINKS, SEEN = 20, 12, 0.008, 0.1
BITS = 1.9  # a byte, of the champion
LEAST = 20  # candidates of which a share is told
BETTER, HARM, RIGHT = 0.1, 0.3, 0.5  # bits per byte; of the cloze items; share of them right, of the champion
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
    ours, theirs = (_summary(side) for side in (pair.candidate, pair.champion))
    found = make_evidence_of_evaluations(
        POLICY, DOMAINS, "candidate:1", (ours, pair.candidate), (theirs, pair.champion)
    )
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


def _summary(items: list[EvalItem]) -> dict[str, Any]:
    right = [item.value for item in items if item.task == CLOZE]
    return {
        "bpb": dict.fromkeys(DOMAINS, BITS), "documents": dict.fromkeys(DOMAINS, 100), "noise_floor": dict.fromkeys(DOMAINS, 0.0005),
        "cloze": {"items": len(right), "share_right": sum(right) / len(right) if right else None},
        "parity": {name: {"ok": True, "detail": ""} for name in CHECKS},
    }  # fmt: skip


def with_cloze(pair: Pair, rng: np.random.Generator, items: int, changed: float, harm: float = 0.0) -> Pair:
    """And so many cloze items of the sealed sources, of which a share changes sides, either way alike, and ``harm`` of them more is lost."""
    sources = sorted({(item.domain, item.cluster) for item in pair.champion if item.task == TASK})
    ours, theirs = list(pair.candidate), list(pair.champion)
    for number in range(items):
        domain, cluster = sources[number * len(sources) // items]
        right = rng.random() < RIGHT
        flips = (changed / 2 + harm) / RIGHT if right else changed / 2 / (1 - RIGHT)
        after = right != (rng.random() < flips)
        for side, value in ((ours, after), (theirs, right)):
            side.append(EvalItem(CLOZE, f"cloze/{number}", domain, cluster, float(value), 1.0))
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
        gaps += any(one.code in ("release.sealed_seen", "release.dev_fitted") for one in judge(POLICY, honest).reasons)
        seen += promoted(evidence_of(better_by(pair, SEEN, (TASK,)), 1, nothing))
        low, high = target.compute_confidence_bound(0.025), target.compute_confidence_bound(0.025, upper=True)
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
        gain = compute_detectable_gain(POLICY, here)
        assert here.target is not None
        effective.append(here.target.effective or 0.0)
        told.append(math.inf if gain is None else gain)
        power += gain is not None and promoted(evidence_of(better_by(other, gain), 1, nothing))
    return {
        "suite": kind.name, "sources": len(DOMAINS) * kind.sources, "effective": float(np.median(effective)), "pairs": pairs,
        "detectable_gain": float(np.median(told)), "power": power / pairs,
    }  # fmt: skip


CLOZES = tuple(
    (items, changed) for items in (24, 36, 60, 96) for changed in (0.1, 0.2, 0.35)
)  # share that change sides


def outcome_before(evidence: ReleaseEvidence) -> str:
    """As the judge decided when cloze guarded always, whatever an equally good model makes of it; of what passes all else."""
    floor, _, _ = compute_guard_floors(POLICY, evidence)
    every = list_guard_names(evidence)

    def above(name: str, shared: int) -> bool:
        bound = evidence.guards[name].compute_confidence_bound(POLICY.guards.alpha / shared)
        return bound is not None and bound > floor[name]

    now = judge(POLICY, evidence).outcome
    return now if now != PROMOTE or all(run_holm_step_down(every, above).values()) else HOLD


def held_by_a_guard(evidence: ReleaseEvidence, before: bool) -> bool:
    """Of a candidate that may not be better: is it held or rejected by a guard?"""
    shown = replace(evidence, target=replace(evidence.target, gain=1.0)) if evidence.target else evidence
    return (outcome_before(shown) if before else judge(POLICY, shown).outcome) != PROMOTE


def cloze_of(kind: Kind, items: int, changed: float, pairs: int, seed: int) -> dict[str, Any]:
    """What the judge says of models as good in cloze, and of ones that are not."""
    rng = np.random.default_rng([seed, KINDS.index(kind), items, int(100 * changed)])
    none, nothing = dict.fromkeys(DOMAINS, 0.0), dict.fromkeys((*DOMAINS, CLOZE), 0.0)
    aside, gains, power = [], [], []
    equal, better = {False: 0, True: 0}, {False: 0, True: 0}
    harmed: dict[bool, list[str]] = {False: [], True: []}
    for _ in range(pairs):
        sizes: Sizes = {}
        here, other = (with_cloze(draw(kind, rng, none, sizes), rng, items, changed) for _ in range(2))
        bad = with_cloze(draw(kind, rng, none, sizes), rng, items, changed, HARM)
        evidence = evidence_of(here, 1, nothing)
        aside.append(CLOZE in list_unreliable_guards(POLICY, evidence))
        good = evidence_of(better_by(here, BETTER), 1, nothing)
        worse = evidence_of(better_by(bad, BETTER), 1, nothing)
        for before in (True, False):
            equal[before] += not held_by_a_guard(evidence, before)
            decided = outcome_before if before else (lambda found: judge(POLICY, found).outcome)
            better[before] += decided(good) == PROMOTE
            harmed[before].append(decided(worse))
        gain = compute_detectable_gain(POLICY, evidence)
        if gain is not None:
            gains.append(gain)
            there = judge(POLICY, evidence_of(better_by(other, gain), 1, nothing))
            if not any(CLOZE in one.message for one in (*there.found.missing, *there.found.against)):
                power.append(there.outcome == PROMOTE)
    share = lambda before, outcome: harmed[before].count(outcome) / pairs
    return {
        "suite": f"{kind.name}; {items} cloze items, {changed:.0%} change sides", "pairs": pairs, "aside": sum(aside) / pairs,
        "equal_before": equal[True] / pairs, "equal": equal[False] / pairs, "better_before": better[True] / pairs, "better": better[False] / pairs,
        "detectable_gain": float(np.median(gains)) if gains else math.nan, "power": sum(power) / len(power) if len(power) >= LEAST else math.nan,
        "harm_promoted_before": share(True, PROMOTE), "harm_rejected_before": share(True, REJECT),
        "harm_promoted": share(False, PROMOTE), "harm_held": share(False, HOLD), "harm_rejected": share(False, REJECT),
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
    "aside": "aside", "equal, was": "equal_before", "equal": "equal", "better, was": "better_before", "better": "better",
    "detects": "detectable_gain", "power": "power", "harm, was": "harm_promoted_before", "rej., was": "harm_rejected_before",
    "harm": "harm_promoted", "harm held": "harm_held", "harm rej.": "harm_rejected",
}  # fmt: skip
AS_NUMBERS = {"effective": ".1f", "detectable_gain": ".4f", "sunk": ".3f", "sources": "d"}


def report(rows: list[dict[str, Any]]) -> list[str]:
    """Of what was counted."""
    columns = OF_CLOZE if "aside" in rows[0] else {name: key for name, key in COLUMNS.items() if key in rows[0]}
    width = max(30, *(len(row["suite"]) + 2 for row in rows))
    lines = [f"{'suite':<{width}}" + "".join(f"{name:>12}" for name in columns)]
    for row in rows:
        shown = [format(row[key], AS_NUMBERS.get(key, ".1%")) for key in columns.values()]
        lines.append(f"{row['suite']:<{width}}" + "".join(f"{value:>12}" for value in shown))
    lines += [
        "",
        f"{rows[0]['pairs']} pairs of each kind" + ("; power ≥ 80 % is the aim" if "power" in rows[0] else ""),
    ]
    if "aside" in rows[0]:
        lines += [
            "aside: verdicts that set cloze aside; was: where cloze always guards; equal: of candidates as good in everything, those that no guard",
            f"holds; better: promoted of those better by {BETTER} in every domain and as good in cloze; detects, power: the gain said to be seen,",
            f"and how many others with it are promoted, of those that cloze does not hold; harm: promoted of those better by {BETTER} that lose",
            f"{HARM:.0%} of the cloze items",
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
    parser.add_argument("--items", type=int, default=0, help="with --cloze: so many items alone (0: 24 to 96)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    asked = parser.parse_args(arguments)
    rows = []
    for kind in KINDS:
        if asked.only in kind.name:
            print(f"{kind.name} …", file=sys.stderr, flush=True)
            if asked.cloze:
                chosen = [one for one in CLOZES if asked.items in (0, one[0])]
                rows += [cloze_of(kind, *cloze, asked.pairs, asked.seed) for cloze in chosen]
                continue
            rows.append((power_of if asked.power else calibrate)(kind, asked.pairs, asked.seed))
    print(json.dumps(rows) if asked.json else "\n".join(report(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
