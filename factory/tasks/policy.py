"""``policies/tasks.yaml``: when each evaluation task is measured, and what it may use. The tasks themselves lie in ``policies/tasks/``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from factory.core.policy_file import Count, Share, StrictPolicy, load_policy

NAME = re.compile(r"[a-zA-Z_][\w.-]*", re.ASCII)
Positive = Annotated[float, Field(gt=0, le=1e6)]


class Tier(StrictPolicy):
    """When a task is measured on a candidate that is judged; the champion is measured on the same items whenever a candidate is."""

    tier: Literal["each", "every", "release", "never"] = "release"
    """each: on each candidate; every: on each candidate whose number the key ``every`` divides; release: only on one that would be promoted
    otherwise; never: only by 'factory tasks run'."""
    every: Count = 5
    """Of tier ``every``: on one candidate in this many, by number."""
    margin: Annotated[float, Field(ge=0, le=1)] = 0.02
    """How much of a score (a share of right answers) a candidate may lose against the champion."""

    def due(self, candidate: int, would_promote: bool) -> bool:
        """Is the task measured on this candidate?"""
        if self.tier == "every":
            return candidate % self.every == 0
        return self.tier == "each" or (self.tier == "release" and would_promote)


class TaskLimits(StrictPolicy):
    """What the programs that a task runs may use: each answer's code with its tests, and lm-eval."""

    code_cpu_seconds: Count = 10
    """CPU time of one answer with its tests, which does not depend on what else the machine does."""
    code_seconds: Positive = 60.0
    """Time limit of one answer with its tests."""
    code_memory_mib: Count = 1024
    """Memory of one answer with its tests."""
    code_printed_kib: Count = 256
    """What one answer with its tests may print."""
    formula_cpu_seconds: Count = 5
    """CPU seconds for comparing one formula with its gold (math-verify). A comparison that takes more counts as not equal."""
    formula_memory_mib: Count = 2048
    """MiB of memory for comparing formulas."""
    lm_eval_seconds: Positive = 6 * 3600.0
    """Time limit of one task of lm-eval, the model's own time included."""
    lm_eval_memory_mib: Count = 8192
    """Memory of lm-eval, without the model."""


class TasksPolicy(StrictPolicy):
    """Every key is optional. A task that is not named has the tier of ``others``."""

    tasks: dict[str, Tier] = Field(default_factory=dict)
    """By the task's name."""
    others: Tier = Field(default_factory=Tier)
    """For every task in the folder that ``tasks`` does not name."""
    items_min: Annotated[int, Field(ge=2)] = 8
    """A task with fewer items is no evidence, and is not measured."""
    contaminated_max: Share = 0.05
    """Of a task's items, the share that may stand in training data of before the task was there. More is held: its score says how well the
    model remembers."""
    functions: bool = False
    """Whether lm-eval's YAML files may run Python functions (``!function``) from their folder, in the sandbox."""
    device: Literal["auto", "cpu"] = "auto"
    """auto: a GPU where there is one."""
    batch_tokens: Count = 4096
    """Tokens that the model sees at once."""
    guards_alpha: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Chance of passing any task's guard wrongly, all tasks together."""
    running: TaskLimits = Field(default_factory=TaskLimits)

    @model_validator(mode="after")
    def _named(self) -> TasksPolicy:
        for name in self.tasks:
            if not name or len(name) > 100 or "/" in name:
                raise ValueError(f"tasks: {name[:100]!r} cannot be the name of a task")
        return self

    def of(self, task: str) -> Tier:
        """The tier of a task."""
        return self.tasks.get(task, self.others)

    def setting(self, task: str, key: str, value: object) -> str:
        """The command that changes one key of a task and leaves it its others; empty: its name is nothing to paste into a shell.

        >>> TasksPolicy().setting("arc", "margin", 0.12)
        'factory config set tasks tasks.arc.margin 0.12'
        >>> TasksPolicy(others=Tier(tier="each")).setting("my.arc", "margin", 0.12)
        'factory config set tasks tasks "{my.arc: {tier: each, margin: 0.12}}"'
        """
        if not NAME.fullmatch(task):
            return ""
        kept = {} if task in self.tasks else self.others.model_dump(mode="json", exclude_defaults=True)
        kept.pop(key, None)
        if not kept and "." not in task:
            return f"factory config set tasks tasks.{task}.{key} {value}"
        keys = ", ".join(f"{name}: {one}" for name, one in {**kept, key: value}.items())
        return f'factory config set tasks tasks "{{{task}: {{{keys}}}}}"'

    @classmethod
    def load(cls, path: Path) -> TasksPolicy:
        """Raises: ConfigError naming the file and the key."""
        return load_policy(cls, path)
