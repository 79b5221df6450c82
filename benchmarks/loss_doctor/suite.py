"""``python -m benchmarks.loss_doctor.suite``: the doctor on injected faults and healthy runs; prints the confusion matrix.

Each fault: a run of 240 steps, a second segment of 40 in which the fault acts, its anomalies, a diagnosis. Each healthy run has 500 steps.
A model of some 50,000 weights, in this process; replays are those of the factory, without its sandbox. Faults whose first segments are
the same share one. It prints a line a run as it goes, and at the end the runs, true causes against named ones, and the aims.

    python -m benchmarks.loss_doctor.suite --results results.jsonl      goes on where it was stopped
    python -m benchmarks.loss_doctor.suite --seeds 3 --only rate --arms      what each replay showed, of faults with 'rate' in their name
    python -m benchmarks.loss_doctor.suite --first-seed 10 --seeds 2         seeds that nothing was chosen by
    python -m benchmarks.loss_doctor.suite --results results.jsonl --json > summary.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from agents.loss_doctor.curves import StepMetrics, read_step_metrics
from agents.loss_doctor.doctor import diagnose_anomaly
from benchmarks.loss_doctor.documents import VOCABULARY, good
from benchmarks.loss_doctor.faults import FAULTS, FIRST, LONG, Fault
from benchmarks.loss_doctor.injecting import CODE, FAULTY, order_of, run_here
from benchmarks.loss_doctor.outcomes import Tried, commit, report, summary
from factory.diagnosis.diagnosing import (
    RECENT_STEPS,
    EpisodeSpan,
    RecordedAnomaly,
    find_changed_recipe_keys,
    find_episodes,
    find_previous_domain_weights,
)
from factory.diagnosis.replay_bench import AnomalyEpisode, EpisodeReplayBench
from factory.gates.patch.matrix.cases import make_case_recipe
from factory.gates.release.anomaly_policy import AnomalyPolicy
from factory.runs.arm import Arm
from factory.runs.live_training import prepare_arm_folder
from factory.runs.sandboxed_training import ArmRunEnd
from trainer.contract.checkpoint import format as checkpoints
from trainer.contract.checkpoint.format import Checkpoint
from trainer.contract.data.data_plan import DataPlan
from trainer.contract.data.token_shard import write_token_shard
from trainer.contract.json_lines import read_json_lines

BUDGET = 2000
MOST_EPISODES = 4  # of a healthy run that are diagnosed
DIAGNOSED = (
    AnomalyPolicy().kinds
)  # by the daemon; of others, which a person may ask about, only where there is nothing else
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
    "checkpoint_every": 5, "keep_checkpoints": 100, "stability.window": 64,
    "stability.z_loss": 1e-5, "stability.grad_clip": 1.0, "optimizer.lr": 1e-2, "optimizer.weight_decay": 0.1,
    "model.vocab_size": VOCABULARY, "model.d_model": 32, "model.heads": 4, "model.kv_heads": 2, "model.d_ff": 64,
    "model.context": 64, "batch.sequences": 8, "mixture.weights": {"*": 1.0}, "schedule.anneal_steps": LONG - FIRST,
}  # fmt: skip


@dataclass(frozen=True)
class Trunk:
    """A first segment that ended: what it was planned with."""

    folder: Path
    spec: dict[str, Any]
    chosen: dict[str, str]  # op → implementation
    planned: dict[str, Any]  # of its data plan, but for the shards
    recipe: dict[str, Any]  # keys with dots


def trunk_of(fault: Fault, seed: int, root: Path) -> Trunk:
    """The first segment of a fault's run, which has no fault yet: faults that differ in nothing before it share one, in ``root``."""
    chosen = dict.fromkeys(OPS, "reference")
    if fault.causes == (("faulty kernel",),):
        chosen["adamw"] = "fused"
    phases = [{"from_step": step, "weights": dict(weights)} for step, weights in fault.phases]
    planned: dict[str, Any] = {"weights": dict(fault.weights), "phases": phases, "max_epochs": 100, "seed": seed}
    same = RECIPE | {"seed": seed + 1} | dict(fault.recipe)
    parts = [seed, chosen, planned, same, fault.base.__name__ if fault.base else ""]
    folder = root / hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12] / "00001-trunk"
    if (folder / "result.json").exists():
        return Trunk(folder, json.loads((folder / "segment.json").read_text()), chosen, planned, same)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    documents = good(rng, 1200) if fault.base is None else fault.base(rng)
    shard = write_token_shard(folder.parent / "shard", documents, vocab_size=VOCABULARY, tokenizer_sha256="")
    shards = [{"id": shard.id, "path": str(shard.path), "generation": 0}]
    kernels = folder.parent / "kernels.yaml"
    kernels.write_text(yaml.safe_dump({"cpu": chosen}))
    spec: dict[str, Any] = {
        "kind": "trunk", "recipe": make_case_recipe(same), "data_plan": {"token_shards": shards} | planned, "first_step": 0, "last_step": FIRST,
        "initial_checkpoint": None, "code_commit": "0" * 40, "kernels": str(kernels),
    }  # fmt: skip
    sound = Fault(fault.name, fault.causes)
    assert not (why := run_here(sound, seed, folder, spec, CODE, live=True)), why
    return Trunk(folder, spec, chosen, planned, same)


def try_fault(fault: Fault, seed: int, root: Path, trunks: Path) -> Tried:
    """Train with the fault, and have the first episode of its anomalies diagnosed; of a healthy run every episode, until one is an alarm."""
    with order_of(fault):
        return _try_fault(fault, seed, root, trunk_of(fault, seed, trunks))


def _try_fault(fault: Fault, seed: int, root: Path, trunk: Trunk) -> Tried:
    rng = np.random.default_rng([seed, 1])
    folders, spec = (trunk.folder, root / "00002"), trunk.spec
    folders[1].mkdir()
    shards, plan = list(spec["data_plan"]["token_shards"]), DataPlan.from_json(spec["data_plan"])
    start = folders[0] / "checkpoints" / checkpoints.format_checkpoint_name(FIRST)
    if fault.joins is not None:
        joined = write_token_shard(root / "joined", fault.joins(rng), vocab_size=VOCABULARY, tokenizer_sha256="")
        shards.append({"id": joined.id, "path": str(joined.path), "generation": 1})
        plan = DataPlan.from_json({"token_shards": shards, "replay": fault.replay} | trunk.planned)
    second = spec | {
        "kind": fault.kind, "recipe": make_case_recipe(trunk.recipe | dict(fault.later)),
        "first_step": FIRST, "last_step": fault.until, "data_plan": json.loads(plan.to_json()), "initial_checkpoint": str(start),
    }  # fmt: skip
    # The run was stopped in the middle of its segment, and went on from what was left of it.
    if fault.checkpoint is not None:
        half = second | {"last_step": FIRST + 10}
        assert not (why := run_here(fault, seed, folders[1], half, CODE, live=True)), why
        (folders[1] / "result.json").unlink()
        path = folders[1] / "checkpoints" / checkpoints.format_checkpoint_name(FIRST + 10)
        held = checkpoints.load_checkpoint(path)
        fault.checkpoint(held.model | held.optimizer, rng)
        checkpoints.save_checkpoint(path.parent, Checkpoint(held.model, held.optimizer, held.state))
    code = FAULTY if fault.causes == (("code change",),) else CODE
    if why := run_here(fault, seed, folders[1], second, code, live=True):
        raise RuntimeError(f"{fault.name}: {why}")
    return diagnose_run(Ran(fault, seed, folders, (spec, second), trunk.chosen, code), root)


@dataclass(frozen=True)
class Ran:
    """Two segments that trained with a fault, the second of which it acts in."""

    fault: Fault
    seed: int
    folders: tuple[Path, Path]
    specs: tuple[dict[str, Any], dict[str, Any]]
    chosen: dict[str, str]  # op → implementation
    code: Path

    def lines_of(self, name: str) -> list[dict[str, Any]]:
        return [line for folder in self.folders for line in read_json_lines(folder / name)]


def diagnose_run(ran: Ran, root: Path) -> Tried:
    """The first episode of a fault's anomalies is diagnosed; of a healthy run every one, until one is an alarm."""
    begins = 0 if ran.fault.healthy else FIRST
    lines = read_step_metrics(ran.lines_of("metrics.jsonl"))
    noted = [line for line in ran.lines_of("anomalies.jsonl") if line["step"] >= begins]
    found = find_episodes(
        [RecordedAnomaly.from_detail(n, line["step"], line["kind"], line) for n, line in enumerate(noted)],
        lines,
        begins,
    )
    chosen = [span for span in found if span.kind in DIAGNOSED]
    if not ran.fault.healthy:
        chosen = (chosen or found)[:1]
    tried = Tried(ran.fault.name, ran.seed, commit=commit())
    for number, span in enumerate(chosen[:MOST_EPISODES]):
        documents = {key for line in noted if span.onset <= line["step"] <= span.last for key in line["documents"]}
        bad = tuple(sorted(key for key in documents if key.startswith("bad-")))
        tried = replace(diagnose_span(ran, root / f"diagnosis-{number}", lines, span), bad=bad, episodes=len(chosen))
        if not tried.right:
            break
    return tried


def diagnose_span(ran: Ran, root: Path, lines: list[StepMetrics], span: EpisodeSpan) -> Tried:
    """One diagnosis, as the factory makes it."""
    fault, (before, spec) = ran.fault, ran.specs
    every = dict(rung for folder in ran.folders for rung in checkpoints.list_checkpoints(folder / "checkpoints"))
    rungs = [(step, path) for step, path in every.items() if step <= span.onset]
    recent = span.onset <= FIRST + RECENT_STEPS
    episode = AnomalyEpisode(
        kind=span.kind, onset=span.onset, last=span.last, spec=spec, kernels=ran.chosen, device="cpu", lines=lines, rungs=rungs, code=ran.code,
        previous_code=CODE if ran.code == FAULTY else None, previous_commit="1" * 40,
        generation_begins=FIRST if fault.joins is not None and recent else None,
        where=span.where,
        previous_weights=find_previous_domain_weights(spec["data_plan"], before["data_plan"] if recent else None, span.onset, span.last),
        changed_recipe_keys=find_changed_recipe_keys(spec["recipe"], before["recipe"]) if recent else {},
        end=every[max(every)] if max(every) > span.last else None, environment_changed="torch 1 → 2" if fault.dependency else "",
    )  # fmt: skip

    def run(arm: Arm) -> ArmRunEnd:
        folder = root / "runs" / arm.key
        spec = prepare_arm_folder(root / "runs", folder, arm)
        code = episode.choose_code_folder(arm)
        return ArmRunEnd(
            folder, failed=run_here(fault, ran.seed, folder, spec, code, live=False, changed=not arm.environment)
        )

    began = time.perf_counter()
    (root / "runs").mkdir(parents=True)
    diagnosis = diagnose_anomaly(
        EpisodeReplayBench(episode, root, run, BUDGET, "python" if fault.dependency == "at hand" else "")
    )
    return Tried(
        fault=fault.name,
        seed=ran.seed,
        causes=diagnosis.causes,
        kind=f"{span.kind} {span.where}".strip(),
        steps=diagnosis.steps,
        window_steps=episode.end_step - episode.newest_checkpoint[0],
        guilty=diagnosis.guilty,
        seconds=time.perf_counter() - began,
        why=diagnosis.why,
        arms=tuple((o.arm, o.fires, o.failed) for o in diagnosis.outcomes),
        commit=commit(),
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds each fault is tried with (1)")
    parser.add_argument("--first-seed", type=int, default=0, help="the first of them (0)")
    parser.add_argument("--only", default="", help="faults whose name holds one of these, with commas between")
    parser.add_argument("--arms", action="store_true", help="show every arm")
    parser.add_argument(
        "--results", type=Path, help="a file that each run adds a line to; what is in it is not run again"
    )
    parser.add_argument(
        "--trunks",
        type=Path,
        help="a folder for first segments; what is in it, made by the same code, is not trained again",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    commit()
    held = (
        [Tried.of_json(line) for line in read_json_lines(asked.results)]
        if asked.results and asked.results.exists()
        else []
    )
    known = {(tried.fault, tried.seed): tried for tried in held}
    every: list[Tried] = []
    chosen = [fault for fault in FAULTS if any(part in fault.name for part in asked.only.split(","))]
    trunks = asked.trunks or Path(tempfile.mkdtemp(prefix="loss-doctor-trunks-"))
    for seed in range(asked.first_seed, asked.first_seed + asked.seeds):
        for fault in chosen:
            if (fault.name, seed) not in known:
                root = Path(tempfile.mkdtemp(prefix="loss-doctor-"))
                try:
                    known[fault.name, seed] = try_fault(fault, seed, root, trunks)
                finally:
                    shutil.rmtree(root)
                tried = known[fault.name, seed]
                line = f"{len(every) + 1} of {len(chosen) * asked.seeds}: {fault.name}, seed {seed}: {tried.named}"
                print(line + ("" if tried.right else " (WRONG)"), file=sys.stderr, flush=True)
                if asked.results:
                    asked.results.parent.mkdir(parents=True, exist_ok=True)
                    with open(asked.results, "a") as file:
                        file.write(json.dumps(asdict(known[fault.name, seed])) + "\n")
            every.append(known[fault.name, seed])
    if not asked.trunks:
        shutil.rmtree(trunks)
    if asked.json:
        print(json.dumps({"runs": [asdict(tried) for tried in every], "summary": summary(every)}))
    else:
        print("\n".join(report(every, asked.arms)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
