"""Does a recipe's model compute the function that a checkpoint's weights were trained in?

Shapes alone do not tell: 4 heads of 16 and 8 of 8 have the same matrices, and ``rope_theta`` has none. A checkpoint's ``state.json`` holds
the recipe that it was trained with, and its manifest the hash of that, so every key of ``model`` is compared.

    >>> before = {"vocab_size": 64, "d_model": 32, "layers": 2, "heads": 4, "kv_heads": 4, "head_dim": 8, "d_ff": 64, "context": 32}
    >>> after = ModelRecipe.model_validate(before | {"heads": 2, "kv_heads": 2, "head_dim": 16, "rope_theta": 5e5, "context": 64})
    >>> function_changes(before, after)
    {'head_dim': (8, 16), 'heads': (4, 2), 'kv_heads': (4, 2), 'rope_theta': (10000.0, 500000.0)}
    >>> not_accepted(before, after, ["rope_theta", "heads"])
    ['kv_heads', 'head_dim']
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from trainer.contract.errors import CheckpointError
from trainer.contract.recipe import ACCEPTABLE, ModelRecipe

# How long a row is, and how experts are trained: at a position the weights compute the same.
OF_TRAINING = ("context", "experts.bias_rate", "experts.z_loss")
Changes = dict[str, tuple[Any, Any]]


def function_changes(before: Mapping[str, Any], after: ModelRecipe) -> Changes:
    """``{key below model: (before, after)}`` of what differs in the function, by name.

    ``before``: ``recipe.model`` as a checkpoint or the ledger has it; a key that it lacks, because it is older, has the schema's default.
    """
    now = after.model_dump()
    defaults = {name: field.default for name, field in ModelRecipe.model_fields.items() if not field.is_required()}
    old, new = _flat(defaults | dict(before)), _flat(now)
    return {
        key: (old.get(key), new.get(key))
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and key not in OF_TRAINING
    }


def not_accepted(before: Mapping[str, Any], after: ModelRecipe, accepted: Collection[str]) -> list[str]:
    """The changes that ``accept_changes`` of the recipe does not name: those that change the weights' shapes first."""
    left = [key for key in function_changes(before, after) if key not in accepted]
    return sorted(left, key=lambda key: (key in ACCEPTABLE, key not in ("heads", "kv_heads"), key))


def refuse_other_function(
    before: Mapping[str, Any], after: ModelRecipe, accepted: Collection[str], path: object
) -> None:
    """Raises: CheckpointError naming the first change that is not accepted. ``path``: the checkpoint, for its message."""
    left = not_accepted(before, after, accepted)
    if left:
        old, new = function_changes(before, after)[left[0]]
        way = f"name it in the recipe's accept_changes: [{', '.join(left)}]" if set(left) <= set(ACCEPTABLE) else ""
        raise CheckpointError(
            f"recipe.model does not fit the checkpoint: {left[0]} is {new} in the recipe, {old} in {path}: the weights would compute "
            f"something else; take the change back{', or ' * bool(way)}{way}"
        )


def _flat(model: Mapping[str, Any]) -> dict[str, Any]:
    """``experts`` as ``experts.count`` and so on; a dense model has none of them."""
    experts = model.get("experts") or {}
    inner = {f"experts.{key}": value for key, value in experts.items()}
    return {key: value for key, value in model.items() if key != "experts"} | inner
