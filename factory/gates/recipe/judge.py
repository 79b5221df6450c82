"""``judge_recipe(policy, evidence) -> Verdict``: the decision on a recipe change, as a pure function.

The evidence is ``{"stages": {name: {"state": …, "reasons": […], …}}, "tries": n}``. The runs stage has the bits per byte of every held-out domain
after the anneal and the tokens per second, for each seed and side, and the peak memory of each side.

The target is the mean over domains of the paired gain (baseline − candidate, so positive is better). A change is promoted if all of these hold:

- the t lower bound of the target is above zero, at a level that the tries on this target share (Bonferroni);
- the target is larger than the noise floor: the standard deviation of the difference between two means over as many seeds of the *unchanged* recipe,
  sd · √(2 / seeds). Pairing detects much smaller changes, which are real but not worth a merge;
- a lower bound shows for each domain that it loses at most the margin. All domains must pass, so these bounds need no correction (an
  intersection-union test: Berger 1982);
- it costs no more time and memory than allowed, unless the changed keys cannot change the cost (``same_cost``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from factory.gates.patch.judge import compute_t_quantile
from factory.gates.recipe.policy import RecipePolicy, RunsPolicy
from factory.gates.release.judge import HOLD, PROMOTE, REJECT, Verdict
from factory.gates.stage_interface import (
    make_no_evidence_message,
    make_stage_failed_message,
    make_unknown_tries_message,
    read_reasons,
)
from kernels.contract.message import Message

STAGES = ("scope", "static", "runs")
MOST = 1e18  # scores, rates and memory sizes are smaller; the sum of larger numbers could be infinite


@dataclass(frozen=True)
class MeanWithBounds:
    """A mean over seeds with one-sided bounds."""

    mean: float
    lower: float
    upper: float


@dataclass(frozen=True)
class RecipeComparison:
    """The comparison of both recipes' runs. Gains are in bits per byte; positive is better."""

    target: MeanWithBounds
    noise: float  # standard deviation of the target's difference between two means of unchanged runs
    domains: dict[str, MeanWithBounds]
    slower: MeanWithBounds  # baseline's tokens per second over the candidate's
    memory: float  # candidate's peak over the baseline's

    def to_json(self) -> dict[str, Any]:
        gain = {"bits_per_byte": self.target.mean, "lower": self.target.lower, "upper": self.target.upper}
        domains = {name: asdict(found) for name, found in self.domains.items()}
        return gain | {"noise": self.noise, "domains": domains, "slower": self.slower.mean, "memory": self.memory}


def judge_recipe(policy: RecipePolicy, evidence: Mapping[str, Any]) -> Verdict:
    stages: Mapping[str, Any] = evidence.get("stages") or {}
    for name in STAGES:
        stage = stages.get(name) or {}
        said = read_reasons(stage)
        if stage.get("state") == "failed":
            return Verdict(REJECT, tuple(said or [make_stage_failed_message(name)]))
        if stage.get("state") != "passed":
            return Verdict(HOLD, tuple(said or [make_no_evidence_message(name)]))
    tries = evidence.get("tries")
    if isinstance(tries, bool) or not isinstance(tries, int) or tries < 1:
        return Verdict(HOLD, (make_unknown_tries_message(),))
    result = compare_recipes(policy.runs, stages["runs"], tries)
    if result is None:
        not_scored = Message(
            "recipe.not_scored", "The runs' weights were not scored, or were scored for too few seeds."
        )
        return Verdict(HOLD, (not_scored,))
    if result.noise <= 0:
        no_noise = Message("recipe.no_noise", "All seeds gave exactly the same score, so the noise was not measured.")
        return Verdict(HOLD, (no_noise,))
    return _decide(policy.runs, result, same_cost=stages["runs"].get("same_cost") is True)


def _decide(policy: RunsPolicy, result: RecipeComparison, same_cost: bool) -> Verdict:
    target, needed = result.target, max(policy.min_gain, result.noise)
    shown = Message(
        "recipe.gain",
        "The gain is {gain:+.4f} bits per byte on held-out documents (lower bound {lower:+.4f}). Other seeds change the mean of {seeds} runs "
        "by about {noise:.4f}.",
        gain=target.mean, lower=target.lower, seeds=policy.seeds, noise=result.noise,
    )  # fmt: skip
    if target.mean < -needed:
        worse = Message("recipe.worse", "The candidate learns worse than the baseline. {gain}", gain=shown)
        return Verdict(REJECT, (worse,))
    by_domain = {name: found.mean for name, found in result.domains.items()}
    hurt = {name: mean for name, mean in by_domain.items() if mean < -policy.domain_margin}
    if hurt:
        domains_worse = Message(
            "recipe.domains_worse",
            "The candidate is worse than the baseline on some domains. Its gains there, in bits per byte: {named}. No gain may be below {margin:+g}.",
            named=_each(hurt), domains=hurt, margin=-policy.domain_margin,
        )  # fmt: skip
        return Verdict(REJECT, (domains_worse, shown))
    if target.mean <= needed:
        no_gain = Message(
            "recipe.no_gain",
            "There is no gain beyond the noise floor: more than {needed:.4f} bits per byte is needed.",
            needed=needed,
        )
        return Verdict(REJECT, (no_gain, shown))
    if costs := None if same_cost else _costs(policy, result):
        sure = result.memory > policy.max_memory or result.slower.lower > policy.max_slower
        return Verdict(REJECT if sure else HOLD, (costs, shown))
    if target.lower <= 0:
        likely = Message(
            "recipe.gain_likely", "A gain is likely but not shown: the lower bound of the gain is not above 0."
        )
        return Verdict(HOLD, (likely, shown))
    unsure = [name for name, found in result.domains.items() if found.lower <= -policy.domain_margin]
    if unsure:
        unsure_domains = Message(
            "recipe.domains_unsure",
            "The candidate may be worse than the baseline on {domains}. Raise runs.seeds or runs.held_out_documents in "
            "policies/gates/recipe.yaml.",
            domains=unsure,
        )
        return Verdict(HOLD, (unsure_domains, shown))
    facts = [
        Message(
            "recipe.by_domain", "Gain by domain, in bits per byte: {named}.", named=_each(by_domain), domains=by_domain
        )
    ]
    if not same_cost:
        facts.append(
            Message(
                "recipe.cost",
                "The candidate trains {speed:.2f}× as many tokens per second as the baseline, and needs {memory:.2f}× the baseline's memory.",
                speed=1 / result.slower.mean, memory=result.memory,
            )
        )  # fmt: skip
    return Verdict(PROMOTE, (shown, *facts))


def _each(gains: Mapping[str, float]) -> list[str]:
    return [f"{name} {gain:+.4f}".replace("-", "−") for name, gain in gains.items()]


def _costs(policy: RunsPolicy, result: RecipeComparison) -> Message | None:
    """Return the reason that the candidate needs too much memory or time. None: it does not."""
    if result.memory > policy.max_memory:
        return Message(
            "recipe.memory",
            "The candidate needs {memory:.2f}× the baseline's memory. At most {most:g}× is allowed.",
            memory=result.memory, most=policy.max_memory,
        )  # fmt: skip
    if result.slower.mean > policy.max_slower:
        return Message(
            "recipe.slower",
            "The candidate takes {slower:.2f}× the baseline's time per token. At most {most:g}× is allowed.",
            slower=result.slower.mean, most=policy.max_slower,
        )  # fmt: skip
    return None


def compare_recipes(policy: RunsPolicy, found: Mapping[str, Any], tries: int) -> RecipeComparison | None:
    """Compare the runs. None: a number is missing, not finite or of the wrong type, or there are fewer seeds than the policy asks for."""
    old, new = (_scores(found.get(name)) for name in ("baseline", "candidate"))
    old_speed, new_speed = (_positive(found.get(f"{name}_tokens_per_s")) for name in ("baseline", "candidate"))
    memory = _positive([found.get(f"{name}_memory") for name in ("baseline", "candidate")])
    if old is None or new is None or old_speed is None or new_speed is None or memory is None:
        return None
    seeds = len(old)
    if seeds < policy.seeds or {len(part) for part in (new, old_speed, new_speed)} != {seeds}:
        return None
    names = sorted(old[0])
    if any(sorted(run) != names for run in (*old, *new)):
        return None
    weights = {name: policy.domain_weights.get(name, 0.0) if policy.domain_weights else 1.0 for name in names}
    if sum(weights.values()) <= 0:
        return None
    target = lambda run: sum(weights[name] * run[name] for name in names) / sum(weights.values())
    level = 1 - policy.confidence
    apart = [target(before) - target(after) for before, after in zip(old, new, strict=True)]
    domains = {
        name: _bounded([before[name] - after[name] for before, after in zip(old, new, strict=True)], level)
        for name in names
    }
    slower = _bounded([math.log(a / b) for a, b in zip(old_speed, new_speed, strict=True)], level)
    noise = _deviation([target(run) for run in old]) * math.sqrt(2 / seeds)
    times = MeanWithBounds(*(math.exp(min(max(x, -700.0), 700.0)) for x in (slower.mean, slower.lower, slower.upper)))
    return RecipeComparison(_bounded(apart, level / tries), noise, domains, times, memory[1] / memory[0])


def _bounded(values: Sequence[float], level: float) -> MeanWithBounds:
    mean = math.fsum(values) / len(values)
    reach = compute_t_quantile(1 - level, len(values) - 1) * _deviation(values) / math.sqrt(len(values))
    return MeanWithBounds(mean, mean - reach, mean + reach)


def _deviation(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _scores(runs: object) -> list[dict[str, float]] | None:
    """Return domain → bits per byte of each run. None: there are fewer than two runs, or a run has no domain or a number that is not finite."""
    if not isinstance(runs, Sequence) or isinstance(runs, str) or len(runs) < 2:
        return None
    for run in runs:
        if not isinstance(run, Mapping) or not run or any(_number(value) is None for value in run.values()):
            return None
    return [{str(name): float(value) for name, value in run.items()} for run in runs]


def _positive(values: object) -> list[float] | None:
    if not isinstance(values, Sequence) or isinstance(values, str):
        return None
    numbers = [_number(value) for value in values]
    return None if any(n is None or n <= 0 for n in numbers) else [n for n in numbers if n is not None]


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < MOST:
        return None
    return float(value)
