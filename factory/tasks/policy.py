"""``policies/tasks.yaml``: when each evaluation task is measured, and its limits. The tasks themselves are in ``policies/tasks/``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from factory.core.policy_file import Count, Share, StrictPolicy, load_policy
from kernels.contract.message import Message

NAME = re.compile(r"[a-zA-Z_][\w.-]*", re.ASCII)
Positive = Annotated[float, Field(gt=0, le=1e6)]


class TaskSettings(StrictPolicy):
    """When a judged candidate is measured on a task. Whenever a candidate is measured, the champion is measured on the same items."""

    tier: Literal["each", "every", "release", "never"] = "release"
    """each: every candidate; every: candidates whose number is a multiple of ``every``; release: only candidates that would otherwise be
    promoted; never: only 'factory tasks run'."""
    every: Count = 5
    """For tier ``every``: measure one candidate in this many."""
    margin: Annotated[float, Field(ge=0, le=1)] = 0.02
    """The loss against the champion that a candidate may have, as a share of right answers."""

    def is_due(self, candidate: int, would_promote: bool) -> bool:
        """Is this candidate measured on the task?"""
        if self.tier == "every":
            return candidate % self.every == 0
        return self.tier == "each" or (self.tier == "release" and would_promote)


class TaskLimits(StrictPolicy):
    """Limits of the programs that a task runs: an answer's code with its tests, the comparison of formulas, and lm-eval."""

    code_cpu_seconds: Count = 10
    """CPU seconds of an answer's code with its tests. Other programs on the machine do not change them."""
    code_seconds: Positive = 60.0
    """Wall-clock seconds of an answer's code with its tests."""
    code_memory_mib: Count = 1024
    """MiB of memory for an answer's code with its tests."""
    code_printed_kib: Count = 256
    """KiB that an answer's code with its tests may print."""
    formula_cpu_seconds: Count = 5
    """CPU seconds for comparing a formula with the right one (math-verify). After this time they count as not equal."""
    formula_memory_mib: Count = 2048
    """MiB of memory for comparing formulas."""
    lm_eval_seconds: Positive = 6 * 3600.0
    """Wall-clock seconds of a task of lm-eval, including the model's time."""
    lm_eval_memory_mib: Count = 8192
    """MiB of memory for lm-eval, without the model."""


class TasksPolicy(StrictPolicy):
    """Every key is optional. ``others`` applies to each task that ``tasks`` does not name."""

    tasks: dict[str, TaskSettings] = Field(default_factory=dict)
    """The settings of single tasks, by name."""
    others: TaskSettings = Field(default_factory=TaskSettings)
    """The settings of every task in the folder that ``tasks`` does not name."""
    items_min: Annotated[int, Field(ge=2)] = 8
    """The fewest items of a task. A task with fewer items is not measured."""
    contaminated_max: Share = 0.05
    """The share of a task's items that may be in training data older than the task. With more, the release is held, because the score
    would measure memory."""
    functions: bool = False
    """Allow lm-eval's YAML files to run Python functions (``!function``) from their folder, in the sandbox."""
    device: Literal["auto", "cpu"] = "auto"
    """auto: a GPU if there is one."""
    batch_tokens: Count = 4096
    """Tokens in a batch of the model."""
    guards_alpha: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """The chance that a worse model passes any task's guard, over all tasks together."""
    running: TaskLimits = Field(default_factory=TaskLimits)

    @model_validator(mode="after")
    def _named(self) -> TasksPolicy:
        for name in self.tasks:
            if not name or len(name) > 100 or "/" in name:
                raise ValueError(f"tasks: {name[:100]!r} cannot be the name of a task")
        return self

    def get_settings_of_task(self, task: str) -> TaskSettings:
        """The settings of a task."""
        return self.tasks.get(task, self.others)

    def format_command_to_set(self, task: str, key: str, value: object) -> str:
        """The command that changes one key of a task and keeps its other keys. Empty if the task's name is not safe in a shell.

        >>> TasksPolicy().format_command_to_set("arc", "margin", 0.12)
        'factory config set tasks tasks.arc.margin 0.12'
        >>> TasksPolicy(others=TaskSettings(tier="each")).format_command_to_set("my.arc", "margin", 0.12)
        'factory config set tasks tasks "{my.arc: {tier: each, margin: 0.12}}"'
        """
        if not NAME.fullmatch(task):
            return ""
        kept = {} if task in self.tasks else self.others.model_dump(mode="json", exclude_defaults=True)
        kept.pop(key, None)
        if not kept and "." not in task:
            return Message(
                "policy.set_key", "factory config set tasks tasks.{task}.{key} {value}", task=task, key=key, value=value
            )
        keys = [f"{name}: {one}" for name, one in {**kept, key: value}.items()]
        return Message(
            "policy.set_task", 'factory config set tasks tasks "{{{task}: {{{keys}}}}}"', task=task, keys=keys
        )

    @classmethod
    def load(cls, path: Path) -> TasksPolicy:
        """Raises: ConfigError naming the file and the key."""
        return load_policy(cls, path)
