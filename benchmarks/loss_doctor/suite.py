"""``python -m benchmarks.loss_doctor.suite``: the doctor on injected faults and healthy runs; prints the confusion matrix.

Each fault: a run of 80 steps, a second segment of 40 in which the fault acts, its anomalies, a diagnosis. A model of some 50,000
weights, in this process; replays are those of the factory, without its sandbox.

    python -m benchmarks.loss_doctor.suite
    python -m benchmarks.loss_doctor.suite --seeds 3 --only rate --arms
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from agents.loss_doctor.curves import points
from agents.loss_doctor.doctor import Diagnosis, diagnose
from benchmarks.loss_doctor.faults import FAULTS, FIRST, LAST, VOCABULARY, Doing, Fault, good
from factory.audit.replaying import WindowReplay
from factory.diagnosis.bench import Episode, WindowBench
from factory.diagnosis.episodes import spans
from factory.gates.patch.matrix.cases import recipe_with
from trainer.__main__ import main as train
from trainer.batch import Batch
from trainer.contract.checkpoint import format as checkpoints
from trainer.contract.checkpoint.format import Checkpoint
from trainer.contract.data.data_plan import DataPlan
from trainer.contract.data.token_shard import write_token_shard
from trainer.contract.json_lines import read_lines
from trainer.optim.optimizer import Optimizer
from trainer.run import Run

BUDGET = 2000
CODE, FAULTY = Path("good code"), Path("faulty code")
OPS = (
    "rms_norm",
    "add_rms_norm",
    "qk_norm_rope",
    "swiglu",
    "attention",
    "linear_cross_entropy",
    "embedding",
    "newton_schulz",
    "adamw",
)
RECIPE: dict[str, Any] = {
    "checkpoint_every": 5, "keep_checkpoints": 100, "stability.window": 16, "stability.spike_deviations": 8.0,
    "stability.z_loss": 1e-5, "stability.grad_clip": 1.0, "optimizer.lr": 1e-2, "optimizer.weight_decay": 0.1,
    "model.vocab_size": VOCABULARY, "model.d_model": 32, "model.heads": 4, "model.kv_heads": 2, "model.d_ff": 64,
    "model.context": 64, "batch.sequences": 8, "mixture.weights": {"*": 1.0}, "schedule.anneal_steps": LAST - FIRST,
}  # fmt: skip


@dataclass(frozen=True)
class Tried:
    """How the doctor did on one fault."""

    fault: Fault
    seed: int
    diagnosis: Diagnosis | None  # None: there was no anomaly
    kind: str = ""
    window_steps: int = 0
    bad: frozenset[str] = frozenset()  # documents in the window that are bad
    seconds: float = 0.0

    @property
    def named(self) -> str:
        return " | ".join(self.diagnosis.causes) if self.diagnosis else "no anomaly"

    @property
    def right(self) -> bool:
        if self.fault.healthy:
            return self.diagnosis is None
        return self.diagnosis is not None and self.diagnosis.causes in self.fault.causes

    @property
    def wrongly_quarantined(self) -> set[str]:
        return {key for key in self.diagnosis.guilty if not key.startswith("bad-")} if self.diagnosis else set()


@contextlib.contextmanager
def injected(fault: Fault, live: bool, code: Path, spec: Mapping[str, Any], seed: int) -> Iterator[None]:
    """While the block trains, what computes is as the fault says."""
    if fault.injects is None or fault.act is None:
        yield
        return
    injects, act = fault.injects, fault.act
    kernels = yaml.safe_load(Path(spec["kernels"]).read_text())["cpu"]
    reference = set(kernels.values()) == {"reference"}
    step_of, gradients_of = Run.train_step, Optimizer.gradients
    now = {"step": -1}

    def train_step(run: Run, batch: Batch) -> dict[str, Any]:
        now["step"] = batch.step
        return step_of(run, batch)

    def gradients(optimizer: Optimizer) -> dict[str, torch.Tensor]:
        found = gradients_of(optimizer)
        if injects(Doing(live, now["step"], reference, spec["recipe"]["precision"], code == FAULTY)):
            act(found, np.random.default_rng(seed))
        return found

    Run.train_step, Optimizer.gradients = train_step, gradients  # type: ignore[method-assign]
    try:
        yield
    finally:
        Run.train_step, Optimizer.gradients = step_of, gradients_of  # type: ignore[method-assign]


def run_here(fault: Fault, seed: int, folder: Path, spec: Mapping[str, Any], code: Path, live: bool) -> str:
    """Train in this process; returns why it failed, or ''."""
    (folder / "segment.json").write_text(json.dumps(dict(spec)))
    said = io.StringIO()
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(said),
        torch.random.fork_rng(devices=[]),
        injected(fault, live, code, spec, seed),
    ):
        exit_code = train([str(folder)])
    return said.getvalue().strip() if exit_code else ""


def try_fault(fault: Fault, seed: int, root: Path) -> Tried:
    """Train with the fault, and have the first episode of its anomalies diagnosed."""
    rng = np.random.default_rng(seed)
    first = write_token_shard(root / "first", good(rng, 1200), vocab_size=VOCABULARY, tokenizer_sha256="")
    shards = [{"id": first.id, "path": str(first.path), "generation": 0}]
    plan = DataPlan.from_json({"token_shards": shards, "weights": {"*": 1.0}, "max_epochs": 100, "seed": seed})
    chosen = dict.fromkeys(OPS, "reference")
    if fault.causes == (("faulty kernel",),):
        chosen["adamw"] = "fused"
    kernels = root / "kernels.yaml"
    kernels.write_text(yaml.safe_dump({"cpu": chosen}))
    recipe = recipe_with(RECIPE | {"seed": seed + 1} | dict(fault.recipe))
    spec: dict[str, Any] = {
        "kind": "trunk", "recipe": recipe, "data_plan": json.loads(plan.to_json()), "first_step": 0, "last_step": FIRST,
        "initial_checkpoint": None, "code_commit": "0" * 40, "kernels": str(kernels),
    }  # fmt: skip
    folders = [root / "00001-trunk", root / "00002"]
    for folder in folders:
        folder.mkdir()
    assert not (why := run_here(fault, seed, folders[0], spec, CODE, live=True)), why
    start = folders[0] / "checkpoints" / checkpoints.name_of(FIRST)
    if fault.joins is not None:
        joined = write_token_shard(root / "joined", fault.joins(rng), vocab_size=VOCABULARY, tokenizer_sha256="")
        plan = DataPlan.from_json(
            json.loads(plan.to_json())
            | {"token_shards": [*shards, {"id": joined.id, "path": str(joined.path), "generation": 1}], "replay": 0.5}
        )
    second = spec | {
        "kind": fault.kind, "recipe": recipe_with(RECIPE | {"seed": seed + 1} | dict(fault.recipe) | dict(fault.later)),
        "first_step": FIRST, "last_step": LAST, "data_plan": json.loads(plan.to_json()), "initial_checkpoint": str(start),
    }  # fmt: skip
    # The run was stopped in the middle of its segment, and went on from what was left of it.
    if fault.checkpoint is not None:
        half = second | {"last_step": FIRST + 10}
        assert not (why := run_here(fault, seed, folders[1], half, CODE, live=True)), why
        (folders[1] / "result.json").unlink()
        path = folders[1] / "checkpoints" / checkpoints.name_of(FIRST + 10)
        held = checkpoints.load(path)
        fault.checkpoint(held.model | held.optimizer, rng)
        checkpoints.save(path.parent, Checkpoint(held.model, held.optimizer, held.state))
    code = FAULTY if fault.causes == (("code change",),) else CODE
    if why := run_here(fault, seed, folders[1], second, code, live=True):
        raise RuntimeError(f"{fault.name}: {why}")
    return diagnose_run(fault, seed, root, folders, second, chosen, code)


def diagnose_run(
    fault: Fault, seed: int, root: Path, folders: list[Path], spec: dict[str, Any], chosen: dict[str, str], code: Path
) -> Tried:
    lines = points([line for folder in folders for line in read_lines(folder / "metrics.jsonl")])
    noted = [
        line
        for folder in folders
        for line in read_lines(folder / "anomalies.jsonl")
        if line["kind"] != "throughput_drop" and (line["step"] >= FIRST or fault.healthy)
    ]
    found = spans([(n, line["step"], line["kind"]) for n, line in enumerate(noted)], lines)
    if not found:
        return Tried(fault, seed, None)
    span = found[0]
    rungs = [
        rung for folder in folders for rung in checkpoints.steps_in(folder / "checkpoints") if rung[0] <= span.onset
    ]
    rungs = list(dict(rungs).items())
    previous = CODE if code == FAULTY else None
    begins = FIRST if fault.joins is not None and FIRST <= span.onset <= FIRST + 2 else None
    episode = Episode(span.kind, span.onset, span.last, spec, chosen, "cpu", lines, rungs, code, previous, begins)

    def runner(
        output: Path, segment: Path, spec: Mapping[str, Any], code: Path, start: Path, until: int
    ) -> WindowReplay:
        shortened = {**spec, "last_step": until} if spec["kind"] == "trunk" else spec
        return WindowReplay(0.0, run_here(fault, seed, segment, shortened, code, live=False))

    began = time.perf_counter()
    diagnosis = diagnose(WindowBench(episode, root / "diagnosis", runner, BUDGET))
    documents = {key for line in noted if span.onset <= line["step"] <= span.last for key in line["documents"]}
    bad = frozenset(key for key in documents if key.startswith("bad-"))
    steps = episode.until - episode.newest[0]
    return Tried(fault, seed, diagnosis, span.kind, steps, bad, time.perf_counter() - began)


def report(every: list[Tried], arms: bool) -> list[str]:
    """The table of runs, the confusion matrix, and the aims."""
    lines = [
        f"{'fault':<32}{'seed':>4}  {'anomaly':<16}{'named':<38}{'right':<7}{'steps':>6}{'× window':>9}{'s':>7}  documents"
    ]
    for tried in every:
        found = tried.diagnosis
        steps = found.steps if found else 0
        cost = f"{steps / tried.window_steps:.1f}" if found else ""
        exact = ""
        if found and (found.guilty or tried.bad):
            exact = f"{len(set(found.guilty) & tried.bad)} of {len(tried.bad)} bad named, {len(tried.wrongly_quarantined)} wrong"
        right = "yes" if tried.right else "NO"
        lines.append(
            f"{tried.fault.name:<32}{tried.seed:>4}  {tried.kind:<16}{tried.named:<38}{right:<7}{steps:>6}{cost:>9}"
            f"{tried.seconds:>7.1f}  {exact}"
        )
        if arms and found:
            lines += [
                f"      {o.arm:<40}{ {True: 'there', False: 'gone', None: 'unclear'}[o.fires] } {o.failed}"
                for o in found.outcomes
            ]
            lines.append(f"      {found.why}")
    confusion = Counter((" / ".join(" | ".join(c) for c in t.fault.causes) or "healthy", t.named) for t in every)
    lines += ["", "confusion matrix: true cause → named, how often"]
    lines += [f"  {true:<50} → {named:<42} {count}" for (true, named), count in sorted(confusion.items())]
    faulty = [t for t in every if not t.fault.healthy]
    healthy = [t for t in every if t.fault.healthy]
    abstained = sum(t.diagnosis is not None and t.diagnosis.causes == ("unknown",) for t in faulty)
    costs = sorted(t.diagnosis.steps / t.window_steps for t in faulty if t.diagnosis)
    lines += [
        "",
        f"right cause: {sum(t.right for t in faulty)} of {len(faulty)}; abstained: {abstained}; "
        f"not noticed: {sum(t.diagnosis is None for t in faulty)}",
        f"documents wrongly quarantined: {sum(len(t.wrongly_quarantined) for t in every)}; "
        f"healthy runs with an alarm: {sum(not t.right for t in healthy)} of {len(healthy)}",
        f"median cost: {costs[len(costs) // 2]:.1f} × the window's own steps" if costs else "no diagnosis",
    ]
    return lines


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", default="", help="faults whose name holds this")
    parser.add_argument("--arms", action="store_true", help="show every arm")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    every = []
    for fault in (fault for fault in FAULTS if asked.only in fault.name):
        for seed in range(asked.seeds):
            root = Path(tempfile.mkdtemp(prefix="loss-doctor-"))
            try:
                every.append(try_fault(fault, seed, root))
                print(f"{fault.name}, seed {seed}: {every[-1].named}", file=sys.stderr, flush=True)
            finally:
                shutil.rmtree(root)
    print("\n".join(report(every, asked.arms)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
