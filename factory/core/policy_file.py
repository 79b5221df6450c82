"""Reads policy files: strict YAML. Unknown keys are errors, and values are never converted."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field

import kernels.contract.strict
from factory.core.errors import ConfigError
from factory.core.workspace import load_yaml
from kernels.contract.strict import parse

Count = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class StrictPolicy(kernels.contract.strict.StrictSchema):
    """Base class of policies. Unknown keys, values of another type and infinities are errors. A loaded policy is immutable."""

    model_config = ConfigDict(allow_inf_nan=False)


Policy = TypeVar("Policy", bound=StrictPolicy)


def load_policy(schema: type[Policy], path: Path) -> Policy:
    """Read a YAML policy. Raises: ConfigError that names the file and the key, and suggests the nearest known key for an unknown one."""
    data = load_yaml(path)
    return parse(schema, {} if data is None else data, str(path), ConfigError)


def hash_policy(policy: BaseModel) -> str:
    """Return a hash of a policy's values. Comments, spacing and defaults written out in its file do not change the hash."""
    return hashlib.sha256(policy.model_dump_json().encode()).hexdigest()
