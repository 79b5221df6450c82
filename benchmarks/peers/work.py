"""What every side trains: one model, the same rows of packed documents in the same order, one recipe.

It imports no trainer: the memory of the other sides shall hold none of ours.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.contract.plan.spec import SegmentSpec
    from trainer.contract.recipe import Recipe

NO_TARGET = -100  # transformers' label of a position without loss
SHAPES: dict[str, dict[str, Any]] = {
    # config.json of HuggingFaceTB/SmolLM2-135M, whose 134.5 M weights are those of SmolLM2-135M-Instruct too
    "smollm2-135m": {
        "vocab_size": 49152, "d_model": 576, "layers": 30, "heads": 9, "kv_heads": 3, "head_dim": 64, "d_ff": 1536,
    },
    "tiny": {"vocab_size": 512, "d_model": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "d_ff": 128},
}  # fmt: skip
OF_ALL_SHAPES = {"rope_theta": 100_000.0, "norm_eps": 1e-5, "qk_norm": False, "family": "llama"}


@dataclass(frozen=True)
class Work:
    """What all sides train. A step has ``rows`` rows of ``context`` tokens."""

    shape: str  # a key of ``SHAPES``
    context: int
    rows: int
    steps: int
    precision: str  # fp32 · bf16
    lr: float = 3e-4
    seed: int = 1
    layers: int | None = None  # instead of the shape's own

    @classmethod
    def load(cls, folder: Path) -> Work:
        return cls(**json.loads((folder / "work.json").read_text()))

    @property
    def tokens_per_step(self) -> int:
        return self.rows * self.context

    def recipe(self, compile: bool = True, micro: int | None = None, recompute: str = "none") -> Recipe:
        """Constant rate, no decay and no z-loss, so that all sides make the same updates. ``micro``: rows of one forward and backward pass."""
        from trainer.contract.recipe import Recipe

        fewer = {"layers": self.layers} if self.layers else {}
        return Recipe.parse(
            {
                "name": "peers",
                "seed": self.seed,
                "precision": self.precision,
                "compile": compile,
                "checkpoint_every": self.steps,
                "model": SHAPES[self.shape] | OF_ALL_SHAPES | {"context": self.context} | fewer,
                "mixture": {"weights": {"*": 1.0}},
                "batch": {"sequences": self.rows, "micro_sequences": micro},
                "optimizer": {"lr": self.lr, "weight_decay": 0.0},
                "schedule": {"warmup_steps": 0, "trunk_steps": {"first": self.steps, "later": 1}, "anneal_steps": 1},
                "stability": {"z_loss": 0.0, "noise_scale_every": 0},
                "parallel": {"recompute": recompute},
            }
        )

    def segment(self, folder: Path, recipe: Recipe, kernels: Path, initial: Path | None) -> SegmentSpec:
        """Of all steps, on the token shard in ``folder``."""
        from trainer.contract.data.data_plan import DataPlan
        from trainer.contract.plan.spec import SegmentSpec

        (shard,) = (folder / "shard").iterdir()
        plan = DataPlan.make_for_segment(recipe.mixture, "trunk", [(shard.name, str(shard), 0)], recipe.seed)
        return SegmentSpec(
            kind="trunk",
            recipe=recipe,
            data_plan=plan,
            first_step=0,
            last_step=self.steps,
            initial_checkpoint=str(initial) if initial else None,
            kernels=str(kernels),
        )


def first_checkpoint(folder: Path) -> Path:
    return folder / "checkpoints" / "step-00000000"
