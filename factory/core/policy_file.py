"""How any policy file of the factory is read: YAML without doubled keys, unknown keys refused, nothing coerced."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field

import trainer.contract.strict
from factory.core.errors import ConfigError
from factory.core.yaml_file import load_yaml
from trainer.contract.strict import parse

Count = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class Strict(trainer.contract.strict.Strict):
    """Unknown keys and values of another type are errors, and so are infinities; nothing changes after loading."""

    model_config = ConfigDict(allow_inf_nan=False)


Policy = TypeVar("Policy", bound=Strict)


def load_policy(schema: type[Policy], path: Path) -> Policy:
    """Read a YAML policy. Raises: ConfigError naming the file, the key, and the nearest key for an unknown one."""
    data = load_yaml(path)
    return parse(schema, {} if data is None else data, str(path), ConfigError)


def policy_sha256(policy: BaseModel) -> str:
    """One hash of what a policy says, whatever its file's comments and spacing."""
    return hashlib.sha256(policy.model_dump_json().encode()).hexdigest()
