"""Strict schemas: unknown keys are errors that name the nearest key; values are never coerced."""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError

from trainer.contract.errors import nearest


class Strict(BaseModel):
    """A frozen schema that refuses unknown keys and coercions."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


Schema = TypeVar("Schema", bound=Strict)


def parse(schema: type[Schema], raw: object, where: str, error: type[Exception]) -> Schema:
    """``raw`` as a ``schema``. Raises: ``error``, one line, naming ``where`` and the first wrong key."""
    if not isinstance(raw, dict):
        raise error(f"{where}: expected a mapping, got {type(raw).__name__}")
    try:
        return schema.model_validate(raw)
    except ValidationError as invalid:
        # a misspelt key is also a missing one: the misspelling says more
        first = min(invalid.errors(), key=lambda e: e["type"] != "extra_forbidden")
        path = [str(part) for part in first["loc"]]
        key = ".".join(path)
        if first["type"] == "extra_forbidden":
            known = fields_at(schema, path[:-1])
            raise error(f"{where}: unknown key {key!r}{nearest(path[-1], known)}") from None
        if first["type"] == "missing":
            raise error(f"{where}: key {key!r} is missing") from None
        message = str(first["msg"]).removeprefix("Value error, ")
        if first["type"] == "bool_type":
            message = "must be true or false"
        at = f"key {key!r}: " if key else ""
        got = "" if first["type"] == "value_error" else f" (got {first['input']!r})"
        raise error(f"{where}: {at}{message}{got}") from None


def fields_at(annotation: Any, path: list[str]) -> list[str]:
    """The field names of the schema that lies at ``path`` below, through ``list[...]``, ``dict[str, ...]`` and ``... | None``."""
    for part in path:
        if get_origin(annotation) in (list, dict):
            annotation = get_args(annotation)[-1]
        else:
            annotation = annotation.model_fields[part].annotation
        if get_origin(annotation) in (Union, UnionType):
            annotation = next(inner for inner in get_args(annotation) if inner is not NoneType)
    return list(annotation.model_fields)
