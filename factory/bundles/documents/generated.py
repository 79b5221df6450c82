"""Generates the three documents of a bundle from its other files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from factory.bundles.documents.card import card
from factory.bundles.documents.croissant import croissant
from factory.bundles.documents.facts import Facts
from factory.bundles.documents.spdx import spdx
from factory.bundles.files import layout
from factory.bundles.files.folder import BundleError, BundleFolder, shown

MADE_BY: dict[str, Callable[[Facts], Any]] = {layout.CARD: card, layout.CROISSANT: croissant, layout.SPDX: spdx}


def generate_document(folder: BundleFolder, path: str) -> Any:
    """The text or JSON object that belongs in ``path``. Raises: BundleError if the other files lack a fact that it needs."""
    facts = Facts.read(folder)
    try:
        return MADE_BY[path](facts)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError, OSError) as error:
        raise BundleError(
            "bundles.not_generated",
            "{file} cannot be generated from the other files: {reason}",
            file=path,
            reason=shown(repr(error)),
        ) from error
