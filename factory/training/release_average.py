"""The average of a trained model with a release from which it descends: how much of the release keeps what it knew, and still learns.

On the straight line between a model and the same model trained further, both the new and the old abilities often stay good (WiSE-FT, arXiv 2109.01903
§3; model soups, arXiv 2203.05482). Each weight of ``RELEASE_WEIGHTS`` is measured on the dev half. The release's own bits per byte are the guards: of
the weights at which no domain is worse than the release beyond noise, that with the best mean over the target's domains is chosen. If there is none,
that which loses least. The gate then judges the candidate on the sealed half, like any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from factory.evals.export_folder import read_config, read_weights
from factory.evals.reference_model import ReferenceModel
from factory.training.held_out_loss import HeldOutLossMeter, ProgressCallback

RELEASE_WEIGHTS = (0.1, 0.3, 0.5, 0.7, 0.9)  # one of these is chosen; 0 and 1 are measured beside them
NOISE_FLOORS = (
    2  # a domain may be worse by so many noise floors, which is also the least margin of the release gate's guards
)


@dataclass(frozen=True)
class MeasuredAverage:
    """An average on the dev half, in bits per byte."""

    release_weight: float  # 1: the release itself; 0: the trained model itself
    mean: float  # over the domains of the target
    bits_per_byte: dict[str, float]  # by domain
    lost: dict[str, float]  # by domain: how much worse than the release, beyond noise; only domains that are worse


@dataclass(frozen=True)
class MeasuredAverages:
    """The averages from the release to the trained model. ``noise``: the noise floor by domain, in bits per byte."""

    averages: list[MeasuredAverage]
    noise: dict[str, float]


def measure_release_averages(
    meter: HeldOutLossMeter, release: Path, trained: Path, advance: ProgressCallback = lambda _: None
) -> MeasuredAverages:
    """Measure the averages of two exports at weights 1, 0 and ``RELEASE_WEIGHTS`` of the release. Holds the weights of two models in memory.

    An export in bf16 rounds both models before the mean, and the made candidate after it; the difference is one rounding. All are measured with the
    trained model's context. Raises: ExportError; InputError when a loss is not finite.
    """
    spec, before = read_config(trained), read_config(release)
    model = ReferenceModel(spec, read_weights(release, before))
    guards, items = meter.measure_domains(model, release, advance)
    noise = meter.measure_noise(model, items, advance)
    del model
    found = []
    for weight in (1.0, *sorted(RELEASE_WEIGHTS, reverse=True), 0.0):
        weights = read_weights(trained, spec)
        if weight:
            for name, tensor in read_weights(release, before).items():
                weights[name] = weights[name].mul(1 - weight).add_(tensor, alpha=weight)
        bits, _ = meter.measure_domains(ReferenceModel(spec, weights), trained, advance)
        del weights  # before the next two are read
        found.append(_compare(weight, bits, guards, noise, meter.compute_mean(bits)))
    return MeasuredAverages(found, noise)


def _compare(
    weight: float, bits: dict[str, float], guards: Mapping[str, float], noise: Mapping[str, float], mean: float
) -> MeasuredAverage:
    """The measurement with what each domain lost. ``guards``: bits per byte of the release."""
    worse = {domain: bits[domain] - guards[domain] - NOISE_FLOORS * noise[domain] for domain in guards}
    return MeasuredAverage(weight, mean, bits, {domain: loss for domain, loss in worse.items() if loss > 0})


def choose_release_weight(averages: Sequence[MeasuredAverage]) -> MeasuredAverage:
    """The average with the best mean among those that lost nothing; else that whose largest loss is the smallest.

    >>> worse = MeasuredAverage(0.1, 1.0, {"old": 2.1, "new": 1.0}, {"old": 0.1})
    >>> kept = MeasuredAverage(0.5, 1.2, {"old": 2.0, "new": 1.2}, {})
    >>> choose_release_weight([worse, kept]).release_weight, choose_release_weight([worse]).release_weight
    (0.5, 0.1)
    """
    return min(averages, key=lambda one: (max(one.lost.values(), default=0.0), one.mean))
