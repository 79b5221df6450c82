"""The ledger rows of an ingested shard, all written in the caller's one transaction."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import sqlalchemy as sa

from agents.core.untrusted import one_line
from factory.ingest.decide import Decided
from factory.ingest.document import SYNTHETIC, Row
from factory.ingest.index import PARAMETERS, signature_bytes
from factory.ingest.rules.policy import Licences
from factory.ingest.tokenizer import Tokenizer
from factory.ingest.worker import Finished
from factory.ledger.ledger import (
    documents,
    held_out,
    meta,
    near_dup_bands,
    near_dup_signatures,
    ngrams,
    token_shards,
    tokenizers,
)  # fmt: skip
from trainer.contract.data.token_shard import TokenShard

LONGEST_EXAMPLE = 300  # characters
_AT_ONCE = 20_000  # rows in one statement


def totals(rows: Sequence[Row]) -> dict[str, Any]:
    """``counts``, ``domains`` and ``tokens`` of the ledger's ``shards`` row."""
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


def held_back(rows: Sequence[Row], policy: Licences) -> dict[str, dict[str, Any]]:
    """By licence as it is written, the training documents that no release may hold: how many, and why ('missing', 'listed' as such, 'unlisted',
    then with the ``near`` name that is listed, if any)."""
    found: dict[str, dict[str, Any]] = {}
    for name, count in sorted(
        Counter(row.license or "" for row in rows if row.fate == "train" and not row.releasable).items()
    ):
        about: dict[str, Any] = {
            "documents": count,
            "why": "listed" if policy.lists(name) else "unlisted" if name else "missing",
        }
        if name and about["why"] == "unlisted" and (near := policy.near(name)):
            about["near"] = near
        found[name] = about
    return found


def _examples(rows: Sequence[Row]) -> dict[str, str]:
    """By rule, the first row that it dropped."""
    found: dict[str, str] = {}
    for row in rows:
        if row.fate == "dropped" and row.rule:
            found.setdefault(row.rule, f"row {row.number}: {one_line(row.detail or '', LONGEST_EXAMPLE)}")
    return dict(sorted(found.items()))


def write_parameters(tx: sa.Connection, parameters: str) -> None:
    if tx.execute(sa.select(meta.c.value).where(meta.c.key == PARAMETERS)).scalar() is None:
        tx.execute(meta.insert().values(key=PARAMETERS, value=parameters))


def write_tokenizer(tx: sa.Connection, tokenizer: Tokenizer, place: str) -> None:
    if tx.execute(sa.select(tokenizers.c.sha256)).scalar() is None:
        tx.execute(
            tokenizers.insert().values(
                sha256=tokenizer.sha256,
                path=place,
                vocab_size=tokenizer.vocab_size,
                created_at=time.time(),
            )
        )


def write_token_shard_row(
    tx: sa.Connection,
    shard: TokenShard,
    place: str,
    sha256: str,
    tokenizer: Tokenizer | None,
    domains: dict[str, Any],
) -> None:
    assert tokenizer
    tx.execute(
        token_shards.insert().values(
            id=shard.id,
            shard=sha256,
            path=place,
            tokenizer=tokenizer.sha256,
            documents=shard.manifest["documents"],
            tokens=shard.manifest["tokens"],
            domains=domains,
            created_at=time.time(),
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
                "token_shard": token_shard if row.fate == "train" else None, "group_key": row.group_key, "facts": row.facts or None,
            }
            for row in rows
        ),
    )  # fmt: skip


def write_index(tx: sa.Connection, rows: Sequence[Row], decided: Decided, finished: dict[str, Finished]) -> None:
    """Held-out contents, near-duplicate bands and signatures, n-grams: what later shards are compared with. Of a text whose licence does not
    allow training only what its copies are known by."""
    kept = [row for row in rows if row.fate != "dropped"]
    held = [row for row in kept if row.fate == "held_out"]
    contents = ((row, finished[row.key].content) for row in held)
    _insert(
        tx,
        held_out,
        (
            {"key": row.key, "domain": row.domain, "group_key": row.held_as, "sealed": row.sealed, "content": content}
            for row, content in contents
        ),
    )
    barring = [row for row in rows if row.rule == "licence" and row.key in decided.numbers]
    numbers = [(row.key, decided.numbers[row.key]) for row in (*kept, *barring)]
    _insert_plain(
        tx,
        near_dup_bands,
        ((band, value, key) for key, number in numbers for band, value in enumerate(decided.near.bands_of(number))),
    )
    _insert_plain(
        tx, near_dup_signatures, ((key, signature_bytes(decided.signatures[number])) for key, number in numbers)
    )
    grams = [(row.key, decided.held_out[row.key], True) for row in held]
    grams += [(row.key, finished[row.key].sampled, False) for row in kept if row.fate == "train"]
    _insert_plain(
        tx,
        ngrams,
        ((value, key, is_held) for key, found, is_held in grams for value in found.astype(np.int64).tolist()),
    )


def _detail(row: Row) -> str | None:
    replaced = ", ".join(f"{count} {kind}" for kind, count in sorted(row.pii.items()))
    maker = f"{SYNTHETIC}{row.synthetic_by}" if row.synthetic_by else None
    words = [maker, row.detail, f"replaced: {replaced}" if replaced and row.fate != "dropped" else None]
    return "; ".join(word for word in words if word) or None


def _insert_plain(tx: sa.Connection, table: sa.Table, values: Iterator[tuple[Any, ...]]) -> None:
    """As ``_insert``, for tables of plain columns in their order: most rows are theirs, and SQLAlchemy's work for a row
    takes longer than SQLite's.
    """
    names = [column.name for column in table.columns]
    compiled = table.insert().compile(dialect=tx.dialect, column_keys=names)
    while batch := list(islice(values, _AT_ONCE)):
        rows: Any = batch if compiled.positional else [dict(zip(names, row)) for row in batch]
        tx.exec_driver_sql(str(compiled), rows)


def _insert(tx: sa.Connection, table: sa.Table, values: Iterator[dict[str, Any]]) -> None:
    while batch := list(islice(values, _AT_ONCE)):
        tx.execute(table.insert(), batch)
