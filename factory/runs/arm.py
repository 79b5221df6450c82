"""Describes an arm: one way to train some steps. Two arms whose training is the same have the same key, in whatever task they are.

>>> plan = {"token_shards": [{"id": "a", "path": "shards/a"}], "seed": 1}
>>> base = {"kind": "trunk", "recipe": {"precision": "fp32", "optimizer": {"lr": 0.1}}, "data_plan": plan, "first_step": 0, "last_step": 20,
...         "initial_checkpoint": None}
>>> low = Arm("low rate", base, code="c0ffee", recipe={"optimizer.lr": 0.01})
>>> low.make_spec()["recipe"]
{'precision': 'fp32', 'optimizer': {'lr': 0.01}}
>>> low.key == Arm("another name", base, code="c0ffee", recipe={"optimizer.lr": 0.01}).key != Arm("", base, code="c0ffee").key
True
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from factory.core.errors import InputError, suggest_name
from kernels.contract.strict import list_fields_at
from trainer.contract.data.data_plan import DataPlan
from trainer.contract.recipe import Recipe, copy_with_changed_keys

Spec = dict[str, Any]


@dataclass(frozen=True)
class Arm:
    """A segment's specification with some keys changed.

    An arm without changes is the segment itself. It begins at ``base["first_step"]``, or at the step of ``start`` if that is later.
    """

    name: str  # for people; unique within a task, and not a part of the key
    base: Mapping[str, Any]  # content of segment.json of the segment that is varied
    code: str  # a commit; or a tree, where commits with the same tree are equivalent
    recipe: Mapping[str, Any] = field(default_factory=dict)  # keys that differ from the base, such as optimizer.lr
    plan: Mapping[str, Any] = field(default_factory=dict)  # keys of the data plan that differ
    start: Path | None = None  # the checkpoint to continue from; None: the base's
    until: int | None = None  # the arm ends at the checkpoint of this step; None: at the base's last step
    seed: int | None = None  # seed of the order of the data, which is then read from its beginning
    precision: str | None = None
    kernels: str = ""  # the text of kernels.yaml; empty: the code's own
    ranks: int | None = None  # None: the workspace's number
    environment: str = ""  # the interpreter of another environment
    repeat: int = 0  # above 0: repeats the same arm, with another key

    @property
    def first_step(self) -> int:
        """The step at which the arm begins."""
        return int(self.base["first_step"]) if self.start is None else int(self.start.name.rpartition("-")[2])

    @property
    def last_step(self) -> int:
        """The step of the arm's last checkpoint."""
        return int(self.base["last_step"]) if self.until is None else self.until

    @property
    def resumed_checkpoint(self) -> Path | None:
        """The checkpoint from which the arm resumes, as a stopped segment does; None if the arm starts at the base's first step."""
        return self.start if self.first_step > self.base["first_step"] else None

    def make_spec(self, kernels: Path | str | None = None) -> Spec:
        """Return the content of segment.json. ``kernels``: the path of a file with the text ``kernels`` of the arm."""
        keys = dict(self.recipe) | ({} if self.precision is None else {"precision": self.precision})
        spec: Spec = json.loads(json.dumps(dict(self.base) | {"kernels": kernels and str(kernels)}))
        spec["recipe"] = copy_with_changed_keys(spec["recipe"], keys)
        spec["data_plan"] |= self.plan
        if self.seed is not None:
            spec["data_plan"]["seed"], spec["restart_data"] = self.seed, True
        if self.start is not None and self.resumed_checkpoint is None:
            spec["initial_checkpoint"] = str(self.start)
        return spec

    @cached_property
    def key(self) -> str:
        """The hash of everything that determines the training. Files count by their content, not by their path."""
        spec = self.make_spec(self.kernels or None)
        begins = [_content(path) for path in (spec.pop("initial_checkpoint"), self.resumed_checkpoint)]
        spec["data_plan"]["token_shards"] = [
            {key: value for key, value in shard.items() if key != "path"} for shard in spec["data_plan"]["token_shards"]
        ]
        rest = [self.code, begins, self.until, self.ranks, self.environment, self.repeat]
        return hashlib.sha256(json.dumps([spec, rest], sort_keys=True).encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        """Return the arm as the ledger stores it: the hash of the base, and the differences from it."""
        base = hashlib.sha256(json.dumps(dict(self.base), sort_keys=True, default=str).encode()).hexdigest()[:16]
        found = {
            "name": self.name, "base": base, "code": self.code, "recipe": dict(self.recipe), "plan": dict(self.plan),
            "start": self.start and self.start.name, "first": self.first_step, "last": self.last_step, "seed": self.seed, "precision": self.precision,
            "kernels": self.kernels, "ranks": self.ranks, "environment": self.environment, "repeat": self.repeat,
        }  # fmt: skip
        return {
            key: value for key, value in found.items() if value not in (None, "", {}, 0) or key in ("first", "last")
        }


def make_recipe_for_one_rank(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe for the sandbox's single rank: nothing is split over ranks. Activation recomputation stays."""
    return copy_with_changed_keys(recipe, {"parallel.tensor": 1, "parallel.replicas": 1})


def check_arms(arms: Sequence[Arm]) -> None:
    """Raises: InputError for an arm with an unknown key, or for two equal arms."""
    seen: dict[str, str] = {}
    for arm in arms:
        for path in arm.recipe:
            _refuse_unknown(arm, path)
        for key in arm.plan.keys() - DataPlan.model_fields.keys():
            raise InputError(
                "runs.unknown_plan_key",
                "arm {arm!r}: a data plan has no key {key!r}{hint}",
                arm=arm.name, key=key, hint=suggest_name(key, DataPlan.model_fields),
            )  # fmt: skip
        if (other := seen.setdefault(arm.key, arm.name)) != arm.name:
            raise InputError(
                "runs.equal_arms",
                "The arms {one!r} and {other!r} are equal. Leave one arm out. To run the same arm again on purpose, set 'repeat' in one arm.",
                one=other, other=arm.name,
            )  # fmt: skip


def _refuse_unknown(arm: Arm, path: str) -> None:
    parts = path.split(".")
    for number, part in enumerate(parts):
        try:
            known = list_fields_at(Recipe, parts[:number])
        except AttributeError:  # below this key the user chooses names, such as a mixture's domains
            return
        if part not in known:
            raise InputError(
                "runs.unknown_recipe_key",
                "arm {arm!r}: a recipe has no key {key!r}{hint}",
                arm=arm.name, key=path, hint=suggest_name(part, known),
            )  # fmt: skip


def _content(checkpoint: Path | str | None) -> str | None:
    """Return the hash of a checkpoint's manifest, which contains the hashes of the files; without a manifest, the path."""
    if checkpoint is None:
        return None
    try:
        return hashlib.sha256((Path(checkpoint) / "manifest.json").read_bytes()).hexdigest()
    except (FileNotFoundError, NotADirectoryError):
        return str(checkpoint)
