"""The data plan: the frozen list of token shards that a segment may read, and their mixture."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from kernels.contract.message import Message
from kernels.contract.strict import StrictSchema, make_known_words_hint, make_not_json_error, parse
from trainer.contract.errors import DataPlanError
from trainer.contract.recipe import MixturePhase, MixtureRecipe, Positive, Share

LATER_KEYS = ("masked", "reshuffled", "targets_in_every_batch")  # keys of a plan that the first plans did not have


class PlannedShard(StrictSchema):
    """A token shard and the generation it joined with."""

    id: str
    path: str
    generation: Annotated[int, Field(ge=0)]
    content: str = (
        ""  # id of the content at ``path`` if it replaced the shard's own: the same documents, some of them overwritten
    )
    moved: dict[str, Annotated[str, Field(pattern=r"^\d+(-\d+)?(,\d+(-\d+)?)*$")]] = {}
    """For each domain, rows of documents that belong to it instead of to the domain in the shard itself, such as '0-12,40'."""


@dataclass(frozen=True)
class Mixture:
    """Weights, and the steps that they apply to: [start, stop)."""

    key: str
    weights: Mapping[str, float]
    start: int
    stop: float

    def list_domains_without_documents(self, present_domains: Collection[str]) -> list[str]:
        """Domains that have a weight but no document. ``present_domains``: the domains that have documents."""
        return sorted(
            domain for domain, weight in self.weights.items() if weight > 0 and domain not in {*present_domains, "*"}
        )

    def has_domain_with_documents(self, present_domains: Collection[str]) -> bool:
        """True if some domain with documents has a weight above zero."""
        return any(self.weights.get(domain, self.weights.get("*", 0.0)) > 0 for domain in present_domains)

    def select_weights_of_present_domains(self, present_domains: Collection[str]) -> dict[str, float]:
        """The weights without domains that have no document."""
        absent = self.list_domains_without_documents(present_domains)
        return {domain: weight for domain, weight in self.weights.items() if domain not in absent}


class DataPlan(StrictSchema):
    """Token shards and their mixture. The plan's id is the SHA-256 of its canonical JSON."""

    token_shards: Annotated[list[PlannedShard], Field(min_length=1)]
    weights: dict[str, Annotated[float, Field(ge=0)]]  # share of supervised tokens by domain; "*": all others
    phases: list[MixturePhase] = []  # weights that take over from a step on
    replay: Share = 0.0  # share of a domain's tokens from generations before the newest
    max_epochs: Positive = 1
    seed: Annotated[int, Field(ge=0)] = 0
    masked: list[str] = []  # keys of documents that carry no loss; rows, order and the loss's denominator do not change
    reshuffled: Annotated[int, Field(ge=0)] = (
        0  # another number makes other documents next; a sampler state stays valid
    )
    # If true, rows that would make a batch without any token that carries loss are passed over. False in plans from before December 2026,
    # whose order stays as it was; a step with such a batch makes no update.
    targets_in_every_batch: bool = False

    @model_validator(mode="after")
    def _possible(self) -> DataPlan:
        ids = [shard.id for shard in self.token_shards]
        if len(ids) != len(set(ids)):
            raise ValueError(Message("data_plan.shard_twice", "token_shards lists a shard twice"))
        return self

    @classmethod
    def make_for_segment(
        cls, mixture: MixtureRecipe, kind: Literal["trunk", "anneal"], shards: Iterable[tuple[Any, ...]], seed: int
    ) -> DataPlan:
        """The plan of a segment of that kind under a recipe's mixture; ``shards``: (id, path, generation), or these with content and moved."""
        own = mixture.anneal_weights if kind == "anneal" else None
        return cls(
            token_shards=[PlannedShard(**dict(zip(PlannedShard.model_fields, shard))) for shard in shards],
            weights=own or mixture.weights,
            phases=[] if own else mixture.phases,
            replay=mixture.replay,
            max_epochs=mixture.max_epochs,
            seed=seed,
        )

    @classmethod
    def from_json(cls, raw: str | Mapping[str, Any], where: str = "data_plan") -> DataPlan:
        """The plan from JSON text or parsed JSON. Raises: DataPlanError that names the key."""
        if isinstance(raw, str):
            try:
                raw = json.loads(raw)
            except ValueError as error:
                raise make_not_json_error(where, error, DataPlanError) from None
        return parse(cls, raw, where, DataPlanError)

    def to_json(self) -> str:
        """Canonical JSON: equal plans give equal text. ``LATER_KEYS`` and a shard's ``content`` and ``moved`` are left out if they are empty, so
        that older code can read the plan."""
        plan = self.model_dump(exclude={key for key in LATER_KEYS if not getattr(self, key)})
        for shard in plan["token_shards"]:
            for key in ("content", "moved"):
                if not shard[key]:
                    del shard[key]
        return json.dumps(plan, sort_keys=True, separators=(",", ":"))

    @property
    def id(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def find_weights_at_step(self, step: int) -> dict[str, float]:
        """The weights that apply at a step."""
        weights = self.weights
        for phase in self.phases:
            if phase.from_step <= step:
                weights = phase.weights
        return weights

    def list_mixtures(self) -> list[Mixture]:
        """All weights of the plan, in the order of their steps."""
        first = MixturePhase(from_step=0, weights=self.weights)
        keys = ["weights", *(f"phases.{i}.weights" for i in range(len(self.phases)))]
        stops = [*(float(phase.from_step) for phase in self.phases), math.inf]
        phases = zip(keys, [first, *self.phases], stops)
        return [Mixture(key, phase.weights, phase.from_step, stop) for key, phase, stop in phases]

    def refuse_missing_domains(self, present_domains: Collection[str]) -> None:
        """Raises: DataPlanError that names the first key with a weight for a domain of which no shard holds a document."""
        for mixture in self.list_mixtures():
            for domain in mixture.list_domains_without_documents(present_domains):
                hint = make_known_words_hint(domain, present_domains) if present_domains else ""
                raise DataPlanError(
                    "data_plan.absent_domain",
                    "{key}: no shard has a document of domain {domain!r}{near}",
                    key=f"{mixture.key}.{domain}",
                    domain=domain,
                    near=hint,
                )

    def copy_without_missing_domains(
        self, present_domains: Collection[str], first_step: int, last_step: int
    ) -> tuple[DataPlan, list[str]]:
        """The plan of the steps [first, last) without domains of which no shard holds a document, and their names.

        A phase whose domains have no documents is left out if it applies to none of these steps.
        Raises: DataPlanError that names the key, if such a phase applies to one of these steps.
        """
        mixtures = self.list_mixtures()
        for mixture in mixtures:
            applies = mixture.start < last_step and first_step < mixture.stop
            if applies and not mixture.has_domain_with_documents(present_domains):
                raise DataPlanError(
                    "data_plan.nothing_to_train_on",
                    "{key}: no shard has a document of {domains}. The domains in the shards: {held}.",
                    key=mixture.key,
                    domains=mixture.list_domains_without_documents(present_domains) or ["any domain"],
                    held=sorted(present_domains) or ["nothing"],
                )
        weights, *later = [mixture.select_weights_of_present_domains(present_domains) for mixture in mixtures]
        phases = [
            MixturePhase(from_step=phase.from_step, weights=kept)
            for phase, kept, mixture in zip(self.phases, later, mixtures[1:])
            if mixture.has_domain_with_documents(present_domains)
        ]
        if not mixtures[0].has_domain_with_documents(present_domains):
            weights = phases[0].weights  # the first weights apply to none of these steps, but a plan must have some
        left_out = sorted(
            {domain for mixture in mixtures for domain in mixture.list_domains_without_documents(present_domains)}
        )
        return self.model_copy(update={"weights": weights, "phases": phases}), left_out

    def copy_with_masked_documents(self, documents: Iterable[str]) -> DataPlan:
        """The plan with these documents, by their keys, masked as well: they carry no loss.

        >>> plan = DataPlan(token_shards=[PlannedShard(id="a", path="a", generation=0)], weights={"*": 1.0})
        >>> (plan.copy_with_masked_documents(["b:2", "b:1"]).copy_with_masked_documents(["b:1"]).masked,
        ...  plan.copy_with_masked_documents([]).id == plan.id)
        (['b:1', 'b:2'], True)
        """
        return self.model_copy(update={"masked": sorted({*self.masked, *documents})})
