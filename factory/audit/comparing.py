"""Reads what a window left, live or replayed, and how two of them differ. Everything of a live segment may be hostile."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from factory.core.faults import is_of_no_file
from factory.core.left_files import parse_json
from factory.gates.patch.session import Rest, Weights
from factory.gates.untrusted_files import UntrustedFileError, read_bytes
from trainer.contract.checkpoint.format import load
from trainer.contract.errors import TrainerError

LOG_BYTES = 1 << 30
# Of a line of metrics.jsonl, what depends on the clock and the machine's memory.
OF_THE_CLOCK = {"tokens_per_s", "flops_per_s", "mfu", "first_step_s", "data_wait_s", "time", "memory"}
OF_THE_MACHINE = (
    "throughput_drop",
    "rank_grad_norm",
)  # anomalies that a replay by one rank at another speed need not have
# Computed by what the step learns from: must agree. Other numbers are diagnoses, some of them small differences of large ones.
LEARNT = ("loss", "grad_norm", "lr")
LAYOUT = {
    "parallel": None,
    "checkpoint_every": None,
    "keep_checkpoints": None,
}  # of a recipe, what a replay may have otherwise


@dataclass(frozen=True)
class WindowTrace:
    """What the steps [first, last) of a run left."""

    weights: Weights
    rest: Rest  # the optimiser's tensors and state.json
    lines: Mapping[int, dict[str, Any]]  # of metrics.jsonl, by step
    anomalies: Counter[tuple[int, str]]  # (step, kind)


def read_trace(checkpoint: Path, segment: Path, first: int, last: int) -> WindowTrace:
    """Raises: UntrustedFileError saying what is missing or wrong."""
    try:
        loaded = load(checkpoint)
        recipe = loaded.state["recipe"] | LAYOUT
        state = loaded.state | {"recipe": recipe, "skipped": []}  # a bad checkpoint of a stopped run is no difference
    except (TrainerError, OSError, TypeError, ValueError, KeyError, RecursionError, MemoryError) as error:
        if isinstance(error, OSError) and is_of_no_file(error):
            raise
        raise UntrustedFileError(f"the checkpoint {checkpoint.name} cannot be read: {str(error)[:300]}") from None
    if not all(bool(tensor.isfinite().all()) for tensor in loaded.model.values() if tensor.is_floating_point()):
        raise UntrustedFileError(f"the weights of {checkpoint.name} are not finite")
    lines = {}
    for record in step_lines(segment, "metrics.jsonl"):
        if first <= record["step"] < last:
            lines[record["step"]] = record
    anomalies = Counter(
        (record["step"], str(record.get("kind")))
        for record in step_lines(segment, "anomalies.jsonl")
        if first <= record["step"] < last and record.get("kind") not in OF_THE_MACHINE
    )
    return WindowTrace(loaded.model, Rest(loaded.optimizer, state), lines, anomalies)


def step_lines(segment: Path, name: str) -> list[dict[str, Any]]:
    """The lines of a file that have a step; none where there is no file. Raises: UntrustedFileError."""
    folder = os.open(segment, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if name not in os.listdir(folder):
            return []
        stored = read_bytes(folder, (name,), LOG_BYTES)
    finally:
        os.close(folder)
    found = []
    for line in stored.splitlines():
        try:
            record = parse_json(line)
        except ValueError:
            raise UntrustedFileError(f"{name} has a line that is no JSON") from None
        if not isinstance(record, dict) or type(record.get("step")) is not int:
            raise UntrustedFileError(f"{name} has a line without a step")
        found.append(record)
    return found


def same_bits(one: WindowTrace, other: WindowTrace) -> bool:
    """Are weights and moments equal? What was written down is not asked: a diagnosis may round otherwise where its numbers lie otherwise
    in memory."""
    tensors = ((one.weights, other.weights), (one.rest.optimizer, other.rest.optimizer))
    return all(
        a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)
        for a, b in tensors
    )


def shapes_differ(live: WindowTrace, base: WindowTrace) -> str:
    """The first tensor that has no counterpart of its shape and dtype; '': none."""
    for a, b in ((live.weights, base.weights), (live.rest.optimizer, base.rest.optimizer)):
        for name in sorted(a.keys() | b.keys()):
            x, y = a.get(name), b.get(name)
            if x is None or y is None or x.shape != y.shape or x.dtype != y.dtype:
                return name
    return ""


def lines_differ(live: WindowTrace, base: WindowTrace, share: float) -> str:
    """The first way in which what live code wrote down is not what the replay did; '': none.

    A line may say more than the replay's. Counts are equal; a loss, a gradient's norm or a rate may differ by ``share``.
    """
    if lost := sorted(base.lines.keys() - live.lines.keys()):
        return f"metrics.jsonl has no line of step {lost[0]}, and {len(lost)} are missing in all"
    for step, theirs in sorted(base.lines.items()):
        ours = live.lines[step]
        for key, value in theirs.items():
            if key in OF_THE_CLOCK:
                continue
            if key not in ours:
                return f"metrics.jsonl has no {key} of step {step}"
            other = ours[key]
            learnt = key.partition("/")[0] in LEARNT
            if isinstance(value, float) or isinstance(other, float):
                if learnt and not _near(value, other, share):
                    return f"metrics.jsonl has {key} {other} of step {step}, the replay {value}"
            elif other != value and (learnt or not isinstance(value, list | dict)):
                return f"metrics.jsonl has {key} {other!r} of step {step}, the replay {value!r}"
    return ""


def _near(one: object, other: object, share: float) -> bool:
    numbers = [x for x in (one, other) if isinstance(x, int | float) and math.isfinite(x)]
    if len(numbers) < 2:  # neither, or one alone, is a finite number
        return not numbers
    return abs(numbers[0] - numbers[1]) <= share * max(map(abs, numbers))


def anomalies_differ(live: WindowTrace, base: WindowTrace) -> str:
    """The first anomaly that one of them has and the other has not; '': none."""
    for words, more in (("does not have", base.anomalies - live.anomalies), ("has", live.anomalies - base.anomalies)):
        if more:
            step, kind = min(more)
            other = "the replay has" if words != "has" else "the replay does not have"
            return f"anomalies.jsonl {words} the {kind[:60]} of step {step} that {other}"
    return ""
