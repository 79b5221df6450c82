"""``policies/gates/recipe.yaml``: the allowed changes of a recipe, their measurements, and the thresholds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from factory.core.policy_file import Count, StrictPolicy, load_policy
from factory.gates.time_limits import Ratio, Seconds

BitsPerByte = Annotated[float, Field(ge=0)]


class RunsPolicy(StrictPolicy):
    """Paired runs from the trunk's last checkpoint: one of the current and one of the proposed recipe, on the same data, each ending in an anneal."""

    seeds: Annotated[int, Field(ge=3)] = 4
    """The number of pairs of runs. Each pair has its own random seed for the data."""
    steps: Count = 64
    """Trunk steps of each baseline run. A candidate with another batch size gets the same number of tokens, not of steps."""
    tail_steps: Count = 64
    """Steps of the anneal to rate zero at the end of every run, before weights are compared. A short anneal favours a lower rate (numbers in
    docs/LOG.md)."""
    calmer_longer: Count = 2
    """The factor that makes ``steps`` and ``tail_steps`` larger if the candidate has a lower rate or a larger batch, which short runs favour."""
    wall_seconds: Seconds = 21600.0
    """Time limit of all runs together. Their code is approved and their steps are limited, so only a stalled machine reaches it."""
    confidence: Annotated[float, Field(gt=0.5, lt=1)] = 0.95
    """One-sided confidence of each bound. The tries share the confidence of the target's bound."""
    min_gain: BitsPerByte = 0.002
    """Bits per byte that the mean gain must exceed, even if the noise floor is lower."""
    domain_margin: BitsPerByte = 0.02
    """The allowed loss of a domain in bits per byte: the lower bound of the domain's gain must be above −domain_margin."""
    domain_weights: dict[str, Annotated[float, Field(ge=0)]] = {}
    """The weight of each domain's gain in the target. Domains that are not named have 0. Empty: all domains have the same."""
    max_slower: Ratio = 1.1
    """The largest ratio of the baseline's tokens per second to the candidate's."""
    max_memory: Ratio = 1.25
    """The largest ratio of the candidate's peak memory to the baseline's."""
    held_out_documents: Count = 16
    """Documents per domain on which the judge's own model scores weights."""
    held_out_bytes: Count = 2048
    """The most scored bytes of one document."""


class RecipePolicy(StrictPolicy):
    changes: list[str] = Field(min_length=1)
    """Recipe keys that a patch may change. The key of a mapping stands for all keys in the mapping."""
    runs: RunsPolicy = RunsPolicy()

    @classmethod
    def load(cls, path: Path) -> RecipePolicy:
        return load_policy(cls, path)

    def allows_change_of_key(self, key: str) -> bool:
        """True if ``changes`` has ``key`` (such as ``mixture.weights.code``) or a mapping that contains it."""
        return any(key == allowed or key.startswith(f"{allowed}.") for allowed in self.changes)
