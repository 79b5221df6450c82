"""The proposer that needs no language model: for the hottest kernel ops, choose a faster registered implementation.

Every implementation of an op that runs on the device is measured, alone, against the one in use, on the recipe's
shapes and as the recipe
runs it. The step's predicted time follows by Amdahl's law: each call saves (1 − 1/ratio) of the time that the chosen
one takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from agents.proposal import Edit, Proposal
from agents.workbench import Workbench
from kernels.registry import OPS

AGENT = "search"
POLICY = "policies/kernels.yaml"
LEAST_GAIN = 1.02  # a predicted whole-step gain below this is not worth a branch: it drowns in the gate's noise floor
LEAST_SHARE = 0.02  # ops that take less of the step cannot reach it
MOST_MEASURED = 8  # implementations measured a proposal, hottest ops first
REFUSED = ("reject", "hold")


@dataclass(frozen=True)
class Candidate:
    """An implementation that was measured, and what the whole step would gain."""

    op: str
    before: str
    after: str
    share: float  # of the recipe's step that the op takes now
    seconds: float  # of a forward and backward alone, of ``after``
    against_seconds: float  # of ``before``
    ratio: float
    predicted_gain: float


def propose(
    profile: Mapping[str, Any], workbench: Workbench, history: Sequence[Mapping[str, Any]] = ()
) -> Proposal | None:
    """The candidate of the largest predicted gain as a proposal, or None when none is worth one. ``profile`` is a
    parsed profile.json.

    A change that history says failed is never proposed again: one of the same target and title.
    """
    policy = workbench.read(POLICY)
    refused = {(past["target"], past["title"]) for past in history if past.get("outcome") in REFUSED}
    device = "cuda" if "cuda" in profile["device"].lower() or "nvidia" in profile["device"].lower() else "cpu"
    for candidate in sorted(candidates(profile, workbench, device), key=lambda c: -c.predicted_gain):
        if candidate.predicted_gain < LEAST_GAIN:
            break
        proposal = write(candidate, profile, policy, device)
        if (proposal.target, proposal.title) not in refused and not workbench.check(proposal.edits):
            return proposal
    return None


def candidates(profile: Mapping[str, Any], workbench: Workbench, device: str) -> list[Candidate]:
    """Measure the implementations of the hottest ops; what cannot be measured is no candidate."""
    step = profile["recipe_step_s"] or profile["eager_step_s"]
    found: list[Candidate] = []
    tried = 0
    for op in sorted(profile["ops"], key=lambda o: -o["share"]):
        if op["share"] < LEAST_SHARE or op["op"] not in OPS:
            continue
        for name, implementation in OPS[op["op"]].implementations.items():
            if name == op["implementation"] or not implementation.runs_on(device) or tried >= MOST_MEASURED:
                continue
            if name == "compiled" and profile["recipe"]["compile"]:
                continue  # the recipe compiles it already
            tried += 1
            measured = workbench.measure(op["op"], name, op["implementation"])
            if measured is None:
                continue
            # Where the recipe compiles, the eager shares do not hold: the op's time in the step is its measured time
            # alone, times its calls.
            share = op["calls"] * measured["against_seconds"] / step if profile["recipe"]["compile"] else op["share"]
            share = min(share, 0.9)
            ratio = float(measured["ratio"])
            gain = amdahl(share, ratio)
            found.append(
                Candidate(
                    op["op"],
                    op["implementation"],
                    name,
                    share,
                    measured["seconds"],
                    measured["against_seconds"],
                    ratio,
                    gain,
                )
            )
    return found


def amdahl(share: float, ratio: float) -> float:
    """Time before over time after, when ``share`` of it gets ``ratio`` times faster."""
    return 1.0 / (1.0 - share + share / ratio)


def write(candidate: Candidate, profile: Mapping[str, Any], policy: str, device: str) -> Proposal:
    """The proposal's words and its one edited line."""
    c = candidate
    hot = [line for line in profile["lines"] if line["op"] == c.op][:3]
    where = ", ".join(f"{line['file']}:{line['line']}" for line in hot)
    about = OPS[c.op].implementations[c.after].about
    hypothesis = (
        f"{c.op} takes {c.share:.0%} of the training step (hottest lines: {where}). `{c.after}` ({about}) "
        f"runs its forward and backward on the recipe's shapes in {c.seconds * 1e3:.1f} ms, "
        f"`{c.before}` in {c.against_seconds * 1e3:.1f} ms: "
        f"{c.ratio:.2f} times as fast in interleaved pairs. "
        f"If the whole step does not get at least {1 + (c.predicted_gain - 1) / 2:.3f} "
        f"times as fast (predicted: {c.predicted_gain:.3f}), "
        f"or held-out evaluations get worse, this is refuted."
    )
    return Proposal(
        agent=AGENT,
        target=f"kernel:{c.op}",
        title=f"{c.op}: {c.before} → {c.after} on {device}",
        hypothesis=hypothesis,
        predicted_gain=c.predicted_gain,
        edits=(Edit(POLICY, choose(policy, device, c.op, c.after)),),
    )


def choose(policy: str, device: str, op: str, implementation: str) -> str:
    """kernels.yaml with one choice changed: only that line differs, comments stay."""
    lines = policy.splitlines()
    section = ""
    for number, line in enumerate(lines):
        if line and not line[0].isspace() and not line.startswith("#"):
            section = line.split(":")[0]
        if section == device and line.strip().startswith(f"{op}:"):
            indent = line[: len(line) - len(line.lstrip())]
            lines[number] = f"{indent}{op}: {implementation}"
            break
    else:
        at = next((n for n, line in enumerate(lines) if line.startswith(f"{device}:")), None)
        if at is None:
            lines += [f"{device}:", f"  {op}: {implementation}"]
        else:
            lines.insert(at + 1, f"  {op}: {implementation}")
    text = "\n".join(lines) + "\n"
    assert yaml.safe_load(text)[device][op] == implementation, text
    return text
