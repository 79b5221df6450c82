"""What must fit before a segment is planned: the recipe's model and the checkpoint that is gone on from; the recipe and the vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from factory.core.errors import ConfigError
from factory.core.workspace import Workspace
from factory.ingest.vocabulary_size import refuse_vocabulary
from factory.ledger.plant import Plant
from factory.ledger.rows import Reads, SegmentRow

if TYPE_CHECKING:
    from trainer.contract.recipe import Recipe


def refuse_misfit(plant: Plant, recipe: Recipe, parent: SegmentRow | None) -> list[str]:
    """Returns lines for a person: changes that the recipe's ``accept_changes`` names.

    Raises: ConfigError that names what differs, both values and their places, and what to do.
    """
    if parent is None:
        refuse_vocabulary(plant, recipe)
        return []
    return _of_live_trunk(plant.workspace, plant.ledger, recipe, parent)


def _of_live_trunk(workspace: Workspace, db: Reads, recipe: Recipe, parent: SegmentRow) -> list[str]:
    """The model of the segment that is gone on from is what the ledger has of it: a checkpoint may be older than its own account."""
    from trainer.contract.checkpoint.same_function import function_changes, not_accepted
    from trainer.contract.recipe import ACCEPTABLE

    before = parent.recipe_json.get("model")
    if not before:
        return []  # a row that an older factory recovered without its recipe: the trainer compares the weights
    changes = function_changes(before, recipe.model)
    refused = not_accepted(before, recipe.model, recipe.accept_changes)
    if before.get("context", recipe.model.context) != recipe.model.context:
        changes["context"] = before["context"], recipe.model.context
        refused.insert(0, "context")
    if refused:
        shown = ", ".join(f"model.{key} {changes[key][0]} → {changes[key][1]}" for key in refused)
        root = _root(db, parent)
        named = f"name it in the recipe (accept_changes: [{', '.join(refused)}]): the weights then learn the new function from where they are; "
        raise ConfigError(
            f"{workspace.recipe_path()}: {shown}: not what segment {parent.id} was trained with. Take the change back; or "
            f"{named if set(refused) <= set(ACCEPTABLE) else ''}"
            f"train anew here with 'factory rewind {root} -w {workspace.root}' (data, tokenizer and releases stay); or begin another workspace "
            f"with 'factory init --recipe {recipe.name} --tokenizer {workspace.tokenizer} -w FOLDER'"
        )
    notes = [f"accepted by the recipe: model.{key} {old} → {new}" for key, (old, new) in changes.items()]
    idle = [key for key in recipe.accept_changes if key not in changes]
    if idle:
        notes.append(
            f"accept_changes names {', '.join(idle)}, which did not change: take it out of {workspace.recipe_path()}"
        )
    return notes


def _root(db: Reads, segment: SegmentRow) -> int:
    """The first segment of a line."""
    while segment.parent is not None:
        segment = SegmentRow.get(db, segment.parent)
    return segment.id
