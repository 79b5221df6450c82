"""Finds the start of the gates' training: the trunk's last checkpoint, with the recipe, data plan and kernels of the segment that wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from factory.computing.tuned_kernels import KERNELS
from factory.core import devices
from factory.ledger.ledger import Ledger, checkpoints, data_plans, segments
from factory.ledger.removals import replace_erased_token_shards
from kernels.contract.choice import resolve_auto_in_text


@dataclass(frozen=True)
class TrainingStart:
    """The trunk's last checkpoint, with the settings of the segment that wrote it."""

    checkpoint: Path
    step: int
    recipe: dict[str, Any]
    plan: dict[str, Any]
    kernels: Mapping[str, str] = field(default_factory=dict)  # op → the implementation that ``auto`` stands for
    commit: str = ""  # of the code that wrote it

    def resolve_kernels(self, code: Path) -> str:
        """Return the text of a checkout's ``kernels.yaml``, with each ``auto`` replaced by the implementation that the trunk uses."""
        return resolve_auto_in_text((code / KERNELS).read_bytes(), devices.get_device_kind(), self.kernels)


def find_training_start(ledger: Ledger) -> TrainingStart | None:
    """Return the trunk's last checkpoint. None: no trunk segment has finished yet."""
    row = ledger.select_first(
        sa.select(
            *(checkpoints.c.path, checkpoints.c.step, data_plans.c.plan),
            *(segments.c.recipe_json, segments.c.computing, segments.c.code_commit),
        )
        .join(segments, segments.c.id == checkpoints.c.segment)
        .join(data_plans, data_plans.c.id == segments.c.data_plan)
        .where(segments.c.kind == "trunk", segments.c.state == "done")
        .order_by(checkpoints.c.step.desc(), segments.c.id.desc())
        .limit(1)
    )
    if row is None:
        return None
    kernels = row["computing"]["kernels"] if row["computing"] else {}
    return TrainingStart(
        Path(row["path"]),
        row["step"],
        row["recipe_json"],
        replace_erased_token_shards(ledger, row["plan"]),
        kernels,
        row["code_commit"],
    )
