"""The evidence about a candidate, on which the release judge decides."""

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
    """All evidence that the judge has. A value that is None or absent was not measured."""

    against: str | None = None  # 'candidate:1', or FIRST_RELEASE
    domains: tuple[str, ...] = ()  # of the suite
    documents: Numbers = field(default_factory=dict)  # number of held-out documents, by domain
    bits_per_byte: Numbers = field(default_factory=dict)
    champion_bits_per_byte: Numbers = field(default_factory=dict)
    champion_failed: Mapping[str, str] = field(
        default_factory=dict
    )  # name of a failed check → detail; a champion with failed checks has no items to compare
    trigram_bits_per_byte: Numbers = field(default_factory=dict)
    noise_floor: Numbers = field(
        default_factory=dict
    )  # of the champion's measurement, so that a candidate cannot widen its own margin
    replicas: int | None = None  # trainings that differ only in the order of their data; None: not measured yet
    replica_noise: Numbers = field(default_factory=dict)  # their standard deviation, by domain
    replica_target: float | None = None  # their standard deviation of the target
    cloze_items: int | None = None
    cloze: float | None = None  # share of cloze items answered right
    champion_cloze: float | None = None
    checks: Mapping[str, tuple[bool | None, str]] = field(
        default_factory=dict
    )  # name → (ok, detail); ok is None if the check could not be made
    target: Gain | None = None
    guards: Mapping[str, Gain] = field(default_factory=dict)  # by domain, and CLOZE
    lost: Numbers = field(default_factory=dict)  # guard → the champion's loss since the best release of its line
    look: int | None = None  # 1: the first candidate that is judged against this champion
    sealed_looks: float | None = None  # earlier candidates that read a document of the sealed half, on average
    on_sealed: Gain | None = None  # gains on the two halves of the held-out documents, in the domains that both have
    on_dev: Gain | None = None
    halves_gap: Gain | None = None  # on_sealed − on_dev
    watched: int | None = None  # number of earlier candidates of the line with which it was compared on both halves
    rise_since: int | None = (
        None  # the one of them since which the dev half most clearly rose alone; the gains since then follow
    )
    rise_dev: Gain | None = None
    rise_sealed: Gain | None = None
    rise_gap: Gain | None = None
    fresh_documents: int | None = None  # number of compared held-out documents that arrived after its training
    older_documents: int | None = None  # number of those that arrived before
    on_fresh: Gain | None = None
    fresh_gap: Gain | None = None  # gain on fresh documents − gain on older ones
    releasable: float | None = None  # share of its supervised tokens whose licence allows the release of a model
    not_releasable: Numbers = field(default_factory=dict)  # shares of the other licences; only for messages
    disputed: float | None = (
        None  # share of the tokens for which another shard names a licence that allows it; only for messages
    )
    trained_on: Numbers = field(default_factory=dict)  # shares of the supervised tokens by domain; only for messages
    candidate: int | None = None  # its number; only for messages
    anomalies: tuple[str, ...] | None = None  # of its training: open anomalies, rewound segments

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_finite_number(value: float | int | None) -> float | None:
    """Return the value if it is a finite number, else None, because NaN is not evidence."""
    return (
        float(value)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        else None
    )
