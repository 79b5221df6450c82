"""The recipe's key ``batch.micro_sequences``: how many rows of a step go through the model at once.

It changes only rounding and the use of caches. The hottest ops are measured with half as many rows and with twice as many;
the time of the rest of the step is assumed to stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agents.core.proposal import Edit, Proposal
from agents.core.workbench import MeasurementError, ReadError, Workbench
from agents.core.yaml_edit import change_recipe
from trainer.contract.errors import RecipeError

LEAST_SHARE = 0.05  # of the step: ops with less are not measured
MOST_OPS = 3


def propose(profile: Mapping[str, Any], workbench: Workbench, agent: str) -> Proposal | None:
    """The number of rows with the largest predicted gain; None without a gain, or when it cannot be measured."""
    recipe = profile["recipe"]
    batch = recipe.get("batch") or {}
    whole = batch.get("sequences", 1)
    now = batch.get("micro_sequences") or whole
    path = f"policies/recipes/{recipe.get('name')}.yaml"
    others = [rows for rows in (now // 2, 2 * now) if 0 < rows <= whole and whole % rows == 0]
    if not others:
        return None
    try:
        text = workbench.read(path)
        gains = {rows: _gain(profile, workbench, now, rows) for rows in others}
        best = max(gains, key=lambda rows: gains[rows])
        edited, _ = change_recipe(text, ("batch", "micro_sequences"), best if best < whole else None)
    except (MeasurementError, ReadError, RecipeError):
        return None  # no seconds left; a recipe of the workspace's own; one that cannot be edited in place
    if gains[best] <= 1:
        return None
    return Proposal(
        agent=agent,
        target="recipe:micro_sequences",
        title=f"recipe {recipe['name']}: {best} rows at a time in place of {now}",
        hypothesis=(
            f"Alone, the hottest ops process the rows of a step faster {best} at a time than {now} at a time. If the "
            f"whole step does not get at least {1 + (gains[best] - 1) / 2:.3f} times as fast (predicted: {gains[best]:.3f}), this is refuted."
        ),
        predicted_gain=gains[best],
        edits=(Edit(path, edited),),
    )


def _gain(profile: Mapping[str, Any], workbench: Workbench, now: int, rows: int) -> float:
    """Time of the step before over after, by Amdahl's law over the hottest ops. Raises: MeasurementError."""
    hot = [
        op for op in sorted(profile["ops"], key=lambda op: -op["share"]) if op["trained"] and op["share"] >= LEAST_SHARE
    ]
    left = 1.0
    for op in hot[:MOST_OPS]:
        each = [
            workbench.measure(op["op"], op["implementation"], op["implementation"], n).seconds / n for n in (now, rows)
        ]
        left += op["share"] * (each[1] / each[0] - 1)
    return 1 / max(left, 0.1)
