"""``policies/gates/recipe.yaml``: which changes of a recipe may be tried, how they are measured, what they must show."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from factory.core.policy_file import Count, StrictPolicy, load_policy
from factory.gates.patience import Ratio, Seconds

BitsPerByte = Annotated[float, Field(ge=0)]


class RunsPolicy(StrictPolicy):
    """Paired runs from the trunk's last checkpoint: the recipe as it is and as proposed, on the same data, with an anneal tail."""

    seeds: Annotated[int, Field(ge=3)] = 4
    """Pairs of runs; each pair draws its data by a random seed of its own."""
    steps: Count = 64
    """Of the trunk in each baseline run. A candidate with another batch gets as many tokens, not as many steps."""
    tail_steps: Count = 64
    """Of the anneal to rate zero that ends every run; weights are compared after it. Short ones favour a lower rate (docs/LOG.md has
    numbers)."""
    calmer_longer: Count = 2
    """How many times as long both parts are where the candidate's rate is lower or its batch larger, which short runs favour."""
    wall_seconds: Seconds = 21600.0
    """Time limit of all runs together. Their code is approved and their steps are counted, so only a stalled machine meets it."""
    confidence: Annotated[float, Field(gt=0.5, lt=1)] = 0.95
    """One-sided, of each bound; the target's is divided among the tries on it."""
    min_gain: BitsPerByte = 0.002
    """Bits per byte that the mean gain must exceed even where seeds differ by less."""
    domain_margin: BitsPerByte = 0.02
    """Bits per byte by which a domain may get worse: the lower bound of its gain lies above minus this."""
    domain_weights: dict[str, Annotated[float, Field(ge=0)]] = {}
    """Of each domain's gain in the target; domains not named count 0; empty: every domain the same."""
    max_slower: Ratio = 1.1
    """Baseline's tokens a second over the candidate's."""
    max_memory: Ratio = 1.25
    """Candidate's peak memory over the baseline's."""
    held_out_documents: Count = 16
    """Documents a domain that weights are scored on, by the judge's own model."""
    held_out_bytes: Count = 2048
    """Bytes scored of one document."""


class RecipePolicy(StrictPolicy):
    changes: list[str] = Field(min_length=1)
    """Keys that a patch may change; a mapping's key means all that it holds."""
    runs: RunsPolicy = RunsPolicy()

    @classmethod
    def load(cls, path: Path) -> RecipePolicy:
        return load_policy(cls, path)

    def allows(self, key: str) -> bool:
        """Is ``key`` (such as ``mixture.weights.code``) one of ``changes``, or inside one?"""
        return any(key == allowed or key.startswith(f"{allowed}.") for allowed in self.changes)
