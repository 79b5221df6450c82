"""A small model, a run of it in this process, and Muon's iteration in fp64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.contract.registry import bind_ops
from kernels.newton_schulz import COEFFICIENTS
from tests.support.trainer.segments import MakeShard, plan_of, recipe_with, write_spec
from trainer.contract.plan.spec import SegmentSpec
from trainer.contract.recipe import Recipe
from trainer.model.transformer import Decoder
from trainer.parallel.ranks import Ranks
from trainer.run import SegmentRun

ALONE = Ranks(0, 1, torch.device("cpu"))


def make_model(recipe: Recipe | None = None, dtype: torch.dtype = torch.float32) -> Decoder:
    model = Decoder((recipe or recipe_with()).model, bind_ops({}, "cpu", dtype), dtype)
    model.initialise(seed=1)
    return model


def run_of(tmp_path: Path, make_shard: MakeShard, documents: int = 200, **changes: Any) -> SegmentRun:
    plan = plan_of(make_shard(counts={"code": 3 * documents, "docs": documents, "chat": documents}))
    folder = write_spec(tmp_path / "run", plan, recipe_with(**changes), last_step=10_000)
    return SegmentRun(SegmentSpec.load(folder), ALONE, None)


def iterated(values: Tensor, steps: int) -> Tensor:
    """The quintic on singular values, in fp64."""
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        values = a * values + b * values**3 + c * values**5
    return values
