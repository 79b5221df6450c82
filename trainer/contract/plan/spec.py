"""The segment spec: ``segment.json``, the input of one run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from kernels.contract.message import Message
from kernels.contract.strict import StrictSchema, make_not_json_error, parse
from trainer.contract.data.data_plan import DataPlan
from trainer.contract.errors import SpecError
from trainer.contract.recipe import AUTO, Recipe


class SegmentSpec(StrictSchema):
    """A segment: contiguous steps with one recipe, one data plan and one code commit."""

    kind: Literal["trunk", "anneal"]
    recipe: Recipe
    data_plan: DataPlan
    first_step: Annotated[int, Field(ge=0)]
    last_step: Annotated[int, Field(gt=0)]  # exclusive: the checkpoint at the end has this step
    initial_checkpoint: str | None = None
    code_commit: str = ""
    restart_data: bool = False  # read the data plan from its beginning, not from the position of initial_checkpoint
    rewarm: bool = False  # the rate rises again from first_step on, over schedule.rewarmup_steps
    kernels: str | None = None  # kernels.yaml; null: policies/kernels.yaml beside the trainer package

    @model_validator(mode="after")
    def _possible(self) -> SegmentSpec:
        if self.last_step <= self.first_step:
            raise ValueError(
                Message(
                    "plan.no_steps",
                    "last_step ({last}) is not after first_step ({first})",
                    last=self.last_step,
                    first=self.first_step,
                )
            )
        if self.initial_checkpoint is None and self.first_step:
            raise ValueError(
                Message(
                    "plan.needs_checkpoint",
                    "initial_checkpoint is missing. Only a run that begins at step 0 has no initial checkpoint",
                )
            )
        if self.kind == "anneal" and self.initial_checkpoint is None:
            raise ValueError(
                Message(
                    "plan.anneal_checkpoint",
                    "initial_checkpoint is missing. An anneal starts from a checkpoint of the trunk",
                )
            )
        if self.recipe.precision == AUTO:
            raise ValueError(
                Message(
                    "plan.auto_precision",
                    "recipe.precision is 'auto', but all steps of a segment need one precision. Write fp32 or bf16. To "
                    "measure both on this machine: 'python -m trainer.contract.plan.precision RECIPE'",
                )
            )
        return self

    @classmethod
    def load(cls, folder: Path) -> SegmentSpec:
        """The spec in a folder's segment.json. Raises: SpecError, RecipeError or DataPlanError, which name the file and the key."""
        path = folder / "segment.json"
        try:
            raw = json.loads(path.read_text("utf-8"))
        except OSError as error:
            raise SpecError(
                "plan.no_spec", "{file} cannot be read: {problem}", file=str(path), problem=error.strerror
            ) from None
        except ValueError as error:
            raise make_not_json_error(path, error, SpecError) from None
        if not isinstance(raw, dict):
            raise SpecError(
                "plan.spec_not_a_mapping", "{file} must contain a JSON object that describes a segment.", file=str(path)
            )
        parts = dict(raw)
        if "recipe" in parts:
            parts["recipe"] = Recipe.parse(parts["recipe"], f"{path}: recipe")
        if "data_plan" in parts:
            parts["data_plan"] = DataPlan.from_json(parts["data_plan"], f"{path}: data_plan")
        return parse(cls, parts, str(path), SpecError)

    @property
    def kernels_path(self) -> Path:
        return Path(self.kernels) if self.kernels else Path(__file__).parents[3] / "policies" / "kernels.yaml"
