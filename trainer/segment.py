"""Runs one segment, from its first checkpoint (or from initialised weights) to the checkpoint at ``last_step``. It writes files to its folder:

    metrics.jsonl  anomalies.jsonl  checkpoints/step-…/  result.json

If a segment is started again, it resumes from its newest good checkpoint (on a CPU with the same bits). A finished segment is not run again.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist

from kernels.contract.files import write_atomically
from kernels.contract.host_memory import release_freed_memory
from kernels.contract.message import Message
from kernels.contract.precision import allow_bf16_matmul
from trainer.batch import prefetch_batches
from trainer.checkpoint_writer import CheckpointWriter
from trainer.contract import stopping
from trainer.contract.checkpoint import format as checkpoints
from trainer.contract.checkpoint.format import SkippedCheckpoint
from trainer.contract.data.data_order import list_document_keys
from trainer.contract.errors import CheckpointError, SpecError, StoppedBySignalError
from trainer.contract.json_lines import read_json_lines
from trainer.contract.plan.feasibility import refuse_impossible_run
from trainer.contract.plan.precision import DTYPES
from trainer.contract.plan.spec import SegmentSpec
from trainer.monitor.metrics import MetricsFile
from trainer.monitor.speed import SpeedMeter
from trainer.optim.optimizer import format_update_rule_table
from trainer.parallel.ranks import Ranks
from trainer.run import SegmentRun

LAST_STEPS = 20  # the result's loss is the mean over this many last steps


def run_segment(folder: Path) -> None:
    """Run the segment of a folder to its end. Raises: TrainerError, KernelError, OSError; StoppedBySignalError after SIGTERM."""
    if stopping.is_stop_requested():
        raise StoppedBySignalError("trainer.stopped_before", "Stopped before the segment began, as requested.")
    spec = SegmentSpec.load(folder)
    if (folder / "result.json").exists():
        return
    ranks = Ranks.join(spec.recipe.parallel, spec.recipe.model)
    try:
        spec.recipe.batch.refuse_uneven_split(ranks.data_ranks)
        start, skipped = find_start_checkpoint(folder, spec, ranks)
        run = SegmentRun(spec, ranks, start)
        run.skipped += skipped
        refuse_impossible_run(run.order, spec.recipe, spec.first_step, spec.last_step)
        if ranks.is_leader:
            (folder / "parameters.txt").write_text(format_update_rule_table(run.optimizer.table) + "\n")
            for warning in spec.recipe.model.list_warnings():
                print(
                    Message("trainer.recipe_warning", "warning about the recipe: {warning}", warning=warning),
                    file=sys.stderr,
                    flush=True,
                )
            replaced = [str(kernel) for kernel in run.kernels if kernel.by != kernel.chosen]
            if replaced:  # the policy allows it, so it is not an error
                print(
                    Message(
                        "trainer.kernels",
                        "kernels: some chosen implementations are not used. {replaced}",
                        replaced="; ".join(replaced),
                    ),
                    flush=True,
                )
        with allow_bf16_matmul(DTYPES[spec.recipe.precision]):
            train_steps(folder, run)
    finally:
        ranks.leave()


def find_start_checkpoint(folder: Path, spec: SegmentSpec, ranks: Ranks) -> tuple[Path | None, list[SkippedCheckpoint]]:
    """(the checkpoint to continue from, the bad checkpoints that were skipped). It is this segment's newest good checkpoint, else the initial
    checkpoint, else None.

    Each rank hashes a share of the files. All ranks return the same checkpoint.
    """
    own = folder / "checkpoints"
    skipped: list[SkippedCheckpoint] = []
    if ranks.is_leader:
        checkpoints.delete_unfinished_checkpoints(own)
    ranks.wait()
    for _, path in reversed(checkpoints.list_checkpoints(own)):
        fault = find_checkpoint_fault_on_any_rank(path, ranks)
        if not fault:
            return path, skipped
        if ranks.is_leader:
            skipped.append(checkpoints.mark_checkpoint_as_bad(path, fault))
            said = Message("trainer.checkpoint_skipped", "a bad checkpoint is skipped: {fault}", fault=fault)
            print(said, file=sys.stderr, flush=True)
        ranks.wait()
    if spec.initial_checkpoint is None:
        return None, skipped
    initial = Path(spec.initial_checkpoint)
    if fault := find_checkpoint_fault_on_any_rank(initial, ranks):
        raise CheckpointError(Message.from_json(fault))
    step = checkpoints.read_checkpoint_state(initial)["step"]
    if step != spec.first_step:
        raise SpecError(
            "trainer.wrong_first_step",
            "first_step is {first_step}, but training continues from initial_checkpoint with step {step}. Both must be the same step.",
            first_step=spec.first_step,
            step=step,
        )
    return initial, skipped


def find_checkpoint_fault_on_any_rank(path: Path, ranks: Ranks) -> str:
    """The first fault that any rank finds in its share of a checkpoint's files; '' if none does."""
    fault = checkpoints.find_checkpoint_fault(path, ranks.rank, ranks.size)
    if ranks.size == 1:
        return fault
    faults: list[str] = [""] * ranks.size
    dist.all_gather_object(faults, fault)
    return next((found for found in faults if found), "")


def train_steps(folder: Path, run: SegmentRun) -> None:
    """Train all steps of a segment, and write its metrics, anomalies, checkpoints and result."""
    recipe, spec, ranks = run.recipe, run.spec, run.ranks
    on_gpu = ranks.device.type == "cuda"
    reserve = run.count_checkpoint_bytes() * on_gpu  # on a CPU a save gives its memory back, because the step needs it
    writer = run.writer = CheckpointWriter(
        folder / "checkpoints", recipe.keep_checkpoints, ranks.rank, ranks.size, reserve, run.list_unchanged()
    )
    metrics, anomalies = (
        MetricsFile(folder / name if ranks.is_leader else None, run.step)
        for name in ("metrics.jsonl", "anomalies.jsonl")
    )
    speed = SpeedMeter(recipe, ranks)
    first, every = run.step, recipe.stability.read_every
    last = left = time.perf_counter()  # the time of the last reading, and the time when the host finished a step
    began, waited = last - run.counters["seconds"], 0.0
    try:
        batches = prefetch_batches(run.order, spec.last_step, ranks.data_rank, ranks.data_ranks, pin=on_gpu)
        for batch in batches:
            waited += time.perf_counter() - left
            run.stop_asked = stopping.is_stop_requested()
            run.launch_step(batch.to(ranks.device))
            if batch.step == first:
                release_freed_memory()  # the blocks were compiled in this step
            made, left = batch.step + 1, time.perf_counter()
            ended = made == spec.last_step
            saves = ended or made % recipe.checkpoint_every == 0
            # all ranks read at the same steps: a rank cannot know whether another was asked to stop
            reads = saves or made % every == 0 or (run.stop_asked and ranks.size == 1)
            if reads:
                count, records = len(run.launched), run.read_finished_steps()
                now = left = time.perf_counter()
                run.counters["seconds"] = now - began
                for step, record in records:
                    record |= speed.compute_step_fields(len(step.rows) * recipe.model.context, (now - last) / count)
                    record |= {"data_wait_s": waited / count}
                    metrics.write(record | {"time": time.time()})
                    for anomaly in (anomaly for hook in run.hooks for anomaly in hook.after_step(record)):
                        anomalies.write(asdict(anomaly) | {"documents": list_document_keys(run.order, step.rows)})
                        anomalies.flush()
                last, waited = now, 0.0
            if saves or (reads and run.stop_asked):
                metrics.sync()
                anomalies.sync()
                run.save(is_last=ended or (reads and run.stop_asked))
            writer.raise_if_finished_save_failed()
            if reads and run.stop_asked and not ended:
                writer.wait_for_last_save()
                raise StoppedBySignalError(
                    "trainer.stopped_after", "Stopped before step {step}, as requested.", step=run.step
                )
        batches.close()
        writer.wait_for_last_save()
        metrics.flush()
        assert run.step == spec.last_step
        differing = run.find_differing_replicas()
        if ranks.is_leader:
            write_result(folder, run, differing, speed)
    finally:
        writer.close()
        metrics.close()
        anomalies.close()


def write_result(folder: Path, run: SegmentRun, differing: list[str], speed: SpeedMeter) -> None:
    """Write result.json atomically. The file exists only if the segment is done. ``differing``: what ``SegmentRun.find_differing_replicas``
    returned."""
    path = folder / "checkpoints" / checkpoints.format_checkpoint_name(run.spec.last_step)
    every = read_json_lines(folder / "metrics.jsonl")
    lines = every[-LAST_STEPS:]
    mean = lambda key: compute_mean_or_none([line[key] for line in lines if line.get(key) is not None])
    spent = {key: run.counters[key] - run.at_start[key] for key in run.counters}
    shares = run.order.compute_current_stream_shares()
    result = {
        "state": "done",
        "last_step": run.spec.last_step,
        "checkpoint": str(path),
        "manifest_sha256": checkpoints.hash_manifest(path),
        "tokens": spent["tokens"],
        "supervised_tokens": spent["supervised_tokens"],
        "first_loss": next((line["loss"] for line in every if "loss" in line), None),
        "loss": mean("loss"),
        "loss_by_domain": {n: mean(f"loss/{n}") for n in run.order.domains if mean(f"loss/{n}") is not None},
        "documents_seen": spent["documents"],
        "seconds": spent["seconds"],
        "speed": speed.compute_segment_fields(every),
        "replicas_apart": differing,
        "skipped_checkpoints": [asdict(bad) for bad in run.skipped],
        "domains_without_weight": [d for d in run.order.domains if not any(n.rpartition("/")[0] == d for n in shares)],
    }
    write_atomically(folder / "result.json", json.dumps(result, indent=1))


def compute_mean_or_none(values: list[float]) -> float | None:
    """The mean of the values; None if there are none, because no step had a finite value."""
    return sum(values) / len(values) if values else None
