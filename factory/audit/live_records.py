"""Compares the records of live training with those of a replay: lines of metrics.jsonl, anomalies, and the keys of state.json."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

from factory.runs.trace import RunTrace
from factory.runs.untrusted_files import UntrustedFileError
from kernels.contract.message import Message
from trainer.contract.checkpoint.format import Checkpoint

# Keys of metrics.jsonl that depend on the clock and the machine's memory.
TIME_KEYS = {"tokens_per_s", "flops_per_s", "mfu", "first_step_s", "data_wait_s", "time", "memory"}
MACHINE_ANOMALIES = (
    "throughput_drop",
    "rank_grad_norm",
)  # anomalies that a replay by one rank at another speed may lack
# Results of the step, which must agree. Other numbers are diagnoses, some of them small differences of large numbers.
LEARNT = ("loss", "grad_norm", "lr")
LAYOUT = {
    "parallel": None,
    "checkpoint_every": None,
    "keep_checkpoints": None,
}  # keys of a recipe that may differ in a replay


def read_whole_trace(trace: RunTrace) -> RunTrace:
    """Read all parts of a trace, and return the trace. Raises: UntrustedFileError if a part is missing or invalid."""
    if not all(
        bool(tensor.isfinite().all()) for tensor in trace.final_checkpoint.model.values() if tensor.is_floating_point()
    ):
        raise UntrustedFileError(
            "audit.not_finite",
            "the weights of {checkpoint} are not finite",
            checkpoint=trace.final_checkpoint_path.name,
        )
    assert trace.metric_lines_by_step is not None and trace.anomalies is not None
    return trace


def remove_layout_keys(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint without the keys of state.json that may differ in a replay."""
    recipe = checkpoint.state["recipe"] | LAYOUT
    return replace(
        checkpoint, state=checkpoint.state | {"recipe": recipe, "skipped": []}
    )  # a stopped run may have skipped steps


def find_metrics_difference(live: RunTrace, base: RunTrace, tolerance: float) -> Message | None:
    """Return the first difference of metrics.jsonl between live training and the replay; None without a difference.

    A line of live training may have additional keys. Counts must be equal. A loss, a gradient's norm or a rate may differ by ``tolerance``.
    """
    if lost := sorted(base.metric_lines_by_step.keys() - live.metric_lines_by_step.keys()):
        return Message(
            "audit.lines_missing",
            "The live run's metrics.jsonl lacks the line of step {step}. In all, {missing:|line is|lines are} missing.",
            step=lost[0], missing=len(lost),
        )  # fmt: skip
    for step, theirs in sorted(base.metric_lines_by_step.items()):
        ours = live.metric_lines_by_step[step]
        for key, value in theirs.items():
            if key in TIME_KEYS:
                continue
            if key not in ours:
                return Message(
                    "audit.key_missing",
                    "In the live run's metrics.jsonl, the line of step {step} lacks {key}.",
                    key=key,
                    step=step,
                )
            other = ours[key]
            learnt = key.partition("/")[0] in LEARNT
            if isinstance(value, float) or isinstance(other, float):
                if learnt and not _near(value, other, tolerance):
                    return _other_value(key, step, other, value)
            elif other != value and (learnt or not isinstance(value, list | dict)):
                return _other_value(key, step, other, value)
    return None


def _other_value(key: str, step: int, live: object, replay: object) -> Message:
    return Message(
        "audit.value_differs",
        "At step {step}, {key} in metrics.jsonl is {live!r:.200} in the live run and {replay!r:.200} in the replay.",
        key=key, step=step, live=live, replay=replay,
    )  # fmt: skip


def _near(one: object, other: object, tolerance: float) -> bool:
    numbers = [x for x in (one, other) if isinstance(x, int | float) and math.isfinite(x)]
    if len(numbers) < 2:  # at most one of them is a finite number
        return not numbers
    return abs(numbers[0] - numbers[1]) <= tolerance * max(map(abs, numbers))


def find_anomaly_difference(live: RunTrace, base: RunTrace) -> Message | None:
    """Return a message about the first anomaly that only live training or only the replay has; None without a difference."""
    ours, theirs = (
        Counter(
            (one["step"], str(one.get("kind"))) for one in trace.anomalies if one.get("kind") not in MACHINE_ANOMALIES
        )
        for trace in (live, base)
    )
    if lost := theirs - ours:
        step, kind = min(lost)
        return Message(
            "audit.anomaly_missing",
            "The replay's anomalies.jsonl lists {kind} at step {step}, but the live run's does not.",
            kind=kind[:60], step=step,
        )  # fmt: skip
    if more := ours - theirs:
        step, kind = min(more)
        return Message(
            "audit.anomaly_added",
            "The live run's anomalies.jsonl lists {kind} at step {step}, but the replay's does not.",
            kind=kind[:60], step=step,
        )  # fmt: skip
    return None
