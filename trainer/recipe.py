"""The recipe: model, mixture, batch, optimiser, schedule. One strict schema; the impossible is refused here, by key."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from trainer.errors import RecipeError
from trainer.strict import Strict, parse, read_yaml

Positive = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class ModelRecipe(Strict):
    """The shape of a decoder whose maths is that of ``Qwen3ForCausalLM`` with tied embeddings."""

    vocab_size: Positive
    d_model: Positive
    layers: Positive
    heads: Positive  # query heads
    kv_heads: Positive  # key/value heads; each serves heads / kv_heads query heads
    head_dim: Annotated[int, Field(gt=0, multiple_of=2)]
    d_ff: Positive
    context: Annotated[int, Field(ge=8)]  # positions in a row
    rope_theta: Annotated[float, Field(gt=0)] = 10_000.0
    norm_eps: Annotated[float, Field(gt=0)] = 1e-6

    @model_validator(mode="after")
    def _possible(self) -> ModelRecipe:
        if self.heads % self.kv_heads:
            raise ValueError(f"model.heads ({self.heads}) is no multiple of model.kv_heads ({self.kv_heads})")
        return self

    @property
    def matmul_parameters(self) -> int:
        """Weights that every position is multiplied with, the output head among them."""
        attention = self.d_model * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.d_model * self.d_ff) + self.vocab_size * self.d_model

    @property
    def parameters(self) -> int:
        """All weights; the tied embedding is counted once."""
        return self.matmul_parameters + self.layers * 2 * (self.d_model + self.head_dim) + self.d_model

    def flops_per_token(self) -> float:
        """Forward and backward, multiply and add counted apart: 6 N + 6 L H K T, causal half of the score matrix.

        PaLM (arXiv 2204.02311) appendix B, with the masked half of attention left out.
        """
        return 6.0 * self.matmul_parameters + 6.0 * self.layers * self.heads * self.head_dim * self.context


class Phase(Strict):
    """The mixture from a step on."""

    from_step: Annotated[int, Field(ge=0)]
    weights: dict[str, Annotated[float, Field(ge=0)]]


class MixtureRecipe(Strict):
    """Shares of *supervised* tokens by domain. ``"*"`` stands for every domain not named, by their size."""

    weights: dict[str, Annotated[float, Field(ge=0)]]
    phases: list[Phase] = []  # weights that take over from a step of the trunk on
    anneal_weights: dict[str, Annotated[float, Field(ge=0)]] | None = None  # for anneal branches; null: as the trunk
    replay: Share = 0.3  # share of a domain's tokens drawn from earlier generations while new data lasts
    max_epochs: Positive = 4  # no document is seen more often than this

    @model_validator(mode="after")
    def _possible(self) -> MixtureRecipe:
        named = [("weights", self.weights)] + [(f"phases.{i}.weights", p.weights) for i, p in enumerate(self.phases)]
        if self.anneal_weights is not None:
            named.append(("anneal_weights", self.anneal_weights))
        for key, weights in named:
            if sum(weights.values()) <= 0:
                raise ValueError(f"mixture.{key}: no domain has a weight above zero")
        steps = [phase.from_step for phase in self.phases]
        if steps != sorted(set(steps)):
            raise ValueError("mixture.phases: from_step must rise from phase to phase")
        return self


class BatchRecipe(Strict):
    """One optimiser step."""

    sequences: Positive  # rows of ``model.context`` positions, over all ranks
    micro_sequences: Positive | None = None  # rows of one forward and backward on one rank; null: all at once

    def rows_per_rank(self, ranks: int) -> int:
        """Raises: RecipeError when the batch cannot be shared evenly."""
        if self.sequences % ranks:
            raise RecipeError(f"batch.sequences ({self.sequences}) does not divide by the {ranks} ranks")
        rows = self.sequences // ranks
        if self.micro_sequences is not None and rows % self.micro_sequences:
            raise RecipeError(
                f"batch.micro_sequences ({self.micro_sequences}) does not divide the {rows} sequences of a rank"
            )
        return rows


class OptimizerRecipe(Strict):
    """AdamW with decoupled decay (arXiv 1711.05101); embeddings, norms and vectors are never decayed."""

    name: Literal["adamw"] = "adamw"
    lr: Annotated[float, Field(gt=0)]
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.1


class TrunkSteps(Strict):
    """Steps of a trunk segment."""

    first: Positive
    later: Positive


class ScheduleRecipe(Strict):
    """Warm-up–stable–decay: an open-ended trunk at the peak rate, and anneal branches off it (arXiv 2405.18392)."""

    warmup_steps: Annotated[int, Field(ge=0)]
    trunk_steps: TrunkSteps
    anneal_steps: Positive
    shape: Literal["1-sqrt", "linear", "cosine"] = "1-sqrt"
    final_lr_share: Share = 0.0  # the rate at the end of an anneal, as a share of the peak

    @model_validator(mode="after")
    def _possible(self) -> ScheduleRecipe:
        if self.warmup_steps > self.trunk_steps.first:
            raise ValueError(
                f"schedule.warmup_steps ({self.warmup_steps}) is more than trunk_steps.first ({self.trunk_steps.first})"
            )
        return self


class StabilityRecipe(Strict):
    """What keeps a run from breaking, and what counts as an anomaly."""

    grad_clip: Annotated[float, Field(gt=0)] = 1.0  # largest global gradient norm
    z_loss: Annotated[float, Field(ge=0)] = 1e-5  # weight of logsumexp², PaLM §5
    window: Annotated[int, Field(ge=8)] = 64  # steps the robust statistics look back on
    spike_deviations: Annotated[float, Field(gt=0)] = 8.0  # robust deviations above the median: an anomaly
    skip_deviations: Annotated[float, Field(gt=0)] = 40.0  # of the gradient norm: the update is skipped


class Recipe(Strict):
    """All that decides a run but its data, code and checkpoint."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$")]
    seed: Annotated[int, Field(ge=0)] = 1
    precision: Literal["fp32", "bf16"] = "bf16"  # of the forward and backward; weights and optimiser are fp32
    compile: bool = True  # torch.compile each block
    checkpoint_every: Positive = 200  # steps
    keep_checkpoints: Annotated[int, Field(ge=1)] = 2  # newest ones kept in a segment's folder
    export_dtype: Literal["fp32", "bf16"] = "fp32"
    model: ModelRecipe
    mixture: MixtureRecipe
    batch: BatchRecipe
    optimizer: OptimizerRecipe
    schedule: ScheduleRecipe
    stability: StabilityRecipe = StabilityRecipe()

    @classmethod
    def load(cls, path: Path | str) -> Recipe:
        """Raises: RecipeError naming the file and the key."""
        try:
            text = Path(path).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"{path}: cannot be read: {error}") from None
        return cls.parse(read_yaml(text, str(path), RecipeError), str(path))

    @classmethod
    def parse(cls, raw: object, where: str = "recipe") -> Recipe:
        """Raises: RecipeError naming ``where`` and the key."""
        return parse(cls, raw, where, RecipeError)

    @property
    def sha256(self) -> str:
        """Of the canonical JSON."""
        return hashlib.sha256(json.dumps(self.model_dump(), sort_keys=True).encode()).hexdigest()

    @property
    def tokens_per_step(self) -> int:
        return self.batch.sequences * self.model.context
