"""How what a window left, live, differs from what a replay of it left. Everything of a live segment may be hostile."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

from factory.runs.trace import Trace
from factory.runs.untrusted_files import UntrustedFileError
from trainer.contract.checkpoint.format import Checkpoint

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


def read_whole(trace: Trace) -> Trace:
    """All of what a window left, read. Raises: UntrustedFileError saying what is missing or wrong."""
    if not all(bool(tensor.isfinite().all()) for tensor in trace.left.model.values() if tensor.is_floating_point()):
        raise UntrustedFileError(f"the weights of {trace.checkpoint.name} are not finite")
    assert trace.lines is not None and trace.anomalies is not None
    return trace


def rest_of(left: Checkpoint) -> Checkpoint:
    """Without what a replay may have otherwise in state.json."""
    recipe = left.state["recipe"] | LAYOUT
    return replace(left, state=left.state | {"recipe": recipe, "skipped": []})  # of a run that was stopped


def lines_differ(live: Trace, base: Trace, share: float) -> str:
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


def anomalies_differ(live: Trace, base: Trace) -> str:
    """The first anomaly that one of them has and the other has not; '': none."""
    ours, theirs = (
        Counter((one["step"], str(one.get("kind"))) for one in trace.anomalies if one.get("kind") not in OF_THE_MACHINE)
        for trace in (live, base)
    )
    for words, more in (("does not have", theirs - ours), ("has", ours - theirs)):
        if more:
            step, kind = min(more)
            other = "the replay has" if words != "has" else "the replay does not have"
            return f"anomalies.jsonl {words} the {kind[:60]} of step {step} that {other}"
    return ""
