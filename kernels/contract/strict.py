"""Strict schemas. An unknown key is an error that names the nearest known key. Values are never converted."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError

from kernels.contract.message import CodedError, Message


class StrictSchema(BaseModel):
    """A frozen schema that refuses unknown keys and conversions."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


Schema = TypeVar("Schema", bound=StrictSchema)


def parse(schema: type[Schema], raw: object, where: str, error: type[Exception]) -> Schema:
    """Validate ``raw`` and return it as a ``schema``. Raises: ``error`` with one line that names ``where`` and the first wrong key."""
    if not isinstance(raw, dict):
        raise error(
            Message(
                "strict.not_a_mapping",
                "{where}: the value must be a mapping of keys to values, but its type is {found}",
                where=where,
                found=type(raw).__name__,
            )
        )
    try:
        return schema.model_validate(raw)
    except ValidationError as invalid:
        # a misspelt key is also a missing key: the misspelling explains more
        first = min(invalid.errors(), key=lambda e: e["type"] != "extra_forbidden")
        path = [str(part) for part in first["loc"]]
        key = ".".join(path)
        if first["type"] == "extra_forbidden":
            known = list_fields_at(schema, path[:-1])
            near = make_known_words_hint(path[-1], known)
            raise error(
                Message("strict.unknown_key", "{where}: unknown key {key!r}{near}", where=where, key=key, near=near)
            ) from None
        if first["type"] == "missing":
            raise error(
                Message("strict.missing_key", "{where}: key {key!r} is missing", where=where, key=key)
            ) from None
        problem: str = str(first["msg"]).removeprefix("Value error, ")
        cause = (first.get("ctx") or {}).get("error")
        if isinstance(cause, ValueError) and cause.args and isinstance(cause.args[0], Message):
            problem = cause.args[0]
        if first["type"] == "bool_type":
            problem = Message("strict.not_a_bool", "the value must be true or false")
        at = f"key {key!r}: " if key else ""
        got = "" if first["type"] == "value_error" else f" (got {first['input']!r})"
        said = Message(
            "strict.wrong_value", "{where}: {at}{problem}{got}", where=where, at=at, problem=problem, got=got, key=key
        )
        raise error(said) from None


def make_not_json_error(file: object, problem: Exception, error: type[CodedError]) -> CodedError:
    """The error for a file that is not JSON."""
    return error("strict.not_json", "{file} is not valid JSON: {problem}", file=str(file), problem=str(problem))


def list_fields_at(annotation: Any, path: list[str]) -> list[str]:
    """The field names of the schema at ``path`` in ``annotation``. The path may lead through ``list[...]``, ``dict[str, ...]`` and ``... | None``."""
    for part in path:
        if get_origin(annotation) in (list, dict):
            annotation = get_args(annotation)[-1]
        else:
            annotation = annotation.model_fields[part].annotation
        if get_origin(annotation) in (Union, UnionType):
            annotation = next(inner for inner in get_args(annotation) if inner is not NoneType)
    return list(annotation.model_fields)


def make_known_words_hint(word: str, known: Iterable[str]) -> Message:
    """``"; did you mean 'x'?"`` for the nearest known word, or the list of known words if none is near."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1)
    if close:
        return Message("strict.near", "; did you mean {near!r}?", near=close[0])
    return Message("strict.known", "; known: {known}", known=names)
