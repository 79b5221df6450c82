"""Two models of one shape on the same tokens: the factory's trainer's, and one that plain PyTorch trains with ``transformers``.

Both see the same batches in the same order, the same rates, AdamW with the same decay, the same clipping, the same precision. Documents of one row
do not see one another in either. One evaluator measures both, on the same held-out documents. What differs is what this repository adds: the
initialisation, z-loss, the kernels, and all that the trainer watches. ``start`` takes the first of these away.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from factory.backups.backups import make_or_open_ledger
from factory.core.progress import Progress
from factory.core.workspace import Workspace, WorkspaceConfig
from factory.corpus import write_corpus
from factory.demo.demo import _write_data_policy
from factory.evals.baselines import measure_baselines
from factory.evals.policy import EvalPolicy
from factory.evals.reference_model import ReferenceModel
from factory.evals.suite import build_suite
from factory.evals.tasks import ScoredText, compute_bits_per_byte_by_domain, encode_documents, score_bits_per_byte
from factory.evals.token_bytes import TokenBytes
from factory.ingest.inbox import ingest_and_move, list_complete_files
from factory.ingest.tokenizer import Tokenizer
from factory.ledger.plant import Plant
from kernels.contract.host_memory import keep_freed_memory
from kernels.contract.precision import allow_bf16_matmul
from kernels.contract.strict_yaml import read_yaml
from trainer.batch import Batch, make_batch
from trainer.contract.checkpoint.export import export_checkpoint, make_hf_config, rename_tensors_for_hf
from trainer.contract.data.data_order import DataOrder
from trainer.contract.data.data_plan import DataPlan
from trainer.contract.data.token_shard import TokenShard
from trainer.contract.errors import RecipeError
from trainer.contract.json_lines import read_json_lines
from trainer.contract.plan.precision import DTYPES, choose_training_device, replace_auto_precision
from trainer.contract.plan.spec import SegmentSpec
from trainer.contract.recipe import Recipe
from trainer.optim.schedule import compute_lr_share
from trainer.parallel.ranks import Ranks
from trainer.run import SegmentRun

ROOT = Path(__file__).parents[2]
SHAPE = {"layers": 4, "head_dim": 64}
ANNEAL = 0.25  # of all steps
POLICY = EvalPolicy(dev_documents_per_domain=60)
WEIGHTS = "model.safetensors"
STDERR = 2  # where progress goes
LEAST_ROUNDS = 5
WARM_UP = 2  # steps of each that are not timed: the first compiles


@dataclass(frozen=True)
class Task:
    """What both models train on and are measured on."""

    recipe: Recipe
    plans: dict[str, DataPlan]  # by kind of segment
    shards: list[TokenShard]
    texts: list[ScoredText]  # of the dev half: only the release gate reads the sealed one
    token_bytes: TokenBytes

    @property
    def segments(self) -> list[tuple[str, int, int]]:
        """(kind, first step, last step) of the trunk and of the anneal off it."""
        trunk = self.recipe.schedule.trunk_steps.first
        return [("trunk", 0, trunk), ("anneal", trunk, trunk + self.recipe.schedule.anneal_steps)]

    def batches(self) -> Iterator[tuple[Batch, float]]:
        """Each step's batch, as the trainer makes it, and its learning rate."""
        state = None
        for kind, first, last in self.segments:
            model, batch = self.recipe.model, self.recipe.batch
            order = DataOrder(
                self.plans[kind], context=model.context, batch=batch, vocab_size=model.vocab_size, state=state
            )
            for step in range(first, last):
                share = compute_lr_share(self.recipe, kind, step, first, last)  # type: ignore[arg-type]
                yield make_batch(order), self.recipe.optimizer.lr * share
            state = order.state_dict()


@dataclass(frozen=True)
class Trained:
    """A model's training, and where its weights lie in Hugging Face's format."""

    export: Path
    tokens: int
    supervised: int  # of them, those that carry loss
    losses: list[float]  # nats a token that carries loss, by step
    seconds: float  # from start to export
    core_seconds: float  # of all its threads


def recipe_of(steps: int, width: int, lr: float, compile: bool = True) -> Recipe:
    """The demo's recipe with a model of this width, in the precision that is fastest here.

    Its rate was found for muP's scaled head and a width of 256. Here it is plain, and chosen for the other side: of 1e-3, 2e-3 and 4e-3 the second
    was the best for transformers (2.536, 2.457 and 2.545 to 2.616 bits per byte at the default size; at 4e-3 rounding alone moves a training by 0.1).
    """
    path = ROOT / "policies" / "recipes" / "demo.yaml"
    raw: Any = read_yaml(path.read_text("utf-8"), str(path), RecipeError)
    heads, anneal = width // SHAPE["head_dim"], max(1, round(ANNEAL * steps))
    sizes = {"d_model": width, "heads": heads, "kv_heads": max(1, heads // 2), "d_ff": 3 * width}
    raw |= {"name": "headline", "compile": compile, "checkpoint_every": steps, "model": raw["model"] | SHAPE | sizes}
    trunk = {"first": steps - anneal, "later": 1}
    warm_up = min(raw["schedule"]["warmup_steps"], steps - anneal)
    raw["schedule"] |= {"trunk_steps": trunk, "anneal_steps": anneal, "warmup_steps": warm_up}
    raw["optimizer"] |= {"lr": lr}
    raw["stability"] = {"noise_scale_every": 0}  # it would split a batch of each 32 steps in two, and compile halves
    return replace_auto_precision(Recipe.parse(raw), choose_training_device())


def ingest_library(root: Path, progress: Progress, share: float = 1.0) -> Plant:
    """A workspace with the standard library's documents in its ledger, as the demo ingests them."""
    workspace = Workspace.create(root, WorkspaceConfig())
    _write_data_policy(workspace)
    plant = Plant(workspace, make_or_open_ledger(workspace), progress)
    write_corpus(workspace.inbox, progress, share)
    for path in list_complete_files(plant, settle_seconds=0.0):
        ingest_and_move(plant, path)
    return plant


def task_of(plant: Plant, recipe: Recipe, seed: int) -> Task:
    """Everything ingested, in the recipe's mixture, and the dev half of what is held out. ``seed``: of the first weights and the order of data."""
    recipe = recipe.model_copy(update={"seed": seed})
    rows = plant.ledger.read("SELECT id, path FROM token_shards WHERE tokens > 0 ORDER BY created_at, id")
    shards = [(row["id"], str(plant.workspace.root / row["path"]), 0) for row in rows]
    plans = {
        kind: DataPlan.make_for_segment(recipe.mixture, kind, shards, recipe.seed).model_copy(  # type: ignore[arg-type]
            update={"targets_in_every_batch": True}
        )
        for kind in ("trunk", "anneal")
    }
    tokenizer, token_bytes = Tokenizer.load(plant.workspace.tokenizer), TokenBytes.load(plant.workspace.tokenizer)
    suite = build_suite(plant.ledger, POLICY, tokenizer.sha256)
    texts = encode_documents(suite.dev, tokenizer, token_bytes, POLICY.document_bytes)
    return Task(recipe, plans, [TokenShard(Path(path)) for _, path, _ in shards], texts, token_bytes)


def train_ours(task: Task, folder: Path, kernels: Path) -> Trained:
    """By ``python -m trainer``, a process a segment, as the factory starts it; without its sandbox.

    Raises: subprocess.CalledProcessError.
    """
    began, before = time.perf_counter(), os.times()
    checkpoint: str | None = None
    results, lines = [], []
    for kind, first, last in task.segments:
        spec = SegmentSpec(
            kind=kind,  # type: ignore[arg-type]
            recipe=task.recipe,
            data_plan=task.plans[kind],
            first_step=first,
            last_step=last,
            initial_checkpoint=checkpoint,
            kernels=str(kernels),
        )
        path = folder / kind
        path.mkdir(parents=True)
        (path / "segment.json").write_text(spec.model_dump_json())
        subprocess.run([sys.executable, "-m", "trainer", str(path)], cwd=ROOT, check=True, stdout=STDERR)
        results.append(json.loads((path / "result.json").read_text()))
        lines += read_json_lines(path / "metrics.jsonl")
        checkpoint = results[-1]["checkpoint"]
    assert checkpoint is not None
    export_checkpoint(Path(checkpoint), folder / "export")
    after = os.times()
    return Trained(
        folder / "export",
        sum(result["tokens"] for result in results),
        sum(result["supervised_tokens"] for result in results),
        [line["loss"] for line in lines],
        time.perf_counter() - began,
        after.children_user + after.children_system - before.children_user - before.children_system,
    )


def our_run(task: Task, kernels: Path, compile: bool) -> SegmentRun:
    """Our trainer before its first step, in this process."""
    recipe = task.recipe.model_copy(update={"compile": compile})
    _, first, last = task.segments[0]
    plan = task.plans["trunk"]
    spec = SegmentSpec(
        kind="trunk", recipe=recipe, data_plan=plan, first_step=first, last_step=last, kernels=str(kernels)
    )
    return SegmentRun(spec, Ranks.join(recipe.parallel, recipe.model), None)


def first_weights(task: Task, kernels: Path) -> dict[str, Tensor]:
    """The weights that our trainer begins with, in transformers' names."""
    state = our_run(task, kernels, compile=False).model.state_dict()
    return {name: tensor.clone() for name, tensor in rename_tensors_for_hf(state, task.recipe.model)}


class Theirs:
    """``transformers``' Qwen3 with its own loss, in a loop of plain PyTorch: fused AdamW, clipping, autocast, and compiled where ours is.

    ``start``: weights to begin with; None: transformers' own initialisation.
    """

    def __init__(self, recipe: Recipe, start: Mapping[str, Tensor] | None = None) -> None:
        keep_freed_memory()  # as our trainer does: without it, a step waits for the kernel's zeroed pages
        torch.manual_seed(recipe.seed)
        self.recipe = recipe
        self.model = Qwen3ForCausalLM(
            Qwen3Config(**make_hf_config(recipe.model, "float32"), attn_implementation="sdpa")
        )
        if start is not None:
            missing = self.model.load_state_dict(dict(start), strict=False).missing_keys
            assert missing == ["lm_head.weight"], missing  # which is the embedding
        decayed = [p for name, p in self.model.named_parameters() if p.ndim >= 2 and "embed" not in name]
        others = [p for name, p in self.model.named_parameters() if p.ndim < 2 or "embed" in name]
        chosen = recipe.optimizer
        groups = [{"params": decayed, "weight_decay": chosen.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW(groups, chosen.lr, (chosen.beta1, chosen.beta2), chosen.eps, fused=True)
        self.run: Any = torch.compile(self.model) if recipe.compile else self.model

    def loss(self, batch: Batch) -> Tensor:
        """The mean over the batch's tokens that carry loss."""
        targets_BT = torch.where(batch.weights_BT > 0, batch.targets_BT, -100)
        with torch.autocast("cpu", torch.bfloat16, enabled=DTYPES[self.recipe.precision] == torch.bfloat16):
            found = self.run(
                input_ids=batch.tokens_BT,
                position_ids=batch.positions_BT,  # they begin again in each document, which hides those before it
                labels=targets_BT,
                shift_labels=targets_BT,
                use_cache=False,
            )
        return found.loss  # type: ignore[no-any-return]

    def step(self, batch: Batch, lr: float) -> float:
        """One update. Returns the loss before it."""
        for group in self.adamw.param_groups:
            group["lr"] = lr
        loss = self.loss(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.stability.grad_clip)
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        return float(loss.detach())

    def save(self, folder: Path) -> None:
        """In the format of our exports."""
        folder.mkdir(parents=True)
        held = {
            name: t.detach().contiguous() for name, t in self.model.state_dict().items() if name != "lm_head.weight"
        }
        save_file(held, folder / WEIGHTS, {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(make_hf_config(self.recipe.model, "float32")))


def train_theirs(task: Task, folder: Path, start: Mapping[str, Tensor] | None = None) -> Trained:
    """All steps of the task."""
    torch._dynamo.reset()  # it compiles a class for eight models at most
    began, before = time.perf_counter(), os.times()
    theirs = Theirs(task.recipe, start)
    tokens = supervised = 0
    losses: list[float] = []
    for batch, lr in task.batches():
        losses.append(theirs.step(batch, lr))
        tokens += batch.used
        supervised += int((batch.weights_BT > 0).sum())
    theirs.save(folder)
    after = os.times()
    core_seconds = after.user + after.system - before.user - before.system
    return Trained(folder, tokens, supervised, losses, time.perf_counter() - began, core_seconds)


def step_seconds(task: Task, kernels: Path, seconds: float) -> tuple[list[float], list[float]]:
    """Of our steps and of transformers', which take turns, so that what disturbs the machine disturbs both: as many as fit into ``seconds``."""
    torch._dynamo.reset()
    run, theirs = our_run(task, kernels, task.recipe.compile), Theirs(task.recipe)
    found: tuple[list[float], list[float]] = ([], [])
    ends = math.inf
    for number, (batch, lr) in enumerate(task.batches()):
        began = time.perf_counter()
        if began > ends and len(found[0]) >= LEAST_ROUNDS:
            break
        with allow_bf16_matmul(DTYPES[task.recipe.precision]):
            run.train_step(batch)
        between = time.perf_counter()
        theirs.step(batch, lr)
        ended = time.perf_counter()
        if number >= WARM_UP:
            found[0].append(between - began)
            found[1].append(ended - between)
        elif number == WARM_UP - 1:
            ends = ended + seconds
    return found


def bits_of(task: Task, export: Path, progress: Progress) -> dict[str, float]:
    """Bits per byte of the held-out documents, by domain, by the release gate's evaluator."""
    with progress.task(f"bits per byte of {export.parent.name}/{export.name}", None) as bar:
        return compute_bits_per_byte_by_domain(
            score_bits_per_byte(ReferenceModel.load(export), task.texts, POLICY, bar.advance)
        )


def trigram(task: Task, progress: Progress) -> dict[str, float]:
    """Bits per byte of the byte trigram, by domain: fitted on the training text of that domain alone, as much as the evaluator gives it."""
    with progress.task("the byte trigram", None) as bar:
        found = measure_baselines(task.shards, task.texts, task.token_bytes, POLICY.baseline_bytes_per_domain, bar)
    return {domain: float(values["trigram"]) for domain, values in found.items()}


def same_tensors(one: Path, other: Path) -> bool:
    """Do two exports hold tensors of the same names and shapes?"""
    shapes = [{name: tuple(t.shape) for name, t in load_file(folder / WEIGHTS).items()} for folder in (one, other)]
    return shapes[0] == shapes[1]


def scored_bytes(task: Task) -> dict[str, int]:
    """By domain, the bytes of the held-out documents that are predicted."""
    found: dict[str, int] = {}
    for text in task.texts:
        found[text.document.domain] = found.get(text.document.domain, 0) + text.bytes
    return found


def pooled(bits: Mapping[str, float], sizes: Mapping[str, int]) -> float:
    """Bits per byte of all domains together: each domain counts by its bytes.

    >>> pooled({"code": 2.0, "chat": 3.0}, {"code": 300, "chat": 100})
    2.25
    """
    return float(np.average([bits[domain] for domain in sizes], weights=[sizes[domain] for domain in sizes]))
