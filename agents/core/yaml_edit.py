"""Changes one value of a YAML text in place. Every other byte stays, comments included."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from kernels.contract.strict_yaml import read_yaml
from trainer.contract.errors import RecipeError
from trainer.contract.recipe import Recipe

PLAIN = re.compile(r"[A-Za-z_][\w.+/-]*( [\w.+/-]+)*", re.ASCII)  # text that needs no quotes
Scalar = float | int | str | bool | None


def set_yaml_value(text: str, path: Sequence[str], value: Scalar) -> str:
    """``text`` with the value at ``path`` replaced, or added where the text does not have it.

    >>> set_yaml_value("batch: {sequences: 8}  # of a step", ("batch", "sequences"), 4)
    'batch: {sequences: 4}  # of a step'
    >>> set_yaml_value("batch:  # of a step\\n  sequences: 8\\n", ("batch", "micro_sequences"), 4)
    'batch:  # of a step\\n  micro_sequences: 4\\n  sequences: 8\\n'

    Raises: ValueError if the path leads through a value that is not a mapping, or ends at a mapping or list.
    """
    node, depth = yaml.compose(text), 0
    if node is None:
        return f"{text}{_line(path, value)}\n"
    while depth < len(path):
        if isinstance(node, yaml.ScalarNode) and not node.value:  # 'section:' with nothing in it
            return f"{text[: node.start_mark.index]} {{{_line(path[depth:], value)}}}{text[node.end_mark.index :]}"
        if not isinstance(node, yaml.MappingNode):
            raise ValueError(f"{'.'.join(path[:depth])} is not a mapping")
        found = next((inner for key, inner in node.value if key.value == path[depth]), None)
        if found is None:
            return _added(text, node, path[depth:], value)
        node, depth = found, depth + 1
    if not isinstance(node, yaml.ScalarNode):
        raise ValueError(f"{'.'.join(path)} is a mapping or a list, not a single value")
    return text[: node.start_mark.index] + format_yaml_value(value) + text[node.end_mark.index :]


def format_yaml_value(value: Scalar) -> str:
    """The value as people write it in YAML: 0.006, 1e-05, linear, true, null."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return _word(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _word(text: str) -> str:
    """A string as YAML, in quotes only if it needs them.

    >>> [_word(text) for text in ("linear", "CC-BY-4.0", "my licence", "a: {b}", "12:30", "no", "")]
    ['linear', 'CC-BY-4.0', 'my licence', '"a: {b}"', '"12:30"', '"no"', '""']
    """
    return text if PLAIN.fullmatch(text) and yaml.safe_load(text) == text else json.dumps(text)


def _added(text: str, mapping: yaml.MappingNode, rest: Sequence[str], value: Scalar) -> str:
    """The text with a new key: first in its mapping, or last in the file if the mapping is the whole file."""
    line, at = _line(rest, value), mapping.start_mark.index
    if mapping.flow_style:
        return f"{text[: at + 1]}{line}{', ' if mapping.value else ''}{text[at + 1 :]}"
    if mapping.start_mark.column == 0:
        return f"{text.rstrip()}\n{line}\n"
    return f"{text[:at]}{line}\n{' ' * mapping.start_mark.column}{text[at:]}"


def _line(path: Sequence[str], value: Scalar) -> str:
    *sections, key = path
    line = f"{_word(key)}: {format_yaml_value(value)}"
    for section in reversed(sections):
        line = f"{_word(section)}: {{{line}}}"
    return line


def change_recipe_value(text: str, path: Sequence[str], value: Scalar) -> tuple[str, Recipe]:
    """The new text, and the recipe in it. Raises: RecipeError if the new text is not a valid recipe."""
    try:
        new = set_yaml_value(text, path, value)
    except ValueError as error:
        raise RecipeError(str(error)) from None
    return new, Recipe.parse(read_yaml(new, "recipe", RecipeError))


def flatten_recipe(recipe: Recipe) -> dict[str, Scalar]:
    """Every single value of a recipe by its dotted key, such as ``optimizer.lr``."""
    return dict(_flat(recipe.model_dump(), ""))


def _flat(mapping: Mapping[str, Any], above: str) -> Iterator[tuple[str, Scalar]]:
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{key}.")
        elif isinstance(value, (int, float, str)):
            yield f"{above}{key}", value
