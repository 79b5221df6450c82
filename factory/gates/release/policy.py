"""``policies/gates/release.yaml``: the conditions under which a candidate becomes the champion."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from factory.core.policy_file import Count, Share, StrictPolicy, load_policy

Level = Annotated[float, Field(gt=0, lt=0.5)]
NotNegative = Annotated[float, Field(ge=0)]


class TargetPolicy(StrictPolicy):
    """The measure that must get better."""

    weights: dict[str, NotNegative] = Field(default_factory=dict)
    """The weight of each domain's gain in bits per byte. Domains that are not named have 0. Empty: all domains have the same weight."""
    alpha: Level = 0.05
    """The probability that any candidate is promoted over a champion without being better. Comparison k with the champion has the level
    alpha / (k (k + 1)): the first has a half of alpha (the lower end of a 95 % interval), the second a sixth, all together alpha."""


class GuardsPolicy(StrictPolicy):
    """The measures that must not get worse: bits per byte of every domain, and cloze. The lower bound of each gain must be above −δ, with a Holm
    correction over all guards. Cloze is a guard if an equally good model fails it at most once in five. Otherwise it is set aside: it rejects a
    candidate only for a shown loss."""

    bits_per_byte_margin: NotNegative = 0.02
    """The allowed loss in bits per byte since the best release of the line; twice the noise of measurement or replicas, if that is larger. δ is the
    part of it that earlier releases left, but at least twice the noise floor of the measurement."""
    cloze_margin: NotNegative = 0.15
    """The allowed loss as a share of cloze items. If cloze is set aside, the verdict says how many items it would need with this margin."""
    alpha: Level = 0.05
    """The probability that a candidate that lost too much passes its guards, for all guards together."""
    noise_floor_max: NotNegative = 0.02
    """The largest noise floor in bits per byte. A noisier measurement is not evidence. The replicas' noise counts at most as this much."""


class OverfittingLimits(StrictPolicy):
    """How far the gains on two kinds of held-out documents may differ before a candidate counts as fitted to one kind."""

    alpha: Level = 0.01
    """The probability of a wrong hold, in each of the two comparisons, if the true gains are the same."""
    halves_margin: NotNegative = 0.02
    """The allowed difference, in bits per byte, between the gains on the sealed half and on the dev half. Both halves are drawn alike."""
    fresh_margin: NotNegative = 0.1
    """The gain on documents that arrived after the training may be smaller than on older documents by this many bits per byte. It may be smaller
    still if a gain on the new documents is shown, because new documents may be of another kind."""


class ReplicaNoisePolicy(StrictPolicy):
    """Replicas measure the effect of another order of the same data. A replica trains the champion's anneal again from the checkpoint before it, on
    other documents of its data plan, and is measured on the dev half. It costs as much as the anneal. It cannot become a candidate."""

    count: Annotated[int, Field(ge=0, le=20)] = 2
    """The number of replicas in addition to the anneal itself. 0: no replicas, and verdicts say that the noise is not known."""
    from_release: Count = 3
    """The first release whose anneal gets replicas, so that a short trial of the factory trains none."""
    every_releases: Count = 20
    """Replicas are trained again after this many releases, and when the recipe differs from that of the newest replicas."""
    steps_max: Share = 0.2
    """The most steps of replicas, as a share of the steps that were trained since the newest replicas. The trunk waits for replicas, and a recipe
    that changes with each release would need new replicas each time. So replicas wait until enough steps were trained."""


class FirstReleaseLimits(StrictPolicy):
    """The limits for a candidate when there is no champion yet."""

    bits_per_byte_max: Annotated[float, Field(gt=0)] = 4.0
    """The most bits per byte in every domain. A model above this limit has not learned to write."""
    below_trigram_by: Annotated[float, Field(ge=-100, le=100)] = 0.0
    """In every domain, bits per byte must be lower than the byte-trigram baseline's by more than this. A negative value allows more than the
    baseline's."""


class ReleasePolicy(StrictPolicy):
    """Every key is optional."""

    approval: Literal["automatic", "manual"] = "automatic"
    """manual: a person approves a promoted candidate before the release. The approval is for the hash of the judged export."""
    documents_min: Count = 8
    """The least number of held-out documents in every domain."""
    clusters_min: int = 8
    """The least number of document groups for a confidence interval. At least 2, because one group has no spread."""
    not_releasable_max: Share = 0.0
    """The allowed share of a candidate's supervised tokens whose licence, under the current ``licences`` in data.yaml, does not allow the
    release of a model."""
    sealed_looks_max: Annotated[float, Field(gt=0)] = 200.0
    """The allowed number of earlier candidates that read a document of the sealed half, on average over the suite. Each candidate reveals a little
    of the sealed half. New shards bring unread held-out documents and lower the number."""
    memorising: OverfittingLimits = Field(default_factory=OverfittingLimits)
    replicas: ReplicaNoisePolicy = Field(default_factory=ReplicaNoisePolicy)
    target: TargetPolicy = Field(default_factory=TargetPolicy)
    guards: GuardsPolicy = Field(default_factory=GuardsPolicy)
    first_release: FirstReleaseLimits = Field(default_factory=FirstReleaseLimits)

    @field_validator("clusters_min")
    @classmethod
    def _spread(cls, groups: int) -> int:
        if groups < 2:
            raise ValueError("at least 2: one document group has no spread, so nothing could be compared")
        return groups

    @classmethod
    def load(cls, path: Path) -> ReleasePolicy:
        """Raises: ConfigError naming the file and the key."""
        return load_policy(cls, path)
