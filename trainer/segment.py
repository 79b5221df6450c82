"""One segment: from a checkpoint (or nothing) to the checkpoint at ``last_step``, leaving files in its folder.

    metrics.jsonl  anomalies.jsonl  checkpoints/step-…/  result.json

Started again on the same folder it goes on from its newest good checkpoint, to the bit on CPU; finished, it says so.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.registry import bind, load_choice
from trainer import checkpoint as checkpoints
from trainer.batch import Batch, prefetch
from trainer.checkpoint import Checkpoint, Skipped
from trainer.data_order import DataOrder, document_keys
from trainer.errors import CheckpointError, SpecError
from trainer.feasible import refuse_impossible
from trainer.metrics import Lines, matmul_rate, read_lines
from trainer.model import Decoder
from trainer.optimizer import Optimizer, grad_norm
from trainer.parallel import Ranks
from trainer.schedule import lr_share
from trainer.spec import SegmentSpec
from trainer.stability import Detector, clip_and_skip

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LAST_STEPS = 20  # steps that the result's loss is the mean of


class Stopped(Exception):
    """Asked to stop (SIGTERM); a checkpoint of the last whole step is on disk."""


class Run:
    """The state of a segment between two steps, and the step."""

    def __init__(self, spec: SegmentSpec, ranks: Ranks, start: Checkpoint | None) -> None:
        self.spec, self.ranks = spec, ranks
        recipe = self.recipe = spec.recipe
        dtype = DTYPES[recipe.precision]
        ops = bind(load_choice(spec.kernels_path, ranks.device.type), ranks.device, dtype)
        self.model = Decoder(recipe.model, ops, dtype).to(ranks.device)
        self.optimizer = Optimizer(self.model, recipe.optimizer)
        self.detector = Detector(recipe.stability)
        self.counters = {"tokens": 0, "supervised_tokens": 0, "documents": 0, "seconds": 0.0}
        self.at_start = dict(self.counters)
        self.skipped: list[Skipped] = []  # checkpoints of this segment that were not fit to go on from
        torch.manual_seed(recipe.seed)
        if start is None:
            self.model.initialise(recipe.seed)
        else:
            self._restore(start)
        anew = spec.restart_data and (start is None or start.step == spec.first_step)
        self.order = DataOrder(
            spec.data_plan,
            context=recipe.model.context,
            batch=recipe.batch,
            vocab_size=recipe.model.vocab_size,
            state=start.state["sampler"] if start and not anew else None,
        )
        if anew:
            self.order.step = spec.first_step
        self.step = self.order.step
        self.sampler = self.order.state_dict()
        if recipe.compile:
            self.model.compile()

    def train_step(self, batch: Batch) -> dict[str, Any]:
        """One update. Returns the record of the step."""
        recipe, spec = self.recipe, self.spec
        lr = recipe.optimizer.lr * lr_share(recipe.schedule, spec.kind, batch.step, spec.first_step, spec.last_step)
        sums = self._backward(batch)
        gradients = self.optimizer.gradients()
        self.ranks.sum_([*gradients, sums])
        norm = grad_norm(gradients)
        divide_by, skip = clip_and_skip(sums[0], norm, recipe.stability.grad_clip, self.detector.grad_norm_limit())
        self.optimizer.step(lr, divide_by, skip)
        self.optimizer.zero_grad()
        total, whole_norm, skipped, *by_domain = torch.cat((sums[:1], norm[None], skip[None], sums[1:])).tolist()
        names = self.order.domains
        nll, count = by_domain[: len(names)], by_domain[len(names) :]
        loss = sum(nll) / max(1.0, sum(count))
        self.counters["tokens"] += batch.used
        self.counters["supervised_tokens"] += batch.supervised
        self.counters["documents"] = batch.state_after["documents_begun"]
        self.step, self.sampler = batch.step + 1, batch.state_after
        return {
            "step": batch.step,
            "kind": spec.kind,
            "tokens": self.counters["tokens"],
            "supervised_tokens": self.counters["supervised_tokens"],
            "loss": loss,
            "z_loss": total - loss,
            **{f"loss/{name}": n / c for name, n, c in zip(names, nll, count) if c},
            "grad_norm": whole_norm,
            "lr": lr,
            "skipped": bool(skipped),
        }

    def _backward(self, batch: Batch) -> Tensor:
        """Gradients of this rank's rows. Returns [loss, nll by domain…, supervised tokens by domain…], fp32."""
        domains = len(self.order.domains)
        sums = torch.zeros(1 + 2 * domains, device=self.ranks.device)
        for part in batch.split(self.recipe.batch.micro_sequences):
            domains_BT = part.pop("domains_BT")
            loss, nll_BT = self.model.loss(**part, z_loss=self.recipe.stability.z_loss)
            loss.backward()  # type: ignore[no-untyped-call]
            carries_BT = part["weights_BT"] > 0
            at = domains_BT[carries_BT]
            sums[0] += loss.detach()
            sums[1 : 1 + domains].index_add_(0, at, nll_BT[carries_BT])
            sums[1 + domains :].index_add_(0, at, torch.ones_like(nll_BT[carries_BT]))
        return sums

    def checkpoint(self) -> Checkpoint:
        """A copy of everything, that later steps do not touch."""
        optimizer = checkpoints.snapshot(self.optimizer.state_tensors()) | {"rng": torch.get_rng_state()}
        state = {
            "step": self.step,
            "kind": self.spec.kind,
            "recipe": self.recipe.model_dump(),
            "data_plan": self.spec.data_plan.id,
            "code_commit": self.spec.code_commit,
            "first_step": self.spec.first_step,
            "sampler": self.sampler,
            "detector": self.detector.state_dict(),
            "counters": dict(self.counters),
            "at_start": self.at_start,
            "skipped": [asdict(bad) for bad in self.skipped],
        }
        return Checkpoint(checkpoints.snapshot(dict(self.model.named_parameters())), optimizer, state)

    def _restore(self, start: Checkpoint) -> None:
        """Raises: CheckpointError naming the first parameter that doesn't fit."""
        wanted = {name: tuple(p.shape) for name, p in self.model.named_parameters()}
        held = {name: tuple(tensor.shape) for name, tensor in start.model.items()}
        if wanted != held:
            name = sorted(set(wanted.items()) ^ set(held.items()))[0][0]
            raise CheckpointError(
                f"recipe.model does not fit the checkpoint: {name} is {list(wanted.get(name, ()))} in the recipe, "
                f"{list(held.get(name, ()))} in the checkpoint"
            )
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(start.model[name])
        tensors = dict(start.optimizer)
        torch.set_rng_state(tensors.pop("rng"))
        self.optimizer.load_state_tensors(tensors)
        self.detector.load_state_dict(start.state["detector"])
        self.counters = dict(start.state["counters"])
        same_segment = (start.state["kind"], start.state["first_step"]) == (self.spec.kind, self.spec.first_step)
        if same_segment and start.step > self.spec.first_step:
            self.at_start = start.state["at_start"]
            self.skipped = [Skipped(**bad) for bad in start.state["skipped"]]
        else:
            self.at_start = dict(self.counters)


def run_segment(folder: Path) -> None:
    """Raises: TrainerError, KernelError, OSError; Stopped after SIGTERM."""
    spec = SegmentSpec.load(folder)
    if (folder / "result.json").exists():
        return
    stop = _on_sigterm()
    ranks = Ranks.join()
    try:
        spec.recipe.batch.check_ranks(ranks.size)
        start, skipped = find_start(folder, spec, ranks)
        run = Run(spec, ranks, start)
        run.skipped += skipped
        refuse_impossible(run.order, spec.recipe, spec.first_step, spec.last_step)
        train(folder, run, stop)
    finally:
        ranks.leave()


def find_start(folder: Path, spec: SegmentSpec, ranks: Ranks) -> tuple[Checkpoint | None, list[Skipped]]:
    """The checkpoint to go on from: this segment's newest good one, else the initial one, else none."""
    skipped: list[Skipped] = []
    if ranks.leads:
        own, skipped = checkpoints.newest_good(folder / "checkpoints")
        for bad in skipped:
            print(f"checkpoint skipped: {bad.reason}", file=sys.stderr, flush=True)
    ranks.wait()
    if not ranks.leads:
        own, _ = checkpoints.newest_good(folder / "checkpoints")
    if own is not None:
        return own, skipped
    if spec.initial_checkpoint is None:
        return None, skipped
    initial = checkpoints.load(Path(spec.initial_checkpoint))
    if initial.step != spec.first_step:
        raise SpecError(f"first_step is {spec.first_step}, initial_checkpoint was made after step {initial.step}")
    return initial, skipped


def train(folder: Path, run: Run, stop: list[int]) -> None:
    """The loop, and the files it leaves."""
    recipe, spec, ranks = run.recipe, run.spec, run.ranks
    writer = checkpoints.Writer(folder / "checkpoints", recipe.keep_checkpoints)
    metrics, anomalies = (
        Lines(folder / name if ranks.leads else None, run.step) for name in ("metrics.jsonl", "anomalies.jsonl")
    )
    flops_per_token = recipe.model.flops_per_token()
    peak = matmul_rate(ranks.device, DTYPES[recipe.precision]) * ranks.size
    began, last = time.perf_counter() - run.counters["seconds"], time.perf_counter()
    try:
        batches = prefetch(run.order, spec.last_step, ranks.rank, ranks.size)
        for batch in batches:
            waited = time.perf_counter() - last
            record = run.train_step(batch.to(ranks.device))
            now = time.perf_counter()
            rate, last = len(batch.rows) * recipe.model.context / (now - last), now
            run.counters["seconds"] = now - began
            record |= {"tokens_per_s": rate, "mfu": rate * flops_per_token / peak, "data_wait_s": waited}
            metrics.write(record | {"time": time.time()})
            for anomaly in run.detector.observe(batch.step, record["loss"], record["grad_norm"], record["skipped"]):
                anomalies.write(asdict(anomaly) | {"documents": document_keys(run.order, batch.rows)})
                anomalies.flush()
            asked = torch.tensor(float(len(stop)), device=ranks.device)
            ranks.sum_([asked])
            ended = run.step == spec.last_step
            if ranks.leads and (ended or asked or run.step % recipe.checkpoint_every == 0):
                metrics.flush()
                writer.submit(run.checkpoint())
            writer.poll()
            if asked and not ended:
                writer.wait()
                raise Stopped(f"stopped after step {run.step}, as asked")
        batches.close()
        writer.wait()
        metrics.flush()
        assert run.step == spec.last_step
        if ranks.leads:
            write_result(folder, run)
    finally:
        writer.close()
        metrics.close()
        anomalies.close()


def write_result(folder: Path, run: Run) -> None:
    """result.json, atomically: its presence says that the segment is done."""
    path = folder / "checkpoints" / checkpoints.name_of(run.spec.last_step)
    every = read_lines(folder / "metrics.jsonl")
    lines = every[-LAST_STEPS:]
    mean = lambda key: mean_of([line[key] for line in lines if line.get(key) is not None])
    spent = {key: run.counters[key] - run.at_start[key] for key in run.counters}
    shares = run.order.shares()
    result = {
        "state": "done",
        "last_step": run.spec.last_step,
        "checkpoint": str(path),
        "manifest_sha256": checkpoints.manifest_sha256(path),
        "tokens": spent["tokens"],
        "supervised_tokens": spent["supervised_tokens"],
        "first_loss": every[0]["loss"],
        "loss": mean("loss"),
        "loss_by_domain": {n: mean(f"loss/{n}") for n in run.order.domains if mean(f"loss/{n}") is not None},
        "documents_seen": spent["documents"],
        "seconds": spent["seconds"],
        "skipped_checkpoints": [asdict(bad) for bad in run.skipped],
        "domains_without_weight": [d for d in run.order.domains if not any(n.rpartition("/")[0] == d for n in shares)],
    }
    aside = folder / ".result.json.writing"
    with open(aside, "w") as out:
        out.write(json.dumps(result, indent=1))
        out.flush()
        os.fsync(out.fileno())
    aside.replace(folder / "result.json")


def mean_of(values: list[float]) -> float | None:
    """None when there is none: every step's loss was not finite."""
    return sum(values) / len(values) if values else None


def _on_sigterm() -> list[int]:
    """A list that a SIGTERM is put into."""
    received: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    return received
