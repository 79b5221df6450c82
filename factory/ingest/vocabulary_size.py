"""Does the recipe's embedding fit the vocabulary? Asked where a workspace is made, before a tokenizer is frozen, and before the first segment."""

from __future__ import annotations

from typing import TYPE_CHECKING

import sqlalchemy as sa

from factory.core.errors import ConfigError
from factory.core.workspace import Workspace
from factory.ingest.rules.policy import DataPolicy
from factory.ledger.ledger import tokenizers
from factory.ledger.plant import Plant

if TYPE_CHECKING:
    from trainer.contract.recipe import Recipe

PADDED_TO = 128  # matrix units want round sizes: so far the embedding may be larger than the vocabulary


def refuse_vocabulary(plant: Plant, recipe: Recipe) -> None:
    """``model.vocab_size`` is that of ``data.yaml``, or the next multiple of ``PADDED_TO``, and holds the tokenizer that there is.

    Raises: ConfigError that names both files and keys.
    """
    frozen = plant.ledger.one(sa.select(tokenizers))
    wanted = DataPolicy.load(plant.workspace.policy("data.yaml")).tokenizer.vocab_size
    there, size = frozen["vocab_size"] if frozen else 0, recipe.model.vocab_size
    if size < there:
        raise ConfigError(
            f"{plant.workspace.recipe_path()}: model.vocab_size is {size}, {plant.workspace.tokenizer}/tokenizer.json has {there} entries and stays: "
            f"write model.vocab_size: {padded(there)}"
        )
    if not fits(size, wanted):
        raise ConfigError(refusal(plant.workspace, size, wanted, bool(frozen)))


def refuse_vocabulary_to_be(workspace: Workspace) -> None:
    """The same before a shard is made, the first of which freezes the tokenizer. A vocabulary smaller than the embedding is for planning to
    refuse: the recipe can still follow it. Raises: ConfigError."""
    from trainer.contract.errors import TrainerError
    from trainer.contract.recipe import Recipe

    try:
        size = Recipe.load(workspace.recipe_path()).model.vocab_size
    except TrainerError as error:
        raise ConfigError(str(error)) from error
    wanted = DataPolicy.load(workspace.policy("data.yaml")).tokenizer.vocab_size
    if wanted > size:
        raise ConfigError(refusal(workspace, size, wanted, False))


def refusal(workspace: Workspace, size: int, wanted: int, frozen: bool) -> str:
    where, policy = workspace.recipe_path(), workspace.policy("data.yaml")
    way = (
        f"write model.vocab_size: {wanted} in a copy of the recipe ({workspace.own_recipe()})"
        if frozen
        else f"'factory init --recipe {workspace.config.recipe} -w FOLDER' sets both together; here write tokenizer.vocab_size: {size} in "
        f"{workspace.root / 'policies' / 'data.yaml'}, a copy of {policy}"
    )
    return f"{where}: model.vocab_size is {size}, {policy}: tokenizer.vocab_size is {wanted}: they must agree; {way}"


def fits(size: int, vocabulary: int) -> bool:
    """Is an embedding of ``size`` rows that of a vocabulary, but for padding?"""
    return vocabulary <= size <= padded(vocabulary)


def padded(size: int) -> int:
    return -(-size // PADDED_TO) * PADDED_TO
