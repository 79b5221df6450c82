"""The changes that the scout may try, each with a reason from the record and a predicted gain in bits per byte.

A prediction is a guess that the gate may refute. For rates, batch and schedule, it says that each token is worth φ tokens, and the slope of
the loss turns φ into a gain. For the mixture, the slopes of the domains give the gain. The gate's paired runs decide.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from agents.core.yaml_edit import Scalar, format_yaml_value
from agents.recipe_scout.training_record import TrainingRecord
from kernels.contract.message import Message
from trainer.contract.plan.run_plan import compute_deepseek_rule_lr

STEPS_OF_RATE = (2.0, 1.4)  # factors on the rate, the larger one first
CURVATURE = 0.25  # ln(φ) lost per squared ln(rate off its best): at twice the best rate a token is worth 11 % less
LONG_ENOUGH = 0.2  # share of a run that its anneal takes; a longer one gains no more (arXiv 2405.18392 §4)
OWN = 0.2  # share of a domain's slope that comes from its own tokens, not from any tokens; with 1, 0.023 was predicted and 0.001 measured


@dataclass(frozen=True)
class RecipeChange:
    """One changed value of the recipe, and the reason."""

    path: tuple[str, ...]
    old: Scalar
    new: Scalar
    gain: float  # predicted, bits per byte
    why: str

    @property
    def key(self) -> str:
        return ".".join(self.path)

    @property
    def title(self) -> str:
        return f"{self.key} {format_yaml_value(self.old)} → {format_yaml_value(self.new)}"


@dataclass(frozen=True)
class RejectedDirections:
    """The directions in which the gate rejected a change of one key from its present value."""

    higher: bool = False
    lower: bool = False
    rejected: int = 0


def suggest_changes(record: TrainingRecord, tried_rate: RejectedDirections) -> list[RecipeChange]:
    """Every change for which the record gives a reason, largest predicted gain first."""
    sources = (
        suggest_rate_changes(record, tried_rate),
        suggest_mixture_changes(record),
        suggest_batch_changes(record),
        suggest_schedule_changes(record),
        suggest_regulariser_changes(record),
    )
    return sorted((change for source in sources for change in source), key=lambda change: -change.gain)


def suggest_rate_changes(record: TrainingRecord, tried: RejectedDirections) -> Iterator[RecipeChange]:
    """Yield rates towards DeepSeek's rule (arXiv 2401.02954 §3.2), lower after anomalies, and away from a rejected direction."""
    rate = record.recipe.optimizer.lr
    tokens = record.tokens + record.judged_tokens
    rule = compute_deepseek_rule_lr(record.recipe.model, tokens)
    off = math.log(rule / rate) - 0.35 * min(record.trouble, 4)
    direction = ""
    if tried.higher and tried.lower:
        return
    if tried.higher or tried.lower:
        off = -math.log(2) if tried.higher else math.log(2)
        direction = Message(
            "recipe_scout.other_direction",
            "The gate rejected {rejected} before, so the best rate may lie in the other direction. ",
            rejected="a higher rate" if tried.higher else "a lower rate",
        )
    why = Message(
        "recipe_scout.rate",
        "{direction}DeepSeek's rule gives a learning rate of {rule:.2g} for this model and {tokens:.2g} tokens. The "
        "recipe has {rate:.2g}. The run had {anomalies:,|anomaly|anomalies} so far (an anomaly suggests a lower rate)",
        rule=rule,
        tokens=tokens,
        rate=rate,
        anomalies=record.trouble,
        direction=direction,
    )
    for factor in STEPS_OF_RATE:
        move = math.copysign(math.log(factor), off)
        speed = math.exp(CURVATURE * (off**2 - (off - move) ** 2))
        new = float(f"{rate * math.exp(move):.3g}")
        yield RecipeChange(("optimizer", "lr"), rate, new, record.predict_gain_if_token_is_worth(speed), why)
    warm = record.recipe.schedule.warmup_steps
    if warm > record.step:
        new_warm = 2 * warm if record.trouble else max(1, warm // 2)
        if new_warm <= record.recipe.schedule.trunk_steps.first:
            reason = Message(
                "recipe_scout.warm_up",
                "the warm-up is not over, and the run had {anomalies:,|anomaly|anomalies} so far",
                anomalies=record.trouble,
            )
            yield RecipeChange(
                ("schedule", "warmup_steps"), warm, new_warm, record.predict_gain_if_token_is_worth(1.05), reason
            )


def suggest_mixture_changes(record: TrainingRecord) -> Iterator[RecipeChange]:
    """Yield each domain's weight times 1.5 and times 2/3. Each domain's loss follows its own slope in its own tokens.

    The shares of supervised tokens that are best for the mean over domains are proportional to the slopes.
    """
    weights = record.recipe.mixture.weights
    named = {name: weight for name, weight in weights.items() if weight > 0 and record.domain_slopes.get(name)}
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
                    record.domain_slopes[n] * math.log1p(record.gate_run_share_of_tokens * (after / before - 1))
                    for n, (before, after) in shares.items()
                )
                / len(named)
            )
            slopes = ", ".join(f"{n} {record.domain_slopes[n]:.3f}" for n in named)
            before, after = shares[name]
            why = Message(
                "recipe_scout.mixture",
                "each time the number of trained tokens grows by a factor of e (2.72), the losses of the domains fall by "
                "these numbers of bits per byte: {slopes}. The change moves the share of {domain} from {before:.0%} to {after:.0%} of the tokens",
                slopes=slopes,
                domain=name,
                before=before,
                after=after,
            )
            yield RecipeChange(("mixture", "weights", name), weight, new, gain, why)


def suggest_batch_changes(record: TrainingRecord) -> Iterator[RecipeChange]:
    """Yield half the batch, if the noise scale was measured: the tokens needed grow as 1 + batch / scale (arXiv 1812.06162 §2.3)."""
    sequences, scale = record.recipe.batch.sequences, record.noise_scale
    if scale and record.supervised and sequences % 2 == 0 and not record.recipe.batch.warmup:
        share = record.supervised / scale
        speed = (1 + share) / (1 + share / 2)
        why = Message(
            "recipe_scout.batch",
            "the gradient noise scale is {scale:,.0f} supervised tokens, and a step has {step:,.0f} supervised "
            "tokens. With half the batch, the same progress needs {fewer:.0%} fewer tokens",
            scale=scale,
            step=record.supervised,
            fewer=1 - 1 / speed,
        )
        yield RecipeChange(
            ("batch", "sequences"), sequences, sequences // 2, record.predict_gain_if_token_is_worth(speed), why
        )


def suggest_schedule_changes(record: TrainingRecord) -> Iterator[RecipeChange]:
    """Yield a longer anneal if the anneal is short, and the shape 1 − sqrt."""
    rule = record.recipe.schedule
    share = rule.anneal_steps / (rule.anneal_steps + rule.trunk_steps.later)
    if share < LONG_ENOUGH:
        why = Message(
            "recipe_scout.anneal",
            "the anneal takes {share:.0%} of a release's steps. A longer anneal lowers the loss further, until "
            "the anneal takes about {enough:.0%} of the steps",
            share=share,
            enough=LONG_ENOUGH,
        )
        new = math.ceil(1.5 * rule.anneal_steps)
        yield RecipeChange(
            ("schedule", "anneal_steps"), rule.anneal_steps, new, record.predict_gain_if_token_is_worth(1.03), why
        )
    if rule.shape != "1-sqrt":
        why = Message(
            "recipe_scout.shape",
            "an anneal of the shape 1 − sqrt ends with a lower loss than other shapes (arXiv 2405.18392 §3)",
        )
        yield RecipeChange(
            ("schedule", "shape"), rule.shape, "1-sqrt", record.predict_gain_if_token_is_worth(1.03), why
        )


def suggest_regulariser_changes(record: TrainingRecord) -> Iterator[RecipeChange]:
    """Yield changes of clipping and z-loss if the record gives a reason, and of weight decay. The predicted gains are guesses."""
    stability, decay = record.recipe.stability, record.recipe.optimizer.weight_decay
    if record.clipped > 0.5 and not record.trouble:
        why = Message(
            "recipe_scout.clipping",
            "the gradient is clipped in {clipped:.0%} of the steps, and the run had no anomaly, so a higher "
            "limit may be safe",
            clipped=record.clipped,
        )
        gain = record.predict_gain_if_token_is_worth(1 + 0.1 * record.clipped)
        yield RecipeChange(("stability", "grad_clip"), stability.grad_clip, 2 * stability.grad_clip, gain, why)
    if record.trouble:
        why = Message(
            "recipe_scout.stronger_z_loss",
            "the run had {anomalies:,|anomaly|anomalies} so far, and a stronger z-loss may avoid further anomalies",
            anomalies=record.trouble,
        )
        new = 10 * stability.z_loss or 1e-4
        yield RecipeChange(
            ("stability", "z_loss"), stability.z_loss, new, record.predict_gain_if_token_is_worth(1.03), why
        )
    elif record.z_share > 0.01 and stability.z_loss:
        why = Message(
            "recipe_scout.weaker_z_loss",
            "the z-loss is {share:.1%} of the loss: a weaker z-loss leaves more of the gradient to the loss itself",
            share=record.z_share,
        )
        yield RecipeChange(
            ("stability", "z_loss"),
            stability.z_loss,
            stability.z_loss / 10,
            record.predict_gain_if_token_is_worth(1.03),
            why,
        )
    for factor in (2.0, 0.5):
        why = Message(
            "recipe_scout.weight_decay", "no measurement tells which weight decay is best: only a trial can tell"
        )
        gain = record.predict_gain_if_token_is_worth(1.01)
        yield RecipeChange(("optimizer", "weight_decay"), decay, (decay or 0.05) * factor, gain, why)
