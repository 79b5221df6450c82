"""What the release gate decides from: a candidate that is better, a first one, and either with something changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from factory.evals.parity import CHECKS
from factory.evals.statistics import Gain
from factory.gates.release.evidence import FIRST_RELEASE, ReleaseEvidence
from factory.gates.release.policy import ReleasePolicy

POLICY = ReleasePolicy()
Gain(0.0, 1.0, 8, 8.0).compute_confidence_bound(0.05)  # imports scipy, so that no property's deadline pays for it
DOMAINS = ("chat", "code", "docs")
MEASURES = (*DOMAINS, "cloze")


def gain(middle: float, spread: float = 0.01, clusters: int = 40) -> Gain:
    """With a 95 % interval of about ``spread`` to each side."""
    return Gain(middle, spread / 2.02, clusters, float(clusters))


def evidence(against: str = "candidate:1", target: float = 0.08, **guards: float) -> ReleaseEvidence:
    each = {name: gain(guards.get(name, 0.05)) for name in MEASURES}
    return ReleaseEvidence(
        against=against,
        domains=DOMAINS,
        documents=dict.fromkeys(DOMAINS, 50),
        bits_per_byte=dict.fromkeys(DOMAINS, 1.84),
        champion_bits_per_byte=dict.fromkeys(DOMAINS, 1.92),
        trigram_bits_per_byte=dict.fromkeys(DOMAINS, 2.6),
        noise_floor=dict.fromkeys(DOMAINS, 0.001),
        cloze_items=90,
        cloze=0.6,
        champion_cloze=0.55,
        checks=dict.fromkeys(CHECKS, (True, "fine")),
        target=gain(target),
        look=1,
        sealed_looks=3.0,
        on_sealed=gain(target),
        on_dev=gain(target),
        halves_gap=gain(0.0),
        watched=0,
        fresh_documents=20,
        older_documents=60,
        on_fresh=gain(target),
        fresh_gap=gain(0.0),
        lost=dict.fromkeys(MEASURES, 0.0),
        guards=each,
        anomalies=(),
        releasable=1.0,
    )


FIRST = replace(
    evidence(FIRST_RELEASE),
    target=None,
    guards={},
    champion_bits_per_byte={},
    champion_cloze=None,
    noise_floor={},
    look=None,
    lost={},
    on_sealed=None,
    on_dev=None,
    halves_gap=None,
    watched=None,
    fresh_documents=None,
    older_documents=None,
    on_fresh=None,
    fresh_gap=None,
)


def changed(base: ReleaseEvidence, field: str, key: str, value: Any) -> ReleaseEvidence:
    return replace(base, **{field: {**getattr(base, field), key: value}})
