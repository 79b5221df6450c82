"""What the recipe scout works from: the live recipe and the metrics of the trunk that it trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sqlalchemy as sa

from agents.recipe_scout.course import Course, course_of
from factory.code_loop.workbench import LiveWorkbench
from factory.gates.case import NOTHING_HELD_OUT
from factory.gates.patch.held_out import held_out_texts
from factory.gates.recipe.policy import RecipePolicy
from factory.gates.recipe_changes import unused_recipes, used_recipe
from factory.ledger.ledger import Ledger, anomalies
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow
from kernels.contract.strict_yaml import read_yaml
from trainer.contract.errors import RecipeError, TrainerError
from trainer.contract.json_lines import read_lines
from trainer.contract.recipe import Recipe

SEGMENTS = 4  # newest ones of the trunk whose metrics are read


def course(bench: LiveWorkbench) -> Course | str:
    """The trunk's course, or why there is nothing to work from. Raises: ConfigError."""
    workspace, ledger = bench.workspace, bench.ledger
    path = used_recipe(workspace)
    if unused := unused_recipes(workspace, [path]):
        return unused[0]
    if path not in bench.files(patchable=True):
        return f"the repository holds no {path} that a patch may change"
    try:
        recipe = Recipe.parse(read_yaml(bench.read(path), path, RecipeError), path)
    except TrainerError as error:
        return str(error)
    policy = RecipePolicy.load(workspace.policy("gates/recipe.yaml"))
    texts, _ = held_out_texts(policy.runs.held_out_documents, policy.runs.held_out_bytes, Plant(workspace, ledger))
    if not texts:
        return str(NOTHING_HELD_OUT["reasons"][0])
    newest = _trunk(ledger)
    lines = [line for segment in reversed(newest) for line in _record(Path(segment.folder))]
    if not lines:
        return "the trunk left no metrics to work from"
    return course_of(
        recipe,
        path,
        lines,
        _anomalies(ledger, [segment.id for segment in newest]),
        sum(text.bytes for text in texts) / sum(int(text.scored.sum()) for text in texts),
        policy.runs.steps + policy.runs.tail_steps,
        policy.runs.min_gain,
        policy.allows,
    )


def _trunk(ledger: Ledger) -> list[SegmentRow]:
    """Finished trunk segments, the newest first."""
    return SegmentRow.select(
        ledger, "WHERE kind = 'trunk' AND state = 'done' ORDER BY id DESC LIMIT :limit", limit=SEGMENTS
    )


def _record(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    return read_lines(path) if path.is_file() else []


def _anomalies(ledger: Ledger, numbers: list[int]) -> dict[str, int]:
    rows = ledger.rows(sa.select(anomalies.c.kind).where(anomalies.c.segment.in_(numbers)))
    return {kind: sum(row["kind"] == kind for row in rows) for kind in {row["kind"] for row in rows}}
