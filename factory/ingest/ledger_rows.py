"""Writes the ledger's rows about an ingested shard. All functions write in the caller's transaction."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import sqlalchemy as sa

from agents.core.untrusted import fold_to_one_line
from factory.ingest.decisions import ShardDecisions
from factory.ingest.document import SYNTHETIC_PREFIX, Row
from factory.ingest.hash_index import HashedDocument
from factory.ingest.rules.policy import LicenceRules
from factory.ingest.tokenizer import Tokenizer
from factory.ingest.worker import FinishedDocument
from factory.ledger.ledger import documents, held_out, tokenizers

LONGEST_EXAMPLE = 300  # characters
_AT_ONCE = 20_000  # rows in one statement
NO_GRAMS = np.zeros(0, np.uint64)


def summarise_shard_rows(rows: Sequence[Row]) -> dict[str, Any]:
    """Return ``counts``, ``domains`` and ``tokens`` for the shard's row in the ledger's table ``shards``."""
    assert all(row.fate for row in rows)
    fates = Counter(row.fate for row in rows)
    kinds: Counter[str] = Counter()
    domains: dict[str, dict[str, int]] = {}
    for row in rows:
        if row.fate == "dropped":
            continue
        kinds.update(row.pii)
        if row.fate == "train":
            domain = domains.setdefault(row.domain, {"documents": 0, "tokens": 0, "supervised_tokens": 0})
            domain["documents"] += 1
            domain["tokens"] += row.tokens
            domain["supervised_tokens"] += row.supervised_tokens
    counts = {
        "train": fates["train"],
        "held_out": fates["held_out"],
        "dropped": dict(sorted(Counter(row.rule for row in rows if row.fate == "dropped").items())),
        "pii": kinds.total(),
        "pii_kinds": dict(sorted(kinds.items())),
        "trimmed": sum(row.trimmed > 0 for row in rows),
    }
    if examples := _examples(rows):
        counts["examples"] = examples
    return {"counts": counts, "domains": domains, "tokens": sum(domain["tokens"] for domain in domains.values())}


def count_release_blockers(rows: Sequence[Row], policy: LicenceRules) -> dict[str, dict[str, Any]]:
    """Count the training documents that hold a release back, by licence as written. Each count has a reason: 'missing', 'listed' or 'unlisted'."""
    counts = Counter(row.license or "" for row in rows if row.fate == "train" and not row.releasable)
    why = lambda name: "listed" if policy.is_listed(name) else "unlisted" if name else "missing"
    return {name: {"documents": count, "why": why(name)} for name, count in sorted(counts.items())}


def _examples(rows: Sequence[Row]) -> dict[str, str]:
    """Return the first row that each rule dropped, by rule."""
    found: dict[str, str] = {}
    for row in rows:
        if row.fate == "dropped" and row.rule:
            found.setdefault(row.rule, f"row {row.number}: {fold_to_one_line(row.detail or '', LONGEST_EXAMPLE)}")
    return dict(sorted(found.items()))


def write_tokenizer(tx: sa.Connection, tokenizer: Tokenizer, place: str) -> None:
    if tx.execute(sa.select(tokenizers.c.sha256)).scalar() is None:
        tx.execute(
            tokenizers.insert().values(
                sha256=tokenizer.sha256, path=place, vocab_size=tokenizer.vocab_size, created_at=time.time()
            )
        )


def write_documents(tx: sa.Connection, rows: Iterable[Row], sha256: str, token_shard: str | None) -> None:
    _insert(
        tx,
        documents,
        (
            {
                "key": row.key, "id": row.id, "shard": sha256, "row": row.number, "domain": row.domain,
                "source": row.source, "license": row.license, "content_sha256": row.content_sha256, "fate": row.fate,
                "rule": row.rule, "matched": row.matched, "detail": _detail(row), "releasable": row.releasable,
                "tokens": row.tokens, "supervised_tokens": row.supervised_tokens,
                "token_shard": token_shard if row.fate == "train" else None, "group_key": row.group_key, "facts": row.grouping_facts or None,
            }
            for row in rows
        ),
    )  # fmt: skip


def write_held_out_rows(
    tx: sa.Connection, rows: Iterable[Row], finished_documents: Mapping[str, FinishedDocument]
) -> None:
    """Write the contents of the held-out documents."""
    held = ((row, finished_documents[row.key].content) for row in rows if row.fate == "held_out")
    _insert(
        tx,
        held_out,
        (
            {
                "key": row.key,
                "domain": row.domain,
                "group_key": row.held_out_group,
                "sealed": row.is_sealed,
                "content": content,
            }
            for row, content in held
        ),
    )


def collect_document_hashes(
    rows: Sequence[Row], decisions: ShardDecisions, finished_documents: Mapping[str, FinishedDocument]
) -> Iterator[HashedDocument]:
    """Yield the hashes with which later shards are compared, for each kept document and each text whose licence does not allow training. Such a
    text gets only a signature, by which copies of it are found."""
    barring = (row for row in rows if row.rule == "licence" and row.key in decisions.numbers)
    for row in (*(row for row in rows if row.fate != "dropped"), *barring):
        is_held = row.fate == "held_out"
        grams = (
            decisions.held_out[row.key]
            if is_held
            else finished_documents[row.key].sampled
            if row.fate == "train"
            else NO_GRAMS
        )
        yield HashedDocument(row.key, decisions.signatures[decisions.numbers[row.key]], grams, is_held)


def _detail(row: Row) -> str | None:
    replaced = ", ".join(f"{count} {kind}" for kind, count in sorted(row.pii.items()))
    maker = f"{SYNTHETIC_PREFIX}{row.synthetic_by}" if row.synthetic_by else None
    words = [maker, row.detail, f"replaced: {replaced}" if replaced and row.fate != "dropped" else None]
    return "; ".join(word for word in words if word) or None


def _insert(tx: sa.Connection, table: sa.Table, values: Iterator[dict[str, Any]]) -> None:
    while batch := list(islice(values, _AT_ONCE)):
        tx.execute(table.insert(), batch)
