"""Generates the three documents of a bundle from its other files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from factory.bundles.documents.card import write_card
from factory.bundles.documents.croissant import build_croissant
from factory.bundles.documents.facts import BundleFacts
from factory.bundles.documents.spdx import build_spdx
from factory.bundles.files import layout
from factory.bundles.files.folder import BundleError, BundleFolder, escape_unprintable

MADE_BY: dict[str, Callable[[BundleFacts], Any]] = {
    layout.CARD: write_card,
    layout.CROISSANT: build_croissant,
    layout.SPDX: build_spdx,
}


def generate_document(folder: BundleFolder, path: str) -> Any:
    """Return the text or JSON object that belongs in ``path``. Raises: BundleError if the other files lack a fact that the document needs."""
    facts = BundleFacts.read(folder)
    try:
        return MADE_BY[path](facts)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError, OSError) as error:
        raise BundleError(
            "bundles.not_generated",
            "{file} cannot be generated from the other files: {reason}",
            file=path,
            reason=escape_unprintable(repr(error)),
        ) from error
