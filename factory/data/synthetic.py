"""Finds the training documents that models wrote. The column ``documents.detail`` names the model, the maker (``factory.ingest.document``).

If a maker has the number and weights of a release of this factory (``format_release_as_author``), the maker is that release. Its successors may be
trained on its text. Any other maker is only a claim of the shard.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from factory.ingest.document import SYNTHETIC_PREFIX, format_release_as_author, read_author_model
from factory.ledger.ledger import Ledger
from factory.ledger.rows import ReleaseRow

_RELEASE = re.compile(r"release (\d{1,9}) \(weights [0-9a-f]{16}\)\Z")


@dataclass(frozen=True)
class SyntheticDocumentCount:
    """The documents that one model wrote. ``release``: the number, if the model is a release of this factory; else None."""

    maker: str
    release: int | None
    documents: int
    supervised_tokens: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def count_synthetic_documents(ledger: Ledger, token_shard_ids: Collection[str]) -> list[SyntheticDocumentCount]:
    """Count the documents in these token shards that models wrote, for each maker, with the most tokens first.

    Removed and quarantined documents count too, because models were trained on them.
    """
    found: dict[str, tuple[int, int]] = {}
    for row in _rows(ledger):
        if row["token_shard"] in token_shard_ids and (maker := read_author_model(row["detail"])):
            count, tokens = found.get(maker, (0, 0))
            found[maker] = count + row["documents"], tokens + row["supervised_tokens"]
    weights = {row.number: row.export_sha256 for row in ReleaseRow.select(ledger)} if found else {}
    listed = [
        SyntheticDocumentCount(maker, find_release_of_author_model(maker, weights), *counts)
        for maker, counts in found.items()
    ]
    return sorted(listed, key=lambda one: (-one.supervised_tokens, one.maker))


def count_documents_written_by_release(ledger: Ledger, release: ReleaseRow) -> dict[str, int]:
    """Return, for each token shard, the number of its training documents that a release wrote."""
    maker = format_release_as_author(release.number, release.export_sha256)
    found: dict[str, int] = {}
    for row in _rows(ledger):
        if read_author_model(row["detail"]) == maker:
            found[row["token_shard"]] = found.get(row["token_shard"], 0) + row["documents"]
    return found


def find_release_of_author_model(maker: str, weights: Mapping[int, str]) -> int | None:
    """Return the number of the release that the maker is; None if the maker is not a release of this factory.

    ``weights`` maps each release to the hash of its export.

    >>> weights = {3: "0123456789abcdef0123"}
    >>> (find_release_of_author_model("release 3 (weights 0123456789abcdef)", weights),
    ...  find_release_of_author_model("release 3 (weights 1123456789abcdef)", weights))
    (3, None)
    """
    named = _RELEASE.match(maker)
    number = int(named[1]) if named else 0
    return number if number in weights and format_release_as_author(number, weights[number]) == maker else None


def _rows(ledger: Ledger) -> list[dict[str, Any]]:
    sql = f"""SELECT detail, token_shard, COUNT(*) AS documents, SUM(supervised_tokens) AS supervised_tokens FROM documents
        WHERE detail LIKE '{SYNTHETIC_PREFIX}%' AND token_shard IS NOT NULL GROUP BY detail, token_shard"""
    return ledger.read(sql)
