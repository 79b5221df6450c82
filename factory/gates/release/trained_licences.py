"""Counts the tokens that a candidate was trained on, by licence, and finds the licences that do not allow the release of the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from factory.ingest.rules.licence_claims import find_licence_conflicts, find_relicensed_documents
from factory.ingest.rules.policy import LicenceRules
from factory.ledger.ledger import Ledger, documents
from factory.ledger.rows import SegmentRow

AT_ONCE = 5000  # keys in one query
NONE = "no licence"  # the name for documents without a licence


def count_tokens_by_licence(ledger: Ledger, segment: int | None, policy: LicenceRules | None = None) -> dict[str, int]:
    """Return licence → supervised tokens in the token shards of a segment and of all segments before it. '' stands for no licence.

    ``segment`` None: only the documents of all token shards that are still trained on. With a segment, documents that were quarantined or removed
    after training count too. Documents that every plan masks do not count (``find_masked_documents``). With a ``policy``, a text with several
    licences counts under the strictest one, unless a person settled which licence is right (``factory.ingest.rules.licence_claims``). Without a
    policy, it counts under the licence of the row that was kept.
    """
    used = list_token_shards_of_lineage(ledger, segment) if segment is not None else list_token_shards(ledger)
    fates = "('train', 'quarantined', 'removed')" if segment is not None else "('train')"
    sql = f"""SELECT token_shard, license, SUM(supervised_tokens) AS tokens FROM documents
        WHERE fate IN {fates} AND token_shard IS NOT NULL GROUP BY token_shard, license"""
    found: Counter[str] = Counter()
    for group in ledger.read(sql):
        if group["token_shard"] in used:
            found[group["license"] or ""] += group["tokens"]
    masked = find_masked_documents(ledger, segment) if segment is not None else {}
    for row in masked.values():
        found[row["license"] or ""] -= row["supervised_tokens"]
    found = +found
    if policy is None:
        return dict(found)
    for one in find_relicensed_documents(ledger, policy).values():
        if one.token_shard in used and one.key not in masked:
            own = one.claims[0].license
            found[own] -= one.supervised_tokens
            found[one.find_effective_licence(policy)] += one.supervised_tokens
            if not found[own]:
                del found[own]
    return dict(found)


def count_disputed_tokens(ledger: Ledger, segment: int, policy: LicenceRules) -> int:
    """Return the number of supervised tokens whose licence forbids a release, but for which another shard names a licence that allows it.

    A person can settle which licence is right.
    """
    used, masked = list_token_shards_of_lineage(ledger, segment), find_masked_documents(ledger, segment)
    return sum(
        one.supervised_tokens
        for one in find_licence_conflicts(ledger)
        if one.token_shard in used
        and one.key not in masked
        and not policy.find_licence(one.find_effective_licence(policy)).release
        and any(policy.find_licence(name).release for name in one.licences_that_count)
    )


def list_token_shards_of_lineage(ledger: Ledger, segment: int) -> set[str]:
    """Return the ids of the token shards of a segment and of all segments before it."""
    return {shard["id"] for plan in _plans(ledger, segment) for shard in plan["token_shards"]}


def find_masked_documents(ledger: Ledger, segment: int) -> dict[str, dict[str, Any]]:
    """Return the documents of the segment's lineage from which nothing was learned, by key. Every plan with their token shard masks them, because
    they were removed before the first such plan. Each has ``license``, ``token_shard``, ``supervised_tokens`` and ``detail``."""
    plans = [
        ({shard["id"] for shard in plan["token_shards"]}, set(plan.get("masked", ())))
        for plan in _plans(ledger, segment)
    ]
    keys = sorted({key for _, masked in plans for key in masked})
    c = documents.c
    columns = sa.select(c.key, c.license, c.token_shard, c.supervised_tokens, c.detail)
    parts = [keys[start : start + AT_ONCE] for start in range(0, len(keys), AT_ONCE)]
    rows = [row for part in parts for row in ledger.select_rows(columns.where(c.key.in_(part)))]
    return {
        row["key"]: row
        for row in rows
        if all(row["key"] in masked for ids, masked in plans if row["token_shard"] in ids)
    }


def _plans(ledger: Ledger, segment: int) -> list[Mapping[str, Any]]:
    names = dict.fromkeys(row.data_plan for row in SegmentRow.read_lineage(ledger, segment))
    return [ledger.read("SELECT plan FROM data_plans WHERE id = :id", id=name)[0]["plan"] for name in names]


def list_token_shards(ledger: Ledger) -> set[str]:
    return {row["id"] for row in ledger.read("SELECT id FROM token_shards")}


def compute_unreleasable_shares(policy: LicenceRules, tokens: Mapping[str, int]) -> dict[str, float]:
    """Return licence → share of the tokens, largest first, for the licences that do not allow a release under ``policy``.

    >>> compute_unreleasable_shares(LicenceRules(), {"": 25, "unheard of": 75})
    {'unheard of': 0.75, 'no licence': 0.25}
    """
    total = sum(tokens.values())
    shares = {
        name or NONE: count / total for name, count in tokens.items() if count and not policy.find_licence(name).release
    }
    return dict(sorted(shares.items(), key=lambda one: (-one[1], one[0])))
