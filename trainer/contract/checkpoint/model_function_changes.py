"""Checks that a recipe's model computes the function for which a checkpoint's weights were trained.

Shapes are not enough: 4 heads of 16 and 8 heads of 8 have the same matrices, and ``rope_theta`` has no matrix. A checkpoint's ``state.json`` holds
the recipe of its training, and its manifest holds that file's hash. Therefore every key of ``model`` is compared.

    >>> before = {"vocab_size": 64, "d_model": 32, "layers": 2, "heads": 4, "kv_heads": 4, "head_dim": 8, "d_ff": 64, "context": 32}
    >>> after = ModelSpec.model_validate(before | {"heads": 2, "kv_heads": 2, "head_dim": 16, "rope_theta": 5e5, "context": 64})
    >>> find_model_function_changes(before, after)
    {'head_dim': (8, 16), 'heads': (4, 2), 'kv_heads': (4, 2), 'rope_theta': (10000.0, 500000.0)}
    >>> find_unaccepted_changes(before, after, ["rope_theta", "heads"])
    ['kv_heads', 'head_dim']
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from kernels.contract.message import Message
from models.adapters import find_family_for_export
from models.spec import ACCEPTABLE, ExpertsSpec, ModelSpec
from trainer.contract.errors import CheckpointError

# Keys that set the length of a row and the training of experts. They do not change the weights' function at a position.
OF_TRAINING = ("context", "experts.bias_rate", "experts.z_loss", "experts.loss_weight")
# Keys that change what an export says of the same weights (``find_export_changes``).
OF_EXPORT = ("max_positions", "family")
Changes = dict[str, tuple[Any, Any]]


def find_model_function_changes(before: Mapping[str, Any], after: ModelSpec | Mapping[str, Any]) -> Changes:
    """``{key below model: (before, after)}`` of the keys that change the function, by name.

    A mapping is ``recipe.model`` of a checkpoint or of the ledger. A key that an older checkpoint lacks has the schema's default.
    """
    old, new = _flat(before), _flat(after.model_dump() if isinstance(after, ModelSpec) else after)
    return {
        key: (old.get(key), new.get(key))
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and key not in (*OF_TRAINING, *OF_EXPORT)
    }


def find_export_changes(before: Mapping[str, Any], after: ModelSpec) -> Changes:
    """``{key below model: (before, after)}`` of what an export of the same weights would say otherwise: its family, and how many positions it allows.

    A missing ``max_positions`` is ``context``. If both lack it, the number is nobody's wish, and follows the context without being a change.

    >>> before = {"vocab_size": 64, "d_model": 32, "layers": 2, "heads": 4, "kv_heads": 4, "head_dim": 8, "d_ff": 64, "context": 32}
    >>> [find_export_changes(before, ModelSpec.model_validate(before | more)) for more in ({"context": 16}, {"context": 16, "max_positions": 16})]
    [{}, {'max_positions': (32, 16)}]
    """
    found: Changes = {}
    if before.get("max_positions") or after.max_positions:
        found["max_positions"] = (
            before.get("max_positions") or before.get("context"),
            after.max_positions or after.context,
        )
    if before.get("family") != after.family:
        found["family"] = (
            find_family_for_export(ModelSpec.model_validate(before)).name,
            find_family_for_export(after).name,
        )
    return {key: (old, new) for key, (old, new) in found.items() if old != new}


def find_unaccepted_changes(before: Mapping[str, Any], after: ModelSpec, accepted: Collection[str]) -> list[str]:
    """The changes that the recipe's ``accept_changes`` does not name. Those that change the weights' shapes come first."""
    left = [key for key in find_model_function_changes(before, after) if key not in accepted]
    return sorted(left, key=lambda key: (key in ACCEPTABLE, key not in ("heads", "kv_heads"), key))


def refuse_unaccepted_changes(
    before: Mapping[str, Any], after: ModelSpec, accepted: Collection[str], path: object
) -> None:
    """Raises: CheckpointError that names the first change that is not accepted. ``path``: the checkpoint, for the message."""
    left = find_unaccepted_changes(before, after, accepted)
    if left:
        old, new = find_model_function_changes(before, after)[left[0]]
        way: str = ""
        if set(left) <= set(ACCEPTABLE):
            way = Message(
                "trainer.accept_changes",
                " To accept the change, add 'accept_changes: [{keys}]' to the recipe, or name it to 'factory train --change'.",
                keys=left,
            )
        raise CheckpointError(
            "trainer.other_function",
            "recipe.model does not fit the checkpoint: {key} is {new} in the recipe, but {old} in {checkpoint}. With "
            "this change, the weights would compute another function. Undo the change.{way}",
            key=left[0],
            new=new,
            old=old,
            checkpoint=str(path),
            way=way,
        )


def _flat(model: Mapping[str, Any]) -> dict[str, Any]:
    """The model's keys with their defaults, and ``experts`` as ``experts.count`` and so on. A dense model has none of these."""
    usual = lambda schema: {
        name: field.default for name, field in schema.model_fields.items() if not field.is_required()
    }
    experts = model.get("experts")
    inner = {f"experts.{key}": value for key, value in (usual(ExpertsSpec) | experts).items()} if experts else {}
    return {key: value for key, value in (usual(ModelSpec) | dict(model)).items() if key != "experts"} | inner
