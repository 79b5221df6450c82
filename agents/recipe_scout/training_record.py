"""Makes the record of a trunk's training: facts from its metrics, on which the scout's predictions rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from trainer.contract.recipe import Recipe

LEAST_SLOPE = 0.01  # bits per byte for e times the tokens: a flat loss does not prove that nothing can be gained
TROUBLE = ("loss_spike", "grad_norm_jump", "divergence", "non_finite", "skipped_outlier")  # signs of too high a rate
SAMPLED = 24  # lines of the metrics that are shown
SHOWN = ("step", "loss", "lr", "grad_norm", "z_loss", "noise_scale", "tokens_per_s")
Lines = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class TrainingRecord:
    """The record of a trunk's training. Losses are in bits per byte. A slope is the fall of the loss for e times the tokens, over the later
    half of the metrics."""

    recipe: Recipe
    path: str  # of the recipe in the repository
    step: int  # of the trunk
    tokens: float  # positions trained on so far
    judged_tokens: float  # positions of one of the gate's runs
    least_gain: float  # bits per byte that the gate asks for at least
    may_change: Callable[[str], bool]  # True if patches may change this key
    slope: float
    domain_slopes: dict[str, float] = field(default_factory=dict)
    noise_scale: float | None = None  # gradient noise scale in supervised tokens, arXiv 1812.06162
    supervised: float = 0.0  # tokens a step
    clipped: float = 0.0  # share of the steps with a clipped gradient
    z_share: float = 0.0  # of the loss
    trouble: int = 0  # anomalies that a lower rate may avoid
    sample: tuple[str, ...] = ()  # lines of the record for a reader, oldest first

    @property
    def gate_run_share_of_tokens(self) -> float:
        """The tokens of one of the gate's runs, as a share of all tokens that its weights were trained on."""
        return self.judged_tokens / (self.tokens + self.judged_tokens)

    def predict_gain_if_token_is_worth(self, token_worth: float) -> float:
        """Bits per byte gained when each token of the judged run is worth ``token_worth`` tokens, by the loss's slope."""
        return self.slope * math.log1p(self.gate_run_share_of_tokens * (token_worth - 1))


def make_training_record(
    recipe: Recipe,
    path: str,
    lines: Lines,
    anomalies: Mapping[str, int],
    bytes_per_token: float,
    judged_steps: int,
    least_gain: float,
    may_change: Callable[[str], bool] = lambda key: True,
) -> TrainingRecord:
    """Make the record of a trunk. ``lines``: of metrics.jsonl, oldest first. ``anomalies``: the number of each kind. ``bytes_per_token``: bytes
    of text for each token. ``judged_steps``: the steps of one of the gate's runs."""
    step = int(lines[-1]["step"]) + 1
    later = lines[len(lines) // 2 :]
    bits = 1 / math.log(2) / bytes_per_token
    domains = {key.removeprefix("loss/") for line in lines for key in line if key.startswith("loss/")}
    scales = [line["noise_scale"] for line in later if line.get("noise_scale")]
    norms = [line["grad_norm"] for line in later if line.get("grad_norm") is not None]
    losses = [line["loss"] for line in later if line.get("loss")]
    z_losses = [line["z_loss"] for line in later if line.get("z_loss") is not None]
    supervised = [b["supervised_tokens"] - a["supervised_tokens"] for a, b in zip(later, later[1:], strict=False)]
    return TrainingRecord(
        recipe=recipe,
        path=path,
        step=step,
        tokens=recipe.count_tokens_between(0, step),
        judged_tokens=recipe.count_tokens_between(step, step + judged_steps),
        least_gain=least_gain,
        may_change=may_change,
        slope=fit_log_step_slope(later, "loss") * bits,
        domain_slopes={name: fit_log_step_slope(later, f"loss/{name}") * bits for name in sorted(domains)},
        noise_scale=median(scales) if scales else None,
        supervised=fmean(supervised) if supervised else 0.0,
        clipped=fmean(norm > recipe.stability.grad_clip for norm in norms) if norms else 0.0,
        z_share=fmean(z_losses) / fmean(losses) if z_losses and losses else 0.0,
        trouble=sum(anomalies.get(kind, 0) for kind in TROUBLE),
        sample=format_metrics_sample(lines),
    )


def format_metrics_sample(lines: Lines) -> tuple[str, ...]:
    """Some lines of the metrics in short form: more of them from the start, where the loss falls fast, and always the last one."""
    places = {round(len(lines) ** (i / SAMPLED)) - 1 for i in range(SAMPLED)} | {len(lines) - 1}
    said = []
    for place in sorted(places):
        line = lines[place]
        keys = [*SHOWN, *(key for key in line if key.startswith("loss/"))]
        said.append(", ".join(f"{key} {line[key]:.4g}" for key in keys if isinstance(line.get(key), (int, float))))
    return tuple(said)


def fit_log_step_slope(lines: Lines, key: str) -> float:
    """−d value / d ln(step) by least squares, at least ``LEAST_SLOPE``. All steps have about as many tokens, so it holds for tokens too."""
    points = [(math.log(line["step"] + 1), line[key]) for line in lines if line.get(key) is not None]
    if len(points) < 3:
        return LEAST_SLOPE
    mean_x, mean_y = (fmean(values) for values in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    fall = -sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    return max(fall, LEAST_SLOPE)
