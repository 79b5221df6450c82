"""Last stage of the patch gate: N real training steps, baseline and candidate in turn, in the sandbox.

Time. A run is timed from outside, whole. What is subtracted is the *baseline's* start-up (total less the span of its own
steps, which approved code recorded), the same for both sides: a candidate gets no credit for a start-up of its own, so it
gains nothing by waiting, working ahead or hiding work before its first step; a slower start-up counts against it.
Order A B B A …, so that a machine that slows down hurts both. Caches: each side has its own, warmed by one untimed run.

Result. Every pair trains on data of its own (a fresh random seed of the data plan), so that no weights can be prepared or
kept from an earlier run. The weights that the candidate's run leaves are its only testimony: they are read as safetensors,
compared with the baseline's after the same steps on the same data, and scored on held-out documents by the judge's own model.
"""

from __future__ import annotations

import json
import secrets
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from factory import sandbox
from factory.errors import InputError
from factory.evals.export_folder import ExportConfig
from factory.evals.policy import EvalPolicy
from factory.evals.reference_model import ReferenceModel
from factory.evals.suite import build_suite
from factory.evals.tasks import ScoredText, bits_per_byte, encode_suite, ratio_bits
from factory.evals.token_bytes import TokenBytes
from factory.gates.patch_policy import TrainingPolicy
from factory.ingest.tokenizer import Tokenizer
from factory.ledger import Ledger, checkpoints, data_plans, segments
from factory.progress import Progress
from factory.sandbox import Limits
from factory.workspace import Workspace
from trainer.export import hf_tensors
from trainer.recipe import Recipe

WARM_STEPS = 2
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Start:
    """Where the comparison begins: the trunk's last checkpoint, with the recipe and data plan that made it."""

    checkpoint: Path
    step: int
    recipe: dict[str, Any]
    plan: dict[str, Any]


def find_start(ledger: Ledger) -> Start | None:
    """None while no trunk segment has finished."""
    row = ledger.one(
        sa.select(checkpoints.c.path, checkpoints.c.step, segments.c.recipe_json, data_plans.c.plan)
        .join(segments, segments.c.id == checkpoints.c.segment)
        .join(data_plans, data_plans.c.id == segments.c.data_plan)
        .where(segments.c.kind == "trunk", segments.c.state == "done")
        .order_by(checkpoints.c.step.desc(), segments.c.id.desc())
        .limit(1)
    )
    return Start(Path(row["path"]), row["step"], row["recipe_json"], row["plan"]) if row else None


@dataclass(frozen=True)
class Side:
    """Baseline or candidate: its code, its recipe, and the folder that only its own runs write to."""

    code: Path
    recipe: dict[str, Any]
    folder: Path


def compare_training(
    policy: TrainingPolicy,
    start: Start,
    baseline: Side,
    candidate: Side,
    workspace: Workspace,
    ledger: Ledger,
    progress: Progress,
) -> dict[str, Any]:
    """The stage's evidence. Raises: IsolationError."""
    texts, eval_policy = _held_out(policy, workspace, ledger)
    if not texts:
        return {"state": "missing", "reasons": ["nothing is held out to score weights on: ingest more documents"]}
    order = [side for pair in range(policy.pairs) for side in ((0, 1) if pair % 2 == 0 else (1, 0))]
    sides = (baseline, candidate)
    seconds: tuple[list[float], list[float]] = ([], [])
    spans: list[float] = []
    drift = change = 0.0
    origin = load_file(start.checkpoint / "model.safetensors")
    with progress.task("training steps, baseline and candidate in turn", 2 + len(order)) as task:
        for side, name in zip(sides, ("baseline", "candidate"), strict=True):
            failed = _run(policy, start, side, WARM_STEPS, secrets.randbelow(1 << 31), "warm")[1]
            if failed:
                return _broken(name, failed)
            task.advance(1, f"{name}: caches warmed")
        for pair in range(policy.pairs):
            seed = secrets.randbelow(1 << 31)
            left: dict[int, Weights] = {}
            for which in order[2 * pair : 2 * pair + 2]:
                name = ("baseline", "candidate")[which]
                took, failed = _run(policy, start, sides[which], policy.steps, seed, "timed")
                if failed:
                    return _broken(name, failed)
                seconds[which].append(took)
                if which == 0:
                    spans.append(_recorded_span(baseline.folder / "timed"))
                weights, problem = _weights(sides[which].folder / "timed", start.step + policy.steps, origin)
                if problem:
                    return _broken(name, problem)
                left[which] = weights
                task.advance(1, f"{name}: {took:.1f} s")
            drift = max(drift, _drift(left[1], left[0], origin))
            scores = [_bits_per_byte(left[which], baseline.recipe, texts, eval_policy) for which in (0, 1)]
            change = max(change, *(scores[1][domain] - scores[0][domain] for domain in scores[0]))
    start_up = sum(total - span for total, span in zip(seconds[0], spans, strict=True)) / len(spans)
    if min(*seconds[0], *seconds[1]) <= start_up:
        shortest = min(*seconds[0], *seconds[1])
        reason = f"{policy.steps} steps drown in the start-up: {start_up:.2f} s on average, one whole run took {shortest:.2f} s"
        return {
            "state": "missing",
            "reasons": [reason + "; raise training.steps"],
            "total_seconds": seconds,
            "drift": drift,
        }
    counted = policy.steps - 1  # the first step belongs to the start-up
    return {
        "state": "passed",
        "reasons": [f"{policy.pairs} pairs of {policy.steps} steps from step {start.step}"],
        "steps": policy.steps,
        "start_up_seconds": start_up,
        "total_seconds": {"baseline": seconds[0], "candidate": seconds[1]},
        "baseline_seconds": [(total - start_up) / counted for total in seconds[0]],
        "candidate_seconds": [(total - start_up) / counted for total in seconds[1]],
        "drift": drift,
        "held_out_change": change,
        "held_out_documents": len(texts),
        "order": "".join("AB"[side] for side in order),
    }


def _run(policy: TrainingPolicy, start: Start, side: Side, steps: int, seed: int, name: str) -> tuple[float, str]:
    """One segment in the sandbox: (seconds, what went wrong)."""
    folder = side.folder / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    plan = start.plan | {"seed": seed, "max_epochs": start.plan["max_epochs"] + 1}
    spec = {
        "kind": "trunk",
        "recipe": side.recipe,
        "data_plan": plan,
        "first_step": start.step,
        "last_step": start.step + steps,
        "initial_checkpoint": str(start.checkpoint),
        "code_commit": "",
        "kernels": None,
    }
    (folder / "segment.json").write_text(json.dumps(spec))
    shards = [Path(shard["path"]) for shard in plan["token_shards"]]
    result = sandbox.run(
        [sys.executable, "-m", "trainer", str(folder)],
        output=side.folder,
        readonly=[side.code, start.checkpoint, *shards],
        cwd=side.code,
        limits=Limits(wall_seconds=policy.wall_seconds),
    )
    return result.seconds, "" if result.ok else result.why()


def _broken(name: str, why: str) -> dict[str, Any]:
    # What breaks the baseline says nothing about the candidate.
    return {
        "state": "failed" if name == "candidate" else "missing",
        "reasons": [f"the {name}'s training run failed: {why}"],
    }


def _recorded_span(folder: Path) -> float:
    """Seconds from the end of the first step to the end of the last, as the baseline (approved code) recorded them."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return float(lines[-1]["time"] - lines[0]["time"])


def _weights(folder: Path, step: int, origin: Weights) -> tuple[Weights, str]:
    """The weights that a run left, or what is wrong with them. The file is nobody's to trust: it may be a link, or huge."""
    path = folder / "checkpoints" / f"step-{step:08d}" / "model.safetensors"
    expected = sum(tensor.numel() * tensor.element_size() for tensor in origin.values())
    if any(part.is_symlink() for part in (path, path.parent, path.parent.parent, folder)) or not path.is_file():
        return {}, f"it left no weights of step {step}"
    if path.stat().st_size > 2 * expected + (1 << 20):
        return {}, f"its weights are {path.stat().st_size} bytes, {expected} are expected"
    try:
        weights = load_file(path)
    except (SafetensorError, OSError) as error:
        return {}, f"its weights cannot be read: {error}"
    for name, tensor in origin.items():
        found = weights.get(name)
        if found is None or found.shape != tensor.shape or found.dtype != tensor.dtype or len(weights) != len(origin):
            return {}, f"its weights are not those of this model ({name})"
        if not bool(found.isfinite().all()):
            return {}, f"its weights are not finite ({name})"
    return weights, ""


def _drift(candidate: Weights, baseline: Weights, origin: Weights) -> float:
    """‖candidate − baseline‖ / ‖baseline − origin‖, the worse of the whole and of its worst tensor halved."""
    worst = 0.0
    apart = moved = 0.0
    for name, tensor in origin.items():
        a = float((candidate[name].double() - baseline[name].double()).square().sum())
        m = float((baseline[name].double() - tensor.double()).square().sum())
        apart, moved = apart + a, moved + m
        if a:
            worst = max(worst, (a / m) ** 0.5 if m else 1e9)
    whole = (apart / moved) ** 0.5 if moved else (1e9 if apart else 0.0)
    return max(whole, worst / 2)


def _bits_per_byte(
    weights: Weights, recipe: dict[str, Any], texts: list[ScoredText], policy: EvalPolicy
) -> dict[str, float]:
    shape = Recipe.parse(recipe).model
    fields = {name: getattr(shape, name) for name in ExportConfig.__dataclass_fields__ if name != "tied_embeddings"}
    model = ReferenceModel(ExportConfig(**fields, tied_embeddings=True), hf_tensors(weights, shape))
    return ratio_bits(bits_per_byte(model, texts, policy, lambda amount: None))


def _held_out(policy: TrainingPolicy, workspace: Workspace, ledger: Ledger) -> tuple[list[ScoredText], EvalPolicy]:
    update = {"documents_per_domain": policy.held_out_documents, "document_bytes": policy.held_out_bytes}
    eval_policy = EvalPolicy.load(workspace.policy("evals.yaml")).model_copy(update=update)
    try:
        tokenizer, token_bytes = Tokenizer.load(workspace.tokenizer), TokenBytes.load(workspace.tokenizer)
    except InputError:
        return [], eval_policy
    suite = build_suite(ledger, eval_policy, tokenizer.sha256)
    return encode_suite(suite, tokenizer, token_bytes, policy.held_out_bytes), eval_policy
