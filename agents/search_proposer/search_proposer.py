"""The proposer that needs no language model: for the hottest kernel ops, choose a faster registered implementation.

Every implementation of an op that runs on the device is measured alone against the one in use, on the recipe's shapes and as
the recipe runs it. The step's predicted time follows by Amdahl's law: each call saves (1 − 1/ratio) of the time of the one in
use. The reason names the profile's fusion candidates that a change covers. Of the recipe's keys, those that change no result
are tried: ``compile``, and the rows of a micro-batch if there is time left for measuring.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agents.core.proposal import Edit, Proposal
from agents.core.workbench import Measurement, MeasurementError, Workbench
from agents.core.yaml_edit import set_value
from agents.search_proposer import fusions, micro_batches
from kernels.contract.choice import automatic, section_of

AGENT = "search"
POLICY = "policies/kernels.yaml"
LEAST_GAIN = 1.02  # a smaller predicted gain of the whole step is below the gate's noise floor
LEAST_SHARE = 0.02  # of the step: an op with less cannot reach that gain
MOST_MEASURED = 8  # implementations measured a proposal, hottest ops first
REFUSED = ("reject",)  # what was held for lack of evidence may be tried again


@dataclass(frozen=True)
class Candidate:
    """An implementation that was measured, and what the whole step would gain."""

    op: str
    before: str
    after: str
    about: str
    share: float  # of the recipe's step that the op takes now
    measured: Measurement
    predicted_gain: float


def propose(profile: Mapping[str, Any], workbench: Workbench, count: int = 1) -> list[Proposal]:
    """Up to ``count`` proposals, the best of each target, largest predicted gain first. ``profile`` is a parsed profile.json.

    An op that is ``auto`` in kernels.yaml has the fastest registered implementation already, by 'factory tune'. A patch that the
    workbench's history has as rejected is not proposed again.
    """
    policy = workbench.read(POLICY)
    device = profile["device_kind"]
    tuned = automatic(section_of(policy, device))
    untuned = {**profile, "ops": [op for op in profile["ops"] if op["op"] not in tuned]}
    drafts = [
        write(candidate, profile, policy, device) for candidate in candidates(untuned, workbench, MOST_MEASURED * count)
    ]
    knobs = [fusions.compile_blocks(profile, workbench, AGENT), micro_batches.propose(profile, workbench, AGENT)]
    best: dict[str, Proposal] = {}
    for proposal in sorted([*drafts, *filter(None, knobs)], key=lambda p: -p.predicted_gain):
        if proposal.predicted_gain < LEAST_GAIN or len(best) == count:
            break
        tried = workbench.history(proposal.target)
        refused = [attempt.patch_id for attempt in tried if attempt.outcome in REFUSED]
        if proposal.patch_id not in refused and not any(attempt.closed for attempt in tried):
            best.setdefault(proposal.target, proposal)
    return list(best.values())


def candidates(profile: Mapping[str, Any], workbench: Workbench, most: int = MOST_MEASURED) -> list[Candidate]:
    """Measure up to ``most`` implementations of the hottest ops; leave out those that cannot be measured."""
    step = profile["recipe_step_s"] or profile["eager_step_s"]
    found: list[Candidate] = []
    seconds_now: dict[str, float] = {}
    tried = 0
    for op in sorted(profile["ops"], key=lambda o: -o["share"]):
        if op["share"] < LEAST_SHARE:
            continue
        for name, about in op["implementations"].items():
            if name == op["implementation"] or tried >= most:
                continue
            if name == "compiled" and profile["recipe"]["compile"] and op["in_block"]:
                continue  # the recipe compiles it already, with its block
            tried += 1
            try:
                measured = workbench.measure(op["op"], name, op["implementation"])
            except MeasurementError:
                continue
            # Where the recipe compiles, the eager shares do not hold: the op's time in the step is its time alone times its calls.
            # All candidates of an op use one time of the current implementation, so that its noise does not rank them.
            now = seconds_now.setdefault(op["op"], measured.against_seconds)
            # The optimiser is not compiled with the model: it takes the same time in the recipe's step as in the eager one.
            share = op["share"]
            if profile["recipe"]["compile"]:
                share = op["calls"] * now / step if op["trained"] else share * profile["eager_step_s"] / step
            share = min(share, 0.9)
            found.append(
                Candidate(op["op"], op["implementation"], name, about, share, measured, amdahl(share, measured.ratio))
            )
    return found


def amdahl(share: float, ratio: float) -> float:
    """Time before over time after, when ``share`` of it becomes ``ratio`` times as fast."""
    return 1.0 / (1.0 - share + share / ratio)


def write(candidate: Candidate, profile: Mapping[str, Any], policy: str, device: str) -> Proposal:
    """The proposal: its texts and its one edited line."""
    c, m = candidate, candidate.measured
    hot = [line for line in profile["lines"] if line["op"] == c.op][:3]
    where = ", ".join(f"{line['file']}:{line['line']}" for line in hot)
    covered = fusions.of_op(profile, c.op)
    covers = f"It covers what the profile lists as fusion candidates: {fusions.in_words(covered)}. " if covered else ""
    hypothesis = (
        f"{c.op} takes {c.share:.0%} of the training step (hottest lines: {where}). `{c.after}` ({c.about}) runs its forward and backward on the "
        f"recipe's shapes in {m.seconds * 1e3:.1f} ms, `{c.before}` in {m.against_seconds * 1e3:.1f} ms: {m.ratio:.2f} times as fast in interleaved "
        f"pairs. {covers}"
        f"If the whole step does not get at least {1 + (c.predicted_gain - 1) / 2:.3f} times as fast (predicted: {c.predicted_gain:.3f}), "
        f"or held-out evaluations get worse, this is refuted."
    )
    return Proposal(
        agent=AGENT,
        target=f"kernel:{c.op}",
        title=f"{c.op}: {c.before} → {c.after} on {device}",
        hypothesis=hypothesis,
        predicted_gain=c.predicted_gain,
        edits=(Edit(POLICY, set_value(policy, (device, c.op), c.after)),),
    )
