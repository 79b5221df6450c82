"""The models whose steps are timed: as published runs have them, and in the shipped recipe format; a tiny one for ``--dry``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainer.contract.recipe import Recipe

SCHEDULE = {"warmup_steps": 10, "trunk_steps": {"first": 1000, "later": 1000}, "anneal_steps": 100}


@dataclass(frozen=True)
class Model:
    about: str
    shape: dict[str, int]
    sequences: int  # of a step, all at once; halved until a step fits

    def recipe(self, name: str, precision: str, sequences: int | None = None) -> Recipe:
        """Raises: RecipeError, where the schema does not know the precision."""
        raw: dict[str, Any] = {
            "name": name.replace(".", "-"),
            "precision": precision,
            "model": self.shape,
            "mixture": {"weights": {"*": 1.0}},
            "batch": {"sequences": sequences or self.sequences},
            "optimizer": {"lr": 3e-4},
            "schedule": SCHEDULE,
        }
        return Recipe.parse(raw, f"{name}, {precision}")


def sizes(*numbers: int) -> dict[str, int]:
    keys = ("layers", "d_model", "heads", "kv_heads", "head_dim", "d_ff", "vocab_size", "context")
    return dict(zip(keys, numbers, strict=True))


MODELS = {
    "0.6b": Model("Qwen3 0.6 B, tied", sizes(28, 1024, 16, 8, 128, 3072, 151_936, 8192), 2),
    "1b": Model("the 1 B class of benchmarks/training", sizes(16, 2048, 16, 8, 128, 8192, 32_768, 4096), 4),
    "100m": Model(
        "the demo's class on a GPU: llama-100m, with QK-norm", sizes(12, 768, 12, 4, 64, 2048, 32_000, 512), 64
    ),
}
DRY = {name: Model(f"tiny, for {name}", sizes(2, 32, 2, 1, 16, 64, 512, 64), 2) for name in MODELS}


def model_of(name: str, dry: bool) -> Model:
    return (DRY if dry else MODELS)[name]
