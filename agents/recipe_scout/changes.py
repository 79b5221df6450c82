"""The changes that the scout may try, each with a reason from the record and a predicted gain in bits per byte.

A prediction is a prior, meant to be refuted: for rates, batch and schedule "a token is worth φ tokens" (the loss's slope then
gives the gain), for the mixture the domains' slopes. The gate's paired runs decide.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from agents.core.yaml_edit import Scalar, written
from agents.recipe_scout.course import Course
from trainer.contract.plan.run_plan import lr_by_rule

STEPS_OF_RATE = (2.0, 1.4)  # factors by which the rate changes, the larger one first
CURVATURE = 0.25  # ln(φ) lost per squared ln(rate off its best): at twice the best rate a token is worth 11 % less
LONG_ENOUGH = 0.2  # share of a run that its anneal takes; a longer one gains no more (arXiv 2405.18392 §4)
OWN = 0.2  # share of a domain's slope due to its own tokens, the rest to any; with 1, 0.023 was predicted and 0.001 measured


@dataclass(frozen=True)
class RecipeChange:
    """One value of the recipe, and why."""

    path: tuple[str, ...]
    old: Scalar
    new: Scalar
    gain: float  # predicted, bits per byte
    why: str

    @property
    def key(self) -> str:
        return ".".join(self.path)

    @property
    def words(self) -> str:
        return f"{self.key} {written(self.old)} → {written(self.new)}"


@dataclass(frozen=True)
class Tried:
    """The new values of one key that the gate rejected, from the value that the recipe has now."""

    higher: bool = False
    lower: bool = False
    rejected: int = 0


def all_changes(course: Course, tried_rate: Tried) -> list[RecipeChange]:
    """Every change for which the record has a reason, largest predicted gain first."""
    sources = (rates(course, tried_rate), mixture(course), batch(course), schedule(course), regularisers(course))
    return sorted((change for source in sources for change in source), key=lambda change: -change.gain)


def rates(course: Course, tried: Tried) -> Iterator[RecipeChange]:
    """Towards DeepSeek's rule (arXiv 2401.02954 §3.2), lower after anomalies, away from where a change was rejected."""
    rate = course.recipe.optimizer.lr
    tokens = course.tokens + course.judged_tokens
    rule = lr_by_rule(course.recipe.model, tokens)
    off = math.log(rule / rate) - 0.35 * min(course.trouble, 4)
    why = (
        f"DeepSeek's rule gives a rate of {rule:.2g} for this model and {tokens:.2g} tokens, the recipe has {rate:.2g}"
    )
    why += f"; {course.trouble} anomalies suggest a lower one" if course.trouble else "; there were no anomalies"
    if tried.higher and tried.lower:
        return
    if tried.higher or tried.lower:
        off = -math.log(2) if tried.higher else math.log(2)
        why += f"; {'higher' if tried.higher else 'lower'} was rejected before, so the best rate may lie in the other direction"
    for factor in STEPS_OF_RATE:
        move = math.copysign(math.log(factor), off)
        speed = math.exp(CURVATURE * (off**2 - (off - move) ** 2))
        new = float(f"{rate * math.exp(move):.3g}")
        yield RecipeChange(("optimizer", "lr"), rate, new, course.gain_of_speed(speed), why)
    warm = course.recipe.schedule.warmup_steps
    if warm > course.step:
        new_warm = 2 * warm if course.trouble else max(1, warm // 2)
        if new_warm <= course.recipe.schedule.trunk_steps.first:
            words = f"the warm-up is not over, with {course.trouble} anomalies so far"
            yield RecipeChange(("schedule", "warmup_steps"), warm, new_warm, course.gain_of_speed(1.05), words)


def mixture(course: Course) -> Iterator[RecipeChange]:
    """One domain's weight times 1.5 or 2/3: each domain's loss follows its own slope in its own tokens.

    The shares of supervised tokens that are best for the mean over domains are proportional to the slopes.
    """
    weights = course.recipe.mixture.weights
    named = {name: weight for name, weight in weights.items() if weight > 0 and course.domain_slopes.get(name)}
    if len(named) < 2:
        return
    for name, weight in named.items():
        for factor in (1.5, 2 / 3):
            new = float(f"{weight * factor:.3g}")
            moved = named | {name: new}
            shares = {n: (named[n] / sum(named.values()), moved[n] / sum(moved.values())) for n in named}
            gain = (
                OWN
                * sum(
                    course.domain_slopes[n] * math.log1p(course.ahead * (after / before - 1))
                    for n, (before, after) in shares.items()
                )
                / len(named)
            )
            slopes = ", ".join(f"{n} {course.domain_slopes[n]:.3f}" for n in named)
            before, after = shares[name]
            why = (
                f"by domain the loss falls by {slopes} bits per byte for e times the tokens; {name} has {before:.0%} of the "
                f"tokens and would have {after:.0%}"
            )
            yield RecipeChange(("mixture", "weights", name), weight, new, gain, why)


def batch(course: Course) -> Iterator[RecipeChange]:
    """Half the batch where it is beyond the noise scale: tokens needed grow as 1 + batch / scale (arXiv 1812.06162 §2.3)."""
    sequences, scale = course.recipe.batch.sequences, course.noise_scale
    if scale and course.supervised and sequences % 2 == 0 and not course.recipe.batch.warmup:
        share = course.supervised / scale
        speed = (1 + share) / (1 + share / 2)
        why = (
            f"the gradient noise scale is {scale:,.0f} supervised tokens and a step has {course.supervised:,.0f}: half the "
            f"batch needs {1 - 1 / speed:.0%} fewer tokens for the same progress"
        )
        yield RecipeChange(("batch", "sequences"), sequences, sequences // 2, course.gain_of_speed(speed), why)


def schedule(course: Course) -> Iterator[RecipeChange]:
    """A longer anneal where it is short."""
    rule = course.recipe.schedule
    share = rule.anneal_steps / (rule.anneal_steps + rule.trunk_steps.later)
    if share < LONG_ENOUGH:
        why = f"the anneal is {share:.0%} of the steps of a release; up to about {LONG_ENOUGH:.0%} a longer one gains"
        new = math.ceil(1.5 * rule.anneal_steps)
        yield RecipeChange(("schedule", "anneal_steps"), rule.anneal_steps, new, course.gain_of_speed(1.03), why)
    if rule.shape != "1-sqrt":
        why = "1 − sqrt ends lower than other tails (arXiv 2405.18392 §3)"
        yield RecipeChange(("schedule", "shape"), rule.shape, "1-sqrt", course.gain_of_speed(1.03), why)


def regularisers(course: Course) -> Iterator[RecipeChange]:
    """Clipping, z-loss, weight decay: tried when the record shows that they have an effect; the predicted gains are guesses."""
    stability, decay = course.recipe.stability, course.recipe.optimizer.weight_decay
    if course.clipped > 0.5 and not course.trouble:
        why = f"{course.clipped:.0%} of the steps are clipped, without any anomaly"
        gain = course.gain_of_speed(1 + 0.1 * course.clipped)
        yield RecipeChange(("stability", "grad_clip"), stability.grad_clip, 2 * stability.grad_clip, gain, why)
    if course.trouble:
        why = f"{course.trouble} anomalies: a stronger z-loss may avoid them"
        new = 10 * stability.z_loss or 1e-4
        yield RecipeChange(("stability", "z_loss"), stability.z_loss, new, course.gain_of_speed(1.03), why)
    elif course.z_share > 0.01 and stability.z_loss:
        why = f"the z-loss is {course.z_share:.1%} of the loss: a weaker one leaves more of the gradient to the loss itself"
        yield RecipeChange(
            ("stability", "z_loss"), stability.z_loss, stability.z_loss / 10, course.gain_of_speed(1.03), why
        )
    for factor in (2.0, 0.5):
        why = "no measurement suggests a value of the weight decay before it is tried"
        gain = course.gain_of_speed(1.01)
        yield RecipeChange(("optimizer", "weight_decay"), decay, (decay or 0.05) * factor, gain, why)
