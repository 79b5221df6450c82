"""``policies/gates/release.yaml``: when a candidate becomes the champion."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from factory.core.policy_file import Count, Share, StrictPolicy, load_policy

Level = Annotated[float, Field(gt=0, lt=0.5)]
NotNegative = Annotated[float, Field(ge=0)]


class Target(StrictPolicy):
    """What must get better."""

    weights: dict[str, NotNegative] = Field(default_factory=dict)
    """Weight of each domain's gain in bits per byte; domains not named have 0. Empty: all domains have the same."""
    alpha: Level = 0.05
    """Chance that any candidate that is judged against one champion is promoted without being better. Look k spends alpha / (k (k + 1)):
    the first half of it (the lower end of a 95 % interval), the second a sixth, all together alpha."""


class Guards(StrictPolicy):
    """What must not get worse: bits per byte of every domain, and cloze. Each lower bound, Holm-corrected over those that stand, must be above −δ.
    Cloze guards if an equally good model fails it at most once in five; else it informs, and rejects if a loss is shown."""

    bits_per_byte_margin: NotNegative = 0.02
    """A loss smaller than this, in bits per byte, is allowed, counted from the best release of the line; where twice the replicas' noise
    is larger, that is. δ is what is left of it, or twice the noise floor of the measurement, whichever is larger."""
    cloze_margin: NotNegative = 0.15
    """Share of cloze items. The verdict says with how many items cloze guards at it; that depends on the champion's share right."""
    alpha: Level = 0.05
    """Chance of passing any guard wrongly, all guards together."""
    noise_floor_max: NotNegative = 0.02
    """A measurement noisier than this, in bits per byte, is no evidence; of the replicas' noise at most so much widens δ."""


class Memorising(StrictPolicy):
    """How far gains on two kinds of held-out documents may lie apart before a candidate counts as fitted to one of them."""

    alpha: Level = 0.01
    """Chance of a hold where the gains are the same, for each of the two comparisons."""
    halves_margin: NotNegative = 0.02
    """Bits per byte between the gains on the sealed half and on the dev half, which are drawn alike."""
    fresh_margin: NotNegative = 0.1
    """Bits per byte by which the gain on documents that arrived after its training is less than on the others at most, where it is not shown to
    be better on these at all: they may be of another kind."""


class Replicas(StrictPolicy):
    """How far another order of the same data moves a model: the champion's anneal is trained again from the checkpoint that it branched off,
    on other documents of its data plan, and measured on the dev half. Each costs as much as an anneal; none can become a candidate."""

    count: Annotated[int, Field(ge=0, le=20)] = 2
    """Replicas that are trained beside the anneal itself; 0: none, and verdicts say that the noise is not known."""
    from_release: Count = 3
    """The first release of which replicas are trained: a first try of the factory ends before it."""
    every_releases: Count = 20
    """Again after so many releases, and when the recipe is another than that of the newest measurement."""
    steps_max: Share = 0.2
    """Of the steps that were trained since the newest measurement, the share that replicas may take at most: the trunk waits for them, and a
    recipe that changes with each release would have them trained each time. They wait until so much was trained."""


class FirstRelease(StrictPolicy):
    """What a candidate must reach when there is no champion to beat."""

    bits_per_byte_max: Annotated[float, Field(gt=0)] = 4.0
    """In every domain; a model above it has not learned to write."""
    below_trigram_by: Annotated[float, Field(ge=-100, le=100)] = 0.0
    """In every domain, bits per byte must be below the byte-trigram baseline's by more than this; negative: at most that much above."""


class ReleasePolicy(StrictPolicy):
    """Every key is optional."""

    approval: Literal["automatic", "manual"] = "automatic"
    """manual: a person approves a 'promote' before anything is released; the approval binds to the hash of what was judged."""
    documents_min: Count = 8
    """Held-out documents in every domain; fewer is no evidence."""
    clusters_min: int = 8
    """Document groups behind every interval; at least 2, as one has no spread."""
    not_releasable_max: Share = 0.0
    """Of the supervised tokens that a candidate was trained on: share from documents whose licence does not allow the release of a model,
    as ``licences`` in data.yaml says now."""
    sealed_looks_max: Annotated[float, Field(gt=0)] = 200.0
    """Candidates that read a document of the sealed half before, on average over the suite: each of them tells a little of what is in it. New
    shards, whose held-out documents nobody saw, bring it down."""
    memorising: Memorising = Field(default_factory=Memorising)
    replicas: Replicas = Field(default_factory=Replicas)
    target: Target = Field(default_factory=Target)
    guards: Guards = Field(default_factory=Guards)
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
