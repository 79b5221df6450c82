"""What the release judge is told of a candidate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from factory.evals.statistics import Gain

FIRST_RELEASE = "first release"
Numbers = Mapping[str, float | None]


@dataclass(frozen=True)
class ReleaseEvidence:
    """Everything that the judge knows. What is None or absent was not measured."""

    against: str | None = None  # 'candidate:1', or FIRST_RELEASE
    domains: tuple[str, ...] = ()  # of the suite
    documents: Numbers = field(default_factory=dict)  # held-out, a domain
    bits_per_byte: Numbers = field(default_factory=dict)
    champion_bits_per_byte: Numbers = field(default_factory=dict)
    champion_failed: Mapping[str, str] = field(default_factory=dict)  # its checks without which it has no items
    trigram_bits_per_byte: Numbers = field(default_factory=dict)
    noise_floor: Numbers = field(
        default_factory=dict
    )  # the champion's, so that a candidate cannot widen its own margin
    replicas: int | None = None  # trainings that differ in the order of their data alone; None: none were measured yet
    replica_noise: Numbers = field(default_factory=dict)  # their standard deviation, a domain
    replica_target: float | None = None  # and of the target
    cloze_items: int | None = None
    cloze: float | None = None  # share right
    champion_cloze: float | None = None
    checks: Mapping[str, tuple[bool | None, str]] = field(
        default_factory=dict
    )  # name → (ok, detail); ok is None where the check could not be made
    target: Gain | None = None
    guards: Mapping[str, Gain] = field(default_factory=dict)  # by domain, and CLOZE
    lost: Numbers = field(
        default_factory=dict
    )  # by guard: what the champion had lost already, since the best release of its line
    look: int | None = None  # 1: the first candidate that is judged against this champion
    sealed_looks: float | None = None  # candidates that read a document of the sealed half before, on average
    on_sealed: Gain | None = None  # the gains on the two halves of what is held out, in the domains that both have, and
    on_dev: Gain | None = None
    halves_gap: Gain | None = None  # the first less the second
    watched: int | None = None  # candidates of the line before it that it was compared with on both halves (``watch``)
    rise_since: int | None = (
        None  # that one of them since which the dev half rose most alone, and how much each half rose
    )
    rise_dev: Gain | None = None
    rise_sealed: Gain | None = None
    rise_gap: Gain | None = None
    fresh_documents: int | None = None  # held-out ones that were compared and arrived after its training
    older_documents: int | None = None  # and before
    on_fresh: Gain | None = None
    fresh_gap: Gain | None = None  # on these less on the others
    releasable: float | None = None  # share of the tokens it was trained on whose licence allows to release a model
    not_releasable: Numbers = field(default_factory=dict)  # by other licence, its share: for words alone
    disputed: float | None = None  # of that share, what also came under a licence that allows it: for words alone
    trained_on: Numbers = field(default_factory=dict)  # by domain, its share of the supervised tokens: for words alone
    candidate: int | None = None  # its number: for words alone
    anomalies: tuple[str, ...] | None = None  # of the training that it comes from: open ones, rewound segments

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def number(value: float | int | None) -> float | None:
    """The value when it is a finite number, else None: NaN is not evidence."""
    return (
        float(value)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        else None
    )
