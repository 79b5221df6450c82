"""The data plan: the frozen list of token shards a segment may read, and how they are mixed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from trainer.errors import DataPlanError
from trainer.recipe import MixtureRecipe, Phase, Positive, Share
from trainer.strict import Strict, parse


class PlannedShard(Strict):
    """A token shard and the generation it joined with."""

    id: str
    path: str
    generation: Annotated[int, Field(ge=0)]


class DataPlan(Strict):
    """Which token shards, in which mixture. Its id is the SHA-256 of its canonical JSON."""

    token_shards: Annotated[list[PlannedShard], Field(min_length=1)]
    weights: dict[str, Annotated[float, Field(ge=0)]]  # share of supervised tokens by domain; "*": all others
    phases: list[Phase] = []  # weights that take over from a step on
    replay: Share = 0.0  # share of a domain's tokens from generations before the newest
    max_epochs: Positive = 1
    seed: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _possible(self) -> DataPlan:
        ids = [shard.id for shard in self.token_shards]
        if len(ids) != len(set(ids)):
            raise ValueError("token_shards: a shard is listed twice")
        return self

    @classmethod
    def make(
        cls, mixture: MixtureRecipe, kind: Literal["trunk", "anneal"], shards: Iterable[tuple[str, str, int]], seed: int
    ) -> DataPlan:
        """The plan of a segment of that kind under a recipe's mixture; ``shards`` are (id, path, generation)."""
        annealed = kind == "anneal" and mixture.anneal_weights is not None
        return cls(
            token_shards=[PlannedShard(id=i, path=path, generation=g) for i, path, g in shards],
            weights=mixture.anneal_weights if annealed and mixture.anneal_weights else mixture.weights,
            phases=[] if annealed else mixture.phases,
            replay=mixture.replay,
            max_epochs=mixture.max_epochs,
            seed=seed,
        )

    @classmethod
    def from_json(cls, raw: str | Mapping[str, Any], where: str = "data_plan") -> DataPlan:
        """Raises: DataPlanError naming the key."""
        if isinstance(raw, str):
            try:
                raw = json.loads(raw)
            except ValueError as error:
                raise DataPlanError(f"{where}: no JSON: {error}") from None
        return parse(cls, raw, where, DataPlanError)

    def to_json(self) -> str:
        """Canonical: equal plans give equal text."""
        return json.dumps(self.model_dump(), sort_keys=True, separators=(",", ":"))

    @property
    def id(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def weights_at(self, step: int) -> dict[str, float]:
        """The weights that rule at a step."""
        weights = self.weights
        for phase in self.phases:
            if phase.from_step <= step:
                weights = phase.weights
        return weights
