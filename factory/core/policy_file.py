"""How every policy file is read: strict YAML, unknown keys are errors, values are never converted."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field

import trainer.contract.strict
from factory.core.errors import ConfigError
from factory.core.workspace import load_yaml
from trainer.contract.strict import parse

Count = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class StrictPolicy(trainer.contract.strict.Strict):
    """Unknown keys, values of another type and infinities are errors; a loaded policy does not change."""

    model_config = ConfigDict(allow_inf_nan=False)


Policy = TypeVar("Policy", bound=StrictPolicy)


def load_policy(schema: type[Policy], path: Path) -> Policy:
    """Read a YAML policy. Raises: ConfigError naming the file, the key, and the nearest key for an unknown one."""
    data = load_yaml(path)
    return parse(schema, {} if data is None else data, str(path), ConfigError)


def policy_sha256(policy: BaseModel) -> str:
    """A hash of a policy's values: comments, spacing and spelled-out defaults of its file do not change it."""
    return hashlib.sha256(policy.model_dump_json().encode()).hexdigest()
