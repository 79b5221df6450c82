"""Checks that the recipe's embedding fits the vocabulary. The check runs when a workspace is made, before a tokenizer is frozen, and before the
first segment."""

from __future__ import annotations

from typing import TYPE_CHECKING

import sqlalchemy as sa

from factory.core.errors import ConfigError
from factory.core.workspace import Workspace
from factory.ingest.rules.policy import DataPolicy
from factory.ingest.tokenizer import Tokenizer, has_own_names
from factory.ledger.ledger import tokenizers
from factory.ledger.plant import Plant
from kernels.contract.message import Message

if TYPE_CHECKING:
    from trainer.contract.recipe import Recipe

PADDED_TO = 128  # the embedding may be padded to a multiple of this, which suits the GPU's matrix units


def check_vocabulary(plant: Plant, recipe: Recipe) -> None:
    """Check that the recipe's ``model.vocab_size`` is ``tokenizer.vocab_size`` of ``data.yaml`` or the next multiple of ``PADDED_TO``, and is not
    smaller than the existing tokenizer.

    Raises: ConfigError that names both files and keys.
    """
    frozen = plant.ledger.select_first(sa.select(tokenizers))
    if frozen and frozen["vocab_size"] <= recipe.model.vocab_size and not has_own_names(plant.workspace.tokenizer):
        return  # a tokenizer that the factory did not train; 'tokenizer.vocab_size' is not of it, and more rows than ids do no harm
    wanted = DataPolicy.load(plant.workspace.policy_path("data.yaml")).tokenizer.vocab_size
    there, size = frozen["vocab_size"] if frozen else 0, recipe.model.vocab_size
    if size < there:
        raise _embedding_too_small(plant.workspace, size, there)
    if not is_padded_size(size, wanted):
        raise ConfigError(describe_vocabulary_mismatch(plant.workspace, size, wanted, bool(frozen)))


def check_planned_vocabulary(workspace: Workspace, tokenizer: Tokenizer | None) -> None:
    """Check, before the first document is tokenised, that the vocabulary is not larger than the recipe's embedding. A vocabulary that is smaller is
    refused only by planning, because the recipe can still be changed then. ``tokenizer``: the one that lies in the workspace; without it, the
    size that the data policy asks for counts. Raises: ConfigError."""
    from trainer.contract.errors import TrainerError
    from trainer.contract.recipe import Recipe

    try:
        size = Recipe.load(workspace.recipe_path()).model.vocab_size
    except TrainerError as error:
        raise ConfigError(str(error)) from error
    if tokenizer is not None:
        if tokenizer.vocab_size > size:
            raise _embedding_too_small(workspace, size, tokenizer.vocab_size)
        return
    wanted = DataPolicy.load(workspace.policy_path("data.yaml")).tokenizer.vocab_size
    if wanted > size:
        raise ConfigError(describe_vocabulary_mismatch(workspace, size, wanted, False))


def _embedding_too_small(workspace: Workspace, size: int, entries: int) -> ConfigError:
    return ConfigError(
        "ingest.embedding_too_small",
        "{recipe}: model.vocab_size is {size}, but the existing tokenizer {tokenizer} has {entries} entries. Write "
        "'model.vocab_size: {padded}'",
        recipe=workspace.recipe_path(),
        size=size,
        tokenizer=workspace.tokenizer / "tokenizer.json",
        entries=entries,
        padded=pad_size(entries),
    )


def describe_vocabulary_mismatch(
    workspace: Workspace, embedding_size: int, vocabulary_size: int, tokenizer_exists: bool
) -> Message:
    """Return why an embedding of ``embedding_size`` rows does not fit a vocabulary of ``vocabulary_size`` entries, and what to change."""
    policy = workspace.policy_path("data.yaml")
    if tokenizer_exists:
        do = Message(
            "ingest.change_recipe",
            "write 'model.vocab_size: {wanted}' in a copy of the recipe ({copy})",
            wanted=vocabulary_size,
            copy=workspace.own_recipe_path(),
        )
    else:
        do = Message(
            "ingest.change_policy",
            "write 'tokenizer.vocab_size: {size}' in {copy}, a copy of {policy}. Or make a new workspace with both values: "
            "'factory init --recipe {recipe} -w FOLDER'",
            size=embedding_size,
            copy=workspace.root / "policies" / "data.yaml",
            policy=policy,
            recipe=workspace.config.recipe,
        )
    return Message(
        "ingest.vocabularies_differ",
        "model.vocab_size in {recipe} is {size}, but tokenizer.vocab_size in {policy} is {wanted}. To make the two values "
        "equal, {do}",
        recipe=workspace.recipe_path(),
        size=embedding_size,
        policy=policy,
        wanted=vocabulary_size,
        do=do,
    )


def is_padded_size(size: int, vocabulary: int) -> bool:
    """Return whether an embedding of ``size`` rows is as large as the vocabulary, or padded to the next multiple of ``PADDED_TO``."""
    return vocabulary <= size <= pad_size(vocabulary)


def pad_size(size: int) -> int:
    """Return the smallest multiple of ``PADDED_TO`` that is at least ``size``."""
    return -(-size // PADDED_TO) * PADDED_TO
