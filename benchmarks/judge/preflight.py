"""How often the preflight refuses honest code, and which faults it notices: whole preflights of real commits, at four widths of the model.

    python -m benchmarks.judge.preflight honest          100 preflights: ten refactors × four widths × two or three seeds
    python -m benchmarks.judge.preflight faults          each fault of ``preflight_codes``, of each size
    python -m benchmarks.judge.preflight table           the tables of what ``--results`` holds

Each preflight is a straight run, the nudged runs, and the runs of every part but ``compile``, which costs a minute each, in the sandbox and
with two real ranks. A seed is that of the first weights and of the data's order. The runs of one commit at all widths are made by the same three
trainers, because the start of a trainer takes longer than the runs of a preflight. The evidence is appended to ``--results``, a line for each
preflight, and a second call goes on where the first was stopped. ``table`` judges it anew, so that another bound can be tried in a second.

An hour of one core for ``honest``, half of it for ``faults``. Threads and their waits are taken from the environment:
OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE is the quickest beside other work.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.judge.preflight_codes import FAULTS, HONEST, Edit, HonestCode
from factory.core.errors import SegmentError
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow
from factory.runs.live_code import LiveCode
from factory.runs.live_training import train_arms_with_live_code
from factory.training.certificate import PreflightPolicy
from factory.training.planning import plan_trunk
from factory.training.preflight import LEAD_STEPS, PreflightEvidence, judge_preflight
from factory.training.preflight_noise import DistanceFromStraightRun, estimate_rounding_noise
from factory.training.preflight_runs import PreflightRuns, compare_preflight_runs
from tests.support.factory.code_loop import make_target
from tests.support.git import git
from tests.support.plants.trained_plant import make_plant

WIDTHS: dict[int, dict[str, int]] = {
    32: {"d_model": 32, "heads": 4, "kv_heads": 2, "head_dim": 16, "d_ff": 64},
    64: {"d_model": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "d_ff": 128},
    128: {"d_model": 128, "heads": 4, "kv_heads": 2, "head_dim": 32, "d_ff": 256},
    256: {"d_model": 256, "heads": 8, "kv_heads": 2, "head_dim": 32, "d_ff": 256},
}
PARTS = ["resume", "accumulation", "kernels", "ranks"]
TRAINERS = ("straight", "one rank", "2 ranks")


class TrainerFailedError(Exception):
    """A trainer of a batch ended without a result, for instance because the machine had no process left."""


@dataclass(frozen=True)
class Case:
    """A preflight to make: of which code, and of which model."""

    code: str
    size: str  # of the fault; empty: it has none
    width: int
    seed: int

    @property
    def key(self) -> list[Any]:
        return [self.code, self.size, self.width, self.seed]


@dataclass(frozen=True)
class Batch:
    """The preflights of one commit."""

    code: HonestCode
    parts: list[str]
    cases: list[Case]


class Site:
    """A plant with a trained trunk, the repository of the code that it trains with, and the next segment, whose code is to be judged."""

    def __init__(self, root: Path) -> None:
        self.root, self.code = root, make_target(root / "code")
        self.plant = Plant(*make_plant(root, self.code))
        self.row = SegmentRow.get(self.plant.ledger, plan_trunk(self.plant, 4))
        self.base = git(self.code, "rev-parse", "HEAD")

    def commit(self, edits: Iterable[Edit], size: str = "") -> str:
        """Commit the edits on top of the honest code; returns the commit."""
        git(self.code, "reset", "--quiet", "--hard", self.base)
        for path, old, new in edits:
            file = self.code / path
            assert file.read_text().count(old) == 1, f"{path} holds {old!r} {file.read_text().count(old)} times"
            file.write_text(file.read_text().replace(old, new.replace("{size}", size)))
        git(self.code, "commit", "--quiet", "--all", "--allow-empty", "--message", "change")
        return git(self.code, "rev-parse", "HEAD")

    def plan(self, commit: str, code: HonestCode, case: Case, parts: Sequence[str]) -> PreflightRuns:
        """The runs of one preflight."""
        computing = self.row.computing or {}
        kernels = {op: code.kernels.get(op, "reference") for op in computing["kernels"]}
        recipe = self.row.recipe_json
        row = replace(
            self.row,
            code_commit=commit,
            recipe_json=recipe | {"seed": case.seed, "model": recipe["model"] | WIDTHS[case.width]},
            computing=computing | {"kernels": kernels},
            folder=str(self.root / "flights" / f"{case.width}-{case.seed}"),
        )
        flight = PreflightRuns(self.plant, row, PreflightPolicy.model_validate({"parts": list(parts)}))
        flight.base["data_plan"] = flight.base["data_plan"] | {"seed": case.seed}
        return flight

    def measure(self, batch: Batch) -> Iterator[tuple[Case, PreflightEvidence]]:
        """Make the preflights of one commit. Yields the evidence of each."""
        commit, home = self.commit(batch.code.edits, batch.cases[0].size), self.root / "flights"
        shutil.rmtree(home, ignore_errors=True)  # of a batch that failed
        live = LiveCode.check_out_commit(self.plant, commit)
        flights = {case: self.plan(commit, batch.code, case, batch.parts) for case in batch.cases}
        for trainer in TRAINERS:
            arms = {}
            for flight in flights.values():
                found = next((arms for title, arms in flight.list_arms_by_trainer() if title == trainer), [])
                arms |= {flight.runs.find_arm_folder(arm): arm for arm in found}
            if arms and (done := train_arms_with_live_code(self.plant, live, home, arms, trainer)).code:
                raise TrainerFailedError(f"{batch.code.name}, {trainer}: {done.line}")
        for case, flight in flights.items():
            evidence = PreflightEvidence(commit, LEAD_STEPS, flight.last - LEAD_STEPS, True, left_out=flight.left_out)
            yield (
                case,
                compare_preflight_runs(
                    evidence,
                    flight.ways,
                    flight.checkpoint_before_branches,
                    flight.make_start_checkpoint,
                    flight.make_trace,
                ),
            )


# -- what is measured --------------------------------------------------------------------------------------------------
def list_honest_batches() -> list[Batch]:
    """100 preflights: three seeds of the first five codes, two of the others, at each width. No two codes share a seed."""
    return [
        Batch(
            code,
            PARTS,
            [
                Case(code.name, "", width, 10 * number + seed)
                for width in WIDTHS
                for seed in range(1, 4 if number <= 5 else 3)
            ],
        )
        for number, code in enumerate(HONEST, 1)
    ]


def list_fault_batches() -> list[Batch]:
    """Each fault of each size at two widths, the largest sizes first. Only the part of the preflight that shows it is run."""
    sized = [(at, fault, size) for fault in FAULTS for at, size in enumerate(fault.sizes or ("",))]
    return [
        Batch(
            replace(HONEST[0], name=fault.name, edits=fault.edits),
            [fault.part],
            [Case(fault.name, size, width, 1) for width in (64, 256)],
        )
        for _, fault, size in sorted(sized, key=lambda one: one[0])
    ]


def measure(batches: Sequence[Batch], results: Path) -> None:
    """Make the preflights that ``results`` lacks, and append their evidence."""
    done = [case.key for case, _ in read_results(results)] if results.exists() else []
    left = [batch for batch in batches if any(case.key not in done for case in batch.cases)]
    if not left:
        return
    with tempfile.TemporaryDirectory() as folder:
        site = Site(Path(folder))
        for batch in left:
            began = time.monotonic()
            try:
                found = list(site.measure(batch))
            except (TrainerFailedError, SegmentError, OSError) as error:  # the other batches can still be made
                print(f"not made: {error}", file=sys.stderr, flush=True)
                continue
            lines = [json.dumps({"case": case.key, "evidence": asdict(evidence)}) for case, evidence in found]
            with open(results, "a") as out:
                out.write("".join(f"{line}\n" for line in lines))
            name = f"{batch.code.name} {batch.cases[0].size}".strip()
            print(f"{name}: {len(lines)} preflights in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


def read_results(results: Path) -> list[tuple[Case, PreflightEvidence]]:
    """The evidence of all preflights that were made."""
    found = []
    for line in results.read_text().splitlines():
        stored = json.loads(line)
        facts = stored["evidence"]
        distances = {way: DistanceFromStraightRun(**one) for way, one in facts["apart"].items()}
        nudged = [DistanceFromStraightRun(**one) for one in facts["rounding"]]
        found.append((Case(*stored["case"]), PreflightEvidence(**facts | {"apart": distances, "rounding": nudged})))
    return found


# -- tables ------------------------------------------------------------------------------------------------------------
def compute_largest_excess(evidence: PreflightEvidence) -> float:
    """The largest difference of any number of any way but the resumed one, in multiples of its noise (of the least noise, where that is larger)."""
    noise, worst = estimate_rounding_noise(evidence.rounding), 0.0
    for name, distance in evidence.apart.items():
        if name == "resumed":
            continue
        for series, shares in distance.series.items():
            worst = max([worst, *(share / max(usual, 1e-7) for share, usual in zip(shares, noise.series[series]))])
        worst = max([worst, *(s / max(noise.estimate_tensor_noise(n), 1e-7) for n, s in distance.tensors.items())])
    return worst


def format_honest_table(found: Sequence[tuple[Case, PreflightEvidence]]) -> list[str]:
    """A line for each honest code and for the sum: preflights passed of made, by width, and the largest difference in multiples of the noise."""
    lines = [f"{'honest code':<52}" + "".join(f"{f'width {width}':>12}" for width in WIDTHS) + f"{'largest':>10}"]
    passes = lambda evidence: (
        judge_preflight(PreflightPolicy.model_validate({"parts": PARTS}), evidence).outcome == "promote"
    )
    for name in [*(code.name for code in HONEST), ""]:
        mine = [(case, evidence) for case, evidence in found if name in ("", case.code) and case.code in NAMES]
        if mine:
            by_width = [[passes(evidence) for case, evidence in mine if case.width == width] for width in WIDTHS]
            cells = "".join(f"{f'{sum(one)} of {len(one)}':>12}" for one in by_width)
            worst = max(compute_largest_excess(evidence) for _, evidence in mine)
            lines.append(f"{name or 'all':<52}{cells}{worst:>9.1f}×")
    return lines


def format_fault_table(found: Sequence[tuple[Case, PreflightEvidence]]) -> list[str]:
    """A line for each fault and size: preflights that refused it of those made, and what the first of them said."""
    lines = [f"{'fault':<56}{'size':>7}{'noticed':>10}   first number that shows it"]
    for fault in FAULTS:
        policy = PreflightPolicy.model_validate({"parts": [fault.part]})
        for size in fault.sizes or ("",):
            mine = [judge_preflight(policy, one) for case, one in found if (case.code, case.size) == (fault.name, size)]
            refused = [judgement.reasons[0] for judgement in mine if judgement.outcome == "reject"]
            told = (
                f"{refused[0].data.get('what', refused[0].code)} at step {refused[0].data['step']}" if refused else ""
            )
            if mine:
                lines.append(f"{fault.name:<56}{size:>7}{f'{len(refused)} of {len(mine)}':>10}   {told}")
    return lines


def format_refusals(found: Sequence[tuple[Case, PreflightEvidence]]) -> list[str]:
    """The reasons of each honest preflight that did not pass."""
    policy = PreflightPolicy.model_validate({"parts": PARTS})
    judged = [(case, judge_preflight(policy, one)) for case, one in found if case.code in NAMES]
    return [
        f"{case.code}, width {case.width}, seed {case.seed}: {reason}"
        for case, judgement in judged
        if judgement.outcome != "promote"
        for reason in judgement.reasons
    ]


NAMES = {code.name for code in HONEST}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("honest", "faults", "table"))
    parser.add_argument("--results", type=Path, default=Path("workspace/preflights.jsonl"))
    parser.add_argument("--only", default="", help="a part of the names of the codes to run")
    asked = parser.parse_args(arguments)
    asked.results.parent.mkdir(parents=True, exist_ok=True)
    if asked.what != "table":
        batches = list_honest_batches() if asked.what == "honest" else list_fault_batches()
        measure([batch for batch in batches if asked.only in batch.code.name], asked.results)
    found = read_results(asked.results)
    refusals = format_refusals(found)
    print("\n".join([*format_honest_table(found), *refusals, "", *format_fault_table(found)]))
    return 1 if refusals else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
