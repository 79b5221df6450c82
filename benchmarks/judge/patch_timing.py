"""How often the patch gate errs about time: identical code (A/A), and code with a planted gain of a known size.

    python -m benchmarks.judge.patch_timing measure --workspace demo-workspace --rounds 25 --label idle --out rounds.jsonl
    python -m benchmarks.judge.patch_timing measure … --gain 0.05 --busy 1 --label "one busy process"
    python -m benchmarks.judge.patch_timing table rounds.jsonl

``measure`` makes real rounds of the gate (``factory.gates.patch.paired_rounds``): two new sandboxed trainers each, on the workspace's own recipe,
data and last checkpoint. For a planted gain the *baseline* does extra matrix products in each step. ``--busy N`` starts N processes that compute
all the time. ``table`` draws sequences of these rounds with replacement, shows them to the judge one by one as the gate does, and counts the
verdicts. For identical code each round also counts with its sides exchanged.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
import shutil
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from factory.core import devices
from factory.core.workspace import Workspace
from factory.gates.patch.judge import CPU_CLOCKS, compute_step_gain, judge_training
from factory.gates.patch.paired_rounds import PairedRounds, Suspicions, TrainingSide
from factory.gates.patch.policy import TrainingPolicy
from factory.gates.patch.round_plan import BASELINE, CANDIDATE
from factory.gates.training_start import TrainingStart, find_training_start
from factory.git import repository
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.ledger.rows import Subject
from factory.runs.arm_runner import ArmRunner
from factory.runs.compile_cache import copy_cache
from trainer.contract.checkpoint import format as checkpoint_files

STEP = "        self.optimizer.step(lr, divide_by, skip)\n"
PRODUCT = 384  # rows and columns of a planted matrix product
SEQUENCES = 1000
MOST_ROUNDS = 6  # of a drawn sequence: the gate's budget for a demo
Round = dict[str, list[list[float]]]  # clock → [baseline's seconds of a step, candidate's] of each pair


@contextmanager
def keep_busy(processes: int) -> Iterator[None]:
    """Start processes that compute until the block ends."""
    started = [multiprocessing.Process(target=_compute, daemon=True) for _ in range(processes)]
    for one in started:
        one.start()
    try:
        yield
    finally:
        for one in started:
            one.terminate()
            one.join()


def _compute() -> None:
    number = 1
    while True:
        number = number * 3 % 1_000_003


def measure(workspace: Workspace, policy: TrainingPolicy, gain: float, step_seconds: float) -> dict[str, Any]:
    """Make ``policy.rounds`` rounds on the live code, and return the training stage's evidence. ``gain``: what the baseline is made slower by."""
    ledger = Ledger.open(workspace.ledger_url)
    start = find_training_start(ledger)
    if start is None:
        raise SystemExit("the workspace has no trained trunk: run 'factory demo' first")
    live = repository.checkout_live_code(workspace, start.commit)
    with tempfile.TemporaryDirectory(prefix="patch-timing-") as made:
        work = Path(made)
        slow = live
        if gain:
            slow = work / "slow"
            shutil.copytree(live, slow, ignore=shutil.ignore_patterns(".git"))
            plant_products(slow / "trainer" / "run.py", count_products(gain * step_seconds))
        recipe = dict(start.recipe)
        recipe |= {"stability": recipe["stability"] | {"noise_scale_every": 0}}
        sides = {
            name: TrainingSide(code, start.commit, recipe, work / name)
            for name, code in ((BASELINE, slow), (CANDIDATE, live))
        }
        compiled = devices.get_compiled_code_folder(workspace.root, start.commit)
        for side in sides.values():
            copy_cache(compiled, side.folder / "known" / "cache")
        runs = ArmRunner(Plant(workspace, ledger), work, "benchmark", Subject("proposal", 0))
        origin = checkpoint_files.read_tensors(start.checkpoint, "model")
        return _measure(runs, policy, start, sides, compiled, origin)


def _measure(
    runs: ArmRunner,
    policy: TrainingPolicy,
    start: TrainingStart,
    sides: dict[str, TrainingSide],
    compiled: Path,
    origin: Any,
) -> dict[str, Any]:
    return PairedRounds(runs, policy, start, sides, Suspicions(new_code=False), 1, compiled, origin).measure()


def plant_products(path: Path, count: int) -> None:
    """Add ``count`` matrix products to each step of a trainer."""
    text = path.read_text()
    assert STEP in text
    extra = f"        planted = torch.full(({PRODUCT}, {PRODUCT}), 1e-3)\n        for _ in range({count}):\n            planted @ planted\n"
    path.write_text(text.replace(STEP, extra + STEP))


def count_products(seconds: float) -> int:
    """Return the number of planted products that take ``seconds`` here."""
    import torch

    planted = torch.full((PRODUCT, PRODUCT), 1e-3)
    each = []
    for _ in range(30):
        began = time.perf_counter()
        for _ in range(5):
            planted @ planted
        each.append((time.perf_counter() - began) / 5)
    return max(1, round(seconds / sorted(each)[len(each) // 2]))


def split_rounds(found: dict[str, Any]) -> list[Round]:
    """Return the seconds of each round by clock, from the evidence of a measurement."""
    clocks = {"wall": found} | {name: found["cpu"][name] for name in CPU_CLOCKS if name in found.get("cpu", {})}
    rounds, place = [], 0
    for size in found["round_pairs"]:
        pairs = slice(place, place + size)
        rounds.append(
            {name: [list(pair) for pair in zip(of["baseline_seconds"][pairs], of["candidate_seconds"][pairs], strict=True)]
             for name, of in clocks.items()}
        )  # fmt: skip
        place += size
    return rounds


# -- the table ----------------------------------------------------------------------------------------------------------
def make_evidence(rounds: Sequence[Round], new_code: bool) -> dict[str, Any]:
    """Return the evidence of a training stage with these rounds. Weights are alike, and long runs gain as much as the others."""

    def of(clock: str) -> dict[str, list[float]]:
        pairs = [pair for one in rounds for pair in one[clock]]
        return {"baseline_seconds": [pair[0] for pair in pairs], "candidate_seconds": [pair[1] for pair in pairs]}

    found = of("wall") | {"drift": 0.0, "control_drift": 0.2, "device": "cpu", "new_code": new_code}
    found |= {
        "round_pairs": [len(one["wall"]) for one in rounds],
        "cpu": {clock: of(clock) for clock in CPU_CLOCKS if clock in rounds[0]},
    }
    ratios = [
        math.log(base / ours) for base, ours in zip(found["baseline_seconds"], found["candidate_seconds"], strict=True)
    ]
    long = {"ratio": math.exp(sum(ratios) / len(ratios)), "hideable": 1.0, "runs": len(rounds) - 1, "steps": 80}
    return found | {"long": long | {"drift": 0.0, "control_drift": 0.2}}


def judge_sequence(policy: TrainingPolicy, drawn: Sequence[Round], new_code: bool) -> tuple[str, int]:
    """Show the rounds to the judge as the gate does. Returns the verdict ('gain', 'no gain', 'slower' or 'undecided') and the number of pairs."""
    pairs = 0
    for number in range(policy.rounds, len(drawn) + 1):
        whole = drawn[:number]
        looks = [whole] if number == policy.rounds else list(_grow(whole))
        for seen in looks:
            found = make_evidence(seen, new_code)
            pairs = len(found["baseline_seconds"])
            outcome = judge_training(policy, found, 1).outcome
            if outcome == "promote":
                return "gain", pairs
            if outcome == "reject":
                wall = compute_step_gain(policy, found, found, 1 if new_code else 2)
                return ("slower" if wall is not None and wall.upper < 1 else "no gain"), pairs
    return "undecided", pairs


def _grow(rounds: Sequence[Round]) -> Iterator[list[Round]]:
    """Yield the rounds with one, two, … pairs of the last round."""
    last = rounds[-1]
    for count in range(1, len(last["wall"]) + 1):
        yield [*rounds[:-1], {clock: pairs[:count] for clock, pairs in last.items()}]


def print_table(paths: Sequence[Path]) -> None:
    """Print the shares of verdicts by label, planted gain and kind of code."""
    kept: dict[tuple[str, float], list[Round]] = defaultdict(list)
    for path in paths:
        for line in path.read_text().splitlines():
            row = json.loads(line)
            kept[row["label"], row["gain"]].append(row["round"])
    policy, draw = TrainingPolicy(), random.Random(1)
    print(
        f"{SEQUENCES} sequences of at most {MOST_ROUNDS} real rounds; confidence {policy.confidence:g}, least gain {policy.min_gain:g}"
    )
    print(
        "| machine | planted | code | rounds | pair's scatter: wall, CPU of all, of busiest | gain | no gain | slower | undecided | pairs |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for (label, gain), rounds in sorted(kept.items()):
        both = [*rounds, *(_exchange(one) for one in rounds)] if not gain else rounds
        scatter = " ".join(
            f"{100 * _scatter(rounds, clock):.1f} %" for clock in ("wall", *CPU_CLOCKS) if clock in rounds[0]
        )
        for new_code in (False, True):
            counts: Counter[str] = Counter()
            pairs = 0
            for _ in range(SEQUENCES):
                verdict, seen = judge_sequence(policy, draw.choices(both, k=MOST_ROUNDS), new_code)
                counts[verdict] += 1
                pairs += seen
            shares = " | ".join(
                f"{100 * counts[name] / SEQUENCES:.1f} %" for name in ("gain", "no gain", "slower", "undecided")
            )
            kind = "new" if new_code else "approved"
            print(
                f"| {label} | {100 * gain:g} % | {kind} | {len(rounds)} | {scatter} | {shares} | {pairs / SEQUENCES:.1f} |"
            )


def _exchange(one: Round) -> Round:
    return {clock: [[b, a] for a, b in pairs] for clock, pairs in one.items()}


def _scatter(rounds: Sequence[Round], clock: str) -> float:
    """Return the standard deviation of a pair's logarithmic ratio."""
    ratios = [math.log(base / ours) for one in rounds for base, ours in one[clock]]
    mean = sum(ratios) / len(ratios)
    return math.sqrt(sum((one - mean) ** 2 for one in ratios) / max(1, len(ratios) - 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure", help="make real rounds")
    measuring.add_argument("--workspace", type=Path, required=True)
    measuring.add_argument("--out", type=Path, required=True)
    measuring.add_argument("--rounds", type=int, default=10)
    measuring.add_argument("--pairs", type=int, default=TrainingPolicy().pairs)
    measuring.add_argument("--steps", type=int, default=TrainingPolicy().steps)
    measuring.add_argument("--gain", type=float, default=0.0, help="0.05: the baseline's step takes 5 %% longer")
    measuring.add_argument("--step-seconds", type=float, default=0.15, help="of the recipe on this machine; for --gain")
    measuring.add_argument("--busy", type=int, default=0, help="processes that compute meanwhile")
    measuring.add_argument("--label", default="idle")
    showing = commands.add_parser("table", help="print the shares of verdicts")
    showing.add_argument("files", type=Path, nargs="+")
    given = parser.parse_args()
    if given.command == "table":
        print_table(given.files)
        return
    policy = TrainingPolicy(steps=given.steps, pairs=given.pairs, rounds=max(2, given.rounds), budget_seconds=1e-9)
    began = time.monotonic()
    with keep_busy(given.busy):
        found = measure(Workspace.open(given.workspace), policy, given.gain, given.step_seconds)
    if "baseline_seconds" not in found:
        raise SystemExit(f"not measured: {[str(reason) for reason in found['reasons']]}")
    with given.out.open("a") as out:
        for one in split_rounds(found):
            out.write(json.dumps({"label": given.label, "gain": given.gain, "round": one}) + "\n")
    print(f"{len(found['round_pairs'])} rounds in {time.monotonic() - began:.0f} s; drift {found['drift']:g}")


if __name__ == "__main__":
    main()
