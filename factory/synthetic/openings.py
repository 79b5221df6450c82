"""Takes openings of this workspace's own training documents as prompts, never of held-out documents: only documents with the fate 'train' are
selected, and token shards contain no held-out document."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from factory.core.errors import InputError
from factory.ingest.document import SYNTHETIC_PREFIX, Content
from factory.ingest.rules.licence_claims import find_relicensed_documents
from factory.ingest.rules.policy import LicenceRules
from factory.ingest.tokenizer import Tokenizer
from factory.ledger.ledger import Ledger, documents, token_shards
from factory.synthetic.prompts import Prompt
from trainer.contract.data.token_shard import TokenShard
from trainer.contract.errors import TrainerError

AT_ONCE = 5000  # values in one IN (…)


def sample_document_openings(
    ledger: Ledger,
    tokenizer: Tokenizer,
    count: int,
    tokens: int,
    domain: str | None,
    seed: int,
    licences: LicenceRules,
) -> list[Prompt]:
    """The openings of up to ``count`` documents that ``seed`` draws: the first ``tokens`` tokens, or the turns of a chat before its first answer.

    Left out are documents that a model wrote, documents of fewer than ``2 * tokens`` tokens, and documents that another shard has under a licence
    that does not allow training. Raises: InputError if no document is left, or a token shard is gone or damaged.
    """
    c = documents.c
    usable = [
        c.fate == "train",
        c.token_shard.is_not(None),
        c.tokens >= 2 * tokens,
        sa.or_(c.detail.is_(None), sa.not_(c.detail.like(f"{SYNTHETIC_PREFIX}%"))),
    ]
    usable += [c.domain == domain] if domain else []
    stricter = {
        key: one.find_effective_licence(licences) for key, one in find_relicensed_documents(ledger, licences).items()
    }
    barred = {key for key, licence in stricter.items() if not licences.find_licence(licence or None).train}
    drawn = heapq.nsmallest(count, ((_draw(key, seed), key) for key in _keys(ledger, usable) if key not in barred))
    if not drawn:
        raise InputError(
            "synthetic.no_opening",
            "no training document{domain} has at least {tokens} tokens. Ingest a shard, give prompts with --prompts FILE, or give "
            "fewer --opening-tokens",
            domain=f" of the domain {domain!r}" if domain else "",
            tokens=2 * tokens,
        )
    rows: dict[str, dict[str, Any]] = {}
    keys = [key for _, key in drawn]
    for start in range(0, len(keys), AT_ONCE):
        chosen = sa.select(c.key, c.domain, c.source, c.license, c.token_shard)
        for row in ledger.select_rows(chosen.where(c.key.in_(keys[start : start + AT_ONCE]))):
            rows[row["key"]] = row
    contents = _contents(ledger, tokenizer, rows, tokens)
    made = ((rows[key], contents.get(key)) for key in keys)
    return [
        Prompt(content, row["domain"], row["source"], stricter.get(row["key"], row["license"]) or None, row["key"])
        for row, content in made
        if content
    ]


def _draw(key: str, seed: int) -> bytes:
    return hashlib.sha256(f"{seed}:{key}".encode()).digest()


def _keys(ledger: Ledger, usable: list[sa.ColumnElement[bool]]) -> Iterator[str]:
    with ledger.engine.connect().execution_options(reads_only=True, yield_per=10_000) as connection:
        yield from connection.execute(sa.select(documents.c.key).where(*usable)).scalars()


def _contents(ledger: Ledger, tokenizer: Tokenizer, rows: dict[str, dict[str, Any]], tokens: int) -> dict[str, Content]:
    """By key, the opening of each document that has one."""
    import pyarrow as pa
    import pyarrow.compute as pc

    found: dict[str, Content] = {}
    by_shard: dict[str, list[str]] = {}
    for key, row in rows.items():
        by_shard.setdefault(row["token_shard"], []).append(key)
    for row in ledger.select_rows(sa.select(token_shards.c.id, token_shards.c.path)):
        if row["id"] not in by_shard:
            continue
        shard = TokenShard(Path(row["path"]))
        try:
            table = shard.documents
            wanted = table.filter(pc.is_in(table["key"], value_set=pa.array(by_shard[row["id"]])))
            for one in wanted.select(["key", "start", "length"]).to_pylist():
                start, stop = one["start"], one["start"] + one["length"]
                content = tokenizer.decode_document(
                    ids := shard.tokens[start:stop].astype(np.int64), shard.read_loss_mask(start, stop)
                )
                if opening := _opening(tokenizer, content, ids, tokens):
                    found[one["key"]] = opening
        except (TrainerError, OSError, ValueError) as error:
            raise InputError(
                "synthetic.token_shard",
                "the token shard {path} cannot be read: {error}. Stop 'factory run'. Then make the token shard again: 'factory check "
                "--repair'",
                path=row["path"],
                error=error,
            ) from error
    return found


def _opening(tokenizer: Tokenizer, content: Content, ids: npt.NDArray[np.int64], tokens: int) -> Content | None:
    if "messages" in content:
        roles = [message["role"] for message in content["messages"]]
        before = content["messages"][: roles.index("assistant")]
        return {"messages": before} if before else None
    if "rendered" in content:
        return None  # a chat of which only the text is known
    kept = ids[len(tokenizer.bos) :][:tokens]
    while len(kept) and not content["text"].startswith(tokenizer.decode(kept)):
        kept = kept[:-1]  # the last token ends inside a character
    text = tokenizer.decode(kept)
    return {"text": text} if text.strip() else None
