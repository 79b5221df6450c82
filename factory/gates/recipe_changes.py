"""Reads the changes that a patch makes to recipes, and finds the changed recipes that do not train in this workspace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from factory.core.workspace import Workspace
from factory.git.scope import FileChange
from kernels.contract.message import Message
from kernels.contract.strict_yaml import read_yaml
from trainer.contract.errors import RecipeError
from trainer.contract.recipe import Recipe

RECIPES = "policies/recipes/"
COMPUTING_KEYS = ("compile", "batch.micro_sequences")  # keys that change how a step is computed, but not its result
Changes = dict[str, tuple[Any, Any]]  # flat key → (old value, new value)


def get_used_recipe_path(workspace: Workspace) -> str:
    """Return the path, in the repository, of the recipe that this workspace trains with."""
    return f"{RECIPES}{workspace.config.recipe}.yaml"


def find_unused_recipes(workspace: Workspace, paths: Sequence[str]) -> list[Message]:
    """Return a message for each changed recipe that no run in this workspace can judge."""
    used, own = get_used_recipe_path(workspace), workspace.own_recipe_path()
    recipes = [path for path in paths if path.startswith(RECIPES)]
    found = [
        Message(
            "gates.unused_recipe",
            "{path} cannot be judged in this workspace, because this workspace trains only with {used}.",
            path=path, used=used,
        )
        for path in recipes
        if path != used
    ]  # fmt: skip
    if used in recipes and own.exists():
        found.append(
            Message(
                "gates.own_recipe",
                "This workspace trains with its own recipe {own}, so a patch to {used} has no effect.",
                own=own, used=used,
            )
        )  # fmt: skip
    return found


def read_recipe_changes(change: FileChange, base: str) -> Changes:
    """Return changed key → (old value, new value), such as ``{"batch.sequences": (8, 16)}``. ``base``: the recipe before; '': a new recipe.

    A removed key has the new value None. Raises: RecipeError for text that is not a recipe, and for a deleted recipe.
    """
    if change.content is None:
        raise RecipeError("gates.recipe_deleted", "{path}: a patch may not delete a recipe.", path=change.path)
    new = flatten_settings(_parse(change.content.decode("utf-8", "replace"), change.path).model_dump())
    old = flatten_settings(_parse(base, change.path).model_dump()) if base else {}
    return {
        key: (old.get(key), new.get(key)) for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)
    }


def select_result_changing_keys(changes: Changes) -> list[str]:
    """Return the keys that change the result of a step, and thus what the model learns."""
    return [key for key in changes if key not in COMPUTING_KEYS]


def _parse(text: str, where: str) -> Recipe:
    return Recipe.parse(read_yaml(text, where, RecipeError), where)


def flatten_settings(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one mapping with dotted keys. An empty mapping counts as a value.

    >>> flatten_settings({"seed": 1, "batch": {"sequences": 8}, "phases": {}})
    {'seed': 1, 'batch.sequences': 8, 'phases': {}}
    """
    found: dict[str, Any] = {}
    for key, value in settings.items():
        found |= (
            flatten_settings(value, f"{prefix}{key}.")
            if isinstance(value, dict) and value
            else {f"{prefix}{key}": value}
        )
    return found
