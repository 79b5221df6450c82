"""Which domains the tokens have that a candidate was trained on: of one without sealed documents the judge cannot say what became of it."""

from __future__ import annotations

from collections import Counter

from factory.gates.release.licences import token_shards_of
from factory.ledger.ledger import Ledger


def trained_on(ledger: Ledger, segment: int) -> dict[str, float]:
    """By domain, its share of the supervised tokens in the token shards of a segment and of all before it; largest first.

    Documents that are quarantined since count too; those that a person took out do not: nothing is to be learned of them.
    """
    used = token_shards_of(ledger, segment)
    sql = """SELECT token_shard, domain, SUM(supervised_tokens) AS tokens FROM documents
        WHERE fate IN ('train', 'quarantined') AND token_shard IS NOT NULL GROUP BY token_shard, domain"""
    found: Counter[str] = Counter()
    for group in ledger.read(sql):
        if group["token_shard"] in used:
            found[group["domain"]] += int(group["tokens"])
    total = sum(found.values())
    return {name: count / total for name, count in sorted(found.items(), key=lambda one: (-one[1], one[0])) if count}
