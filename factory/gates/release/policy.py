"""``policies/gates/release.yaml``: when a candidate becomes the champion."""

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
    """The probability that some candidate is promoted over a champion without being better. Comparison k with the champion spends
    alpha / (k (k + 1)): the first a half (the lower end of a 95 % interval), the second a sixth, all together alpha."""


class GuardsPolicy(StrictPolicy):
    """The measures that must not get worse: bits per byte of every domain, and cloze. Each lower bound, Holm-corrected over the standing guards,
    must be above −δ. Cloze is a guard if an equally good model fails it at most once in five. Else it informs, and rejects only a shown loss."""

    bits_per_byte_margin: NotNegative = 0.02
    """The allowed loss in bits per byte since the best release of the line, or twice the replicas' noise if that is larger. δ is the rest of it,
    or twice the noise floor of the measurement if that is larger."""
    cloze_margin: NotNegative = 0.15
    """The allowed loss as a share of cloze items. The verdict names the number of items with which cloze is a guard at this margin."""
    alpha: Level = 0.05
    """The probability of wrongly passing any guard, for all guards together."""
    noise_floor_max: NotNegative = 0.02
    """A measurement with more noise than this, in bits per byte, is not evidence. The replicas' noise widens δ by at most this."""


class OverfittingLimits(StrictPolicy):
    """How far the gains on two kinds of held-out documents may differ before a candidate counts as fitted to one kind."""

    alpha: Level = 0.01
    """The probability of a hold if the gains are the same, for each of the two comparisons."""
    halves_margin: NotNegative = 0.02
    """The allowed difference, in bits per byte, of the gains on the sealed half and the dev half, which are drawn alike."""
    fresh_margin: NotNegative = 0.1
    """The allowed difference, in bits per byte, by which the gain on documents that arrived after the training is smaller than on older ones, if
    no gain on new documents is shown: new documents may be of another kind."""


class ReplicaNoisePolicy(StrictPolicy):
    """The effect of another order of the same data: the champion's anneal is trained again from the checkpoint before it, on other documents of
    its data plan, and measured on the dev half. Each replica costs as much as an anneal. A replica cannot become a candidate."""

    count: Annotated[int, Field(ge=0, le=20)] = 2
    """The number of replicas besides the anneal itself. 0: none, and verdicts say that the noise is not known."""
    from_release: Count = 3
    """The first release whose anneal gets replicas, so that a short trial of the factory trains none."""
    every_releases: Count = 20
    """Replicas are trained again after this many releases, and when the recipe differs from that of the newest measurement."""
    steps_max: Share = 0.2
    """The largest share that replicas may take of the steps since the newest measurement. The trunk waits for replicas, and a recipe that changes
    with each release would need new ones each time. So replicas wait until enough was trained."""


class FirstRelease(StrictPolicy):
    """The limits for a candidate when there is no champion yet."""

    bits_per_byte_max: Annotated[float, Field(gt=0)] = 4.0
    """The most bits per byte in every domain. A model above this limit has not learned to write."""
    below_trigram_by: Annotated[float, Field(ge=-100, le=100)] = 0.0
    """In every domain, bits per byte must be below the byte-trigram baseline's by more than this. Negative: less than this above it."""


class ReleasePolicy(StrictPolicy):
    """Every key is optional."""

    approval: Literal["automatic", "manual"] = "automatic"
    """manual: a person approves a 'promote' before the release. The approval binds to the hash of the judged export."""
    documents_min: Count = 8
    """The least number of held-out documents in every domain."""
    clusters_min: int = 8
    """The least number of document groups behind every interval. At least 2, because one group has no spread."""
    not_releasable_max: Share = 0.0
    """The allowed share of a candidate's supervised tokens whose licence, under the current ``trained_licences`` in data.yaml, does not allow the
    release of a model."""
    sealed_looks_max: Annotated[float, Field(gt=0)] = 200.0
    """The allowed number of earlier candidates that read a document of the sealed half, on average over the suite. Each candidate reveals a little
    of the sealed half. New shards bring unread held-out documents and lower the number."""
    memorising: OverfittingLimits = Field(default_factory=OverfittingLimits)
    replicas: ReplicaNoisePolicy = Field(default_factory=ReplicaNoisePolicy)
    target: TargetPolicy = Field(default_factory=TargetPolicy)
    guards: GuardsPolicy = Field(default_factory=GuardsPolicy)
    first_release: FirstRelease = Field(default_factory=FirstRelease)

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
