"""One value of a recipe's YAML text changed in place: every other byte, comments too, stays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from kernels.contract.strict_yaml import read_yaml
from trainer.contract.errors import RecipeError
from trainer.contract.recipe import Recipe

Scalar = float | int | str


def set_value(text: str, path: Sequence[str], value: Scalar) -> str:
    """``text`` with the value at ``path`` replaced, or added where it was left to its default.

    >>> set_value("batch: {sequences: 8}  # of a step", ("batch", "sequences"), 4)
    'batch: {sequences: 4}  # of a step'

    Raises: RecipeError when the path leads through something that is no mapping.
    """
    root = yaml.compose(text)
    node, depth = root, 0
    while depth < len(path):
        if not isinstance(node, yaml.MappingNode):
            raise RecipeError(f"{'.'.join(path[:depth])} is no mapping")
        found = next((inner for key, inner in node.value if key.value == path[depth]), None)
        if found is None:
            return _added(text, node, path[depth:], value)
        node, depth = found, depth + 1
    if not isinstance(node, yaml.ScalarNode):
        raise RecipeError(f"{'.'.join(path)} is no single value")
    return text[: node.start_mark.index] + written(value) + text[node.end_mark.index :]


def changed(text: str, path: Sequence[str], value: Scalar) -> tuple[str, Recipe]:
    """The new text and the recipe that it says. Raises: RecipeError when it says none."""
    new = set_value(text, path, value)
    return new, Recipe.parse(read_yaml(new, "recipe", RecipeError))


def values(recipe: Recipe) -> dict[str, Scalar]:
    """Every single value of a recipe by its dotted key, such as ``optimizer.lr``."""
    return dict(_flat(recipe.model_dump(), ""))


def _flat(mapping: Mapping[str, Any], above: str) -> Iterator[tuple[str, Scalar]]:
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{key}.")
        elif isinstance(value, (int, float, str)):
            yield f"{above}{key}", value


def written(value: Scalar) -> str:
    """As people write it: 0.006, 1e-05, linear."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _added(text: str, mapping: yaml.MappingNode, rest: Sequence[str], value: Scalar) -> str:
    """A key that is not there yet, first in its mapping; a section that is not there yet, last in the file."""
    *sections, key = rest
    line = f"{key}: {written(value)}"
    for section in reversed(sections):
        line = f"{section}: {{{line}}}"
    at = mapping.start_mark.index
    if mapping.flow_style:
        return f"{text[: at + 1]}{line}{', ' if mapping.value else ''}{text[at + 1 :]}"
    if mapping.start_mark.column == 0:
        return f"{text.rstrip()}\n{line}\n"
    return f"{text[:at]}{line}\n{' ' * mapping.start_mark.column}{text[at:]}"
