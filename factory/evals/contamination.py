"""Checks that a candidate was not trained on held-out text.

Both checks look at all held-out documents, including those that are not in the suite, because the next suite may contain them.

``no_held_out_in_training``  in the ledger, no training document has the content hash of a held-out document
``no_shared_ngrams``         in the token shards, no training document has the same tokens as a held-out document, and for each held-out
                             document at most a share of its n-grams occurs in the token shards
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from factory.evals.policy import EvalPolicy
from factory.evals.probes.checks import ProbeCheck, join_sentences
from factory.ingest.shapes.tool_calls import strip_tools
from factory.ingest.tokenizer import Tokenizer
from factory.ledger.ledger import Ledger, documents, held_out
from factory.ledger.removals import REMOVED_FATE
from kernels.contract.message import Message
from trainer.contract.data.token_shard import TokenShard

BLOCK = 1 << 21  # tokens hashed at once
LONGEST = 65536  # most characters of a held-out text that are encoded
_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2⁶⁴

Tokens = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]


def check_contamination(
    ledger: Ledger, tokenizer: Tokenizer, shards: Sequence[TokenShard], policy: EvalPolicy
) -> list[ProbeCheck]:
    """Return both checks of the token shards that a candidate was trained on."""
    found = list(_held_out_tokens(ledger, tokenizer))
    held, skipped = {key: ids for key, ids, _ in found}, {key: tools for key, _, tools in found}
    size, limit = policy.contamination_ngram, policy.contamination_overlap
    return [_same_hashes(ledger), check_shared_ngrams(held, shards, size, limit, skipped)]


def _same_hashes(ledger: Ledger) -> ProbeCheck:
    held, train = documents.alias("held"), documents.alias("train")
    both = sa.select(held.c.key, train.c.key.label("train")).join(
        train, held.c.content_sha256 == train.c.content_sha256
    )
    found = ledger.select_rows(both.where(held.c.fate == "held_out", train.c.fate == "train").limit(1000))
    total = ledger.select_rows(sa.select(sa.func.count()).select_from(documents).where(documents.c.fate == "held_out"))[
        0
    ]
    if found:
        detail = Message(
            "contamination.held_out",
            "{count:,|held-out document is also a training document|held-out documents are also training "
            "documents}. First: {first}",
            count=len(found), first=found[0]["key"],
        )  # fmt: skip
    else:
        detail = Message(
            "contamination.not_held_out", "None of {documents:,} held-out documents has the content hash of a training document",
            documents=next(iter(total.values())),
        )  # fmt: skip
    return ProbeCheck("no_held_out_in_training", not found, detail)


def _held_out_tokens(ledger: Ledger, tokenizer: Tokenizer) -> Iterator[tuple[str, Tokens, int]]:
    """Yield (key, ids from BOS to the end token, length of a leading system turn that lists tools) for every held-out document."""
    h, d = held_out.c, documents.c
    living = sa.select(h.key, h.content).join(documents, d.key == h.key).where(d.fate != REMOVED_FATE).order_by(h.key)
    for row in ledger.select_rows(living):
        content = row["content"]
        messages = content.get("messages")
        ids, _ = tokenizer.encode_messages(messages) if messages else tokenizer.encode_text(content["text"][:LONGEST])
        tools = 0
        if messages and strip_tools(messages[0]["content"]) != messages[0]["content"]:
            tools = next(iter(np.flatnonzero(ids == tokenizer.stop_token).tolist()), 0)
        yield row["key"], ids.astype(np.int64), tools


def check_shared_ngrams(
    held_out_ids: dict[str, Tokens],
    shards: Sequence[TokenShard],
    size: int,
    limit: float,
    skipped_tokens: Mapping[str, int] | None = None,
) -> ProbeCheck:
    """Check that no held-out document occurs in the token shards.

    A document is contaminated if a training document has the same ids, or if more than ``limit`` of its n-grams of ``size`` tokens occur in the
    shards. ``held_out_ids``: ids by document key. ``skipped_tokens``: by key, the number of leading tokens that do not count, because many chats
    share the same list of tools.
    """
    runs = {key: hash_ngrams(ids[(skipped_tokens or {}).get(key, 0) :], size) for key, ids in held_out_ids.items()}
    wanted = np.unique(np.concatenate([np.zeros(0, np.uint64), *runs.values()]))
    copies: dict[str, str] = {}  # held-out key → key of the training document with the same tokens
    seen = np.zeros(len(wanted), bool)  # for each wanted hash: does it occur in the shards?
    for shard in shards:
        _copies(shard, held_out_ids, copies)
        _runs(shard, wanted, size, seen)
    shares = {
        key: float(seen[np.searchsorted(wanted, mine)].mean()) if len(mine) else 0.0 for key, mine in runs.items()
    }
    over = [key for key, share in shares.items() if share > limit and key not in copies]
    details = [
        Message(
            "contamination.largest_share",
            "Of {documents:,} held-out documents, the most contaminated has {share:.0%} of its {size}-grams in "
            "training data. At most {limit:.0%} is allowed",
            share=max(shares.values(), default=0), size=size, documents=len(held_out_ids), limit=limit,
        )
    ]  # fmt: skip
    if over:
        details.append(
            Message(
                "contamination.over",
                "{count:,|held-out document has|held-out documents have} more n-grams in training data than the "
                "limit allows. First: {first}",
                count=len(over),
                first=over[0],
            )
        )
    if copies:
        first, copy = next(iter(copies.items()))
        details.append(
            Message(
                "contamination.copies",
                "{count:,|held-out document has|held-out documents have} the same tokens as a training document. "
                "First: held-out document {first} and training document {copy}",
                count=len(copies), first=first, copy=copy,
            )
        )  # fmt: skip
    return ProbeCheck("no_shared_ngrams", not over and not copies, join_sentences(details))


def _copies(shard: TokenShard, held: dict[str, Tokens], copies: dict[str, str]) -> None:
    kind = shard.tokens.dtype
    whole = {ids.astype(kind).tobytes(): key for key, ids in held.items()}
    lengths = np.unique([len(ids) for ids in held.values()])
    columns = [shard.documents.column(name).to_numpy() for name in ("start", "length")]
    for place in np.flatnonzero(np.isin(columns[1], lengths)).tolist():
        first, length = (int(column[place]) for column in columns)
        if (key := whole.get(shard.tokens[first : first + length].tobytes())) is not None:
            copies.setdefault(key, shard.documents.column("key")[place].as_py())


def _runs(shard: TokenShard, wanted: Hashes, size: int, seen: npt.NDArray[np.bool_]) -> None:
    for start in range(0, len(shard.tokens) if len(wanted) else 0, BLOCK):
        here = hash_ngrams(shard.tokens[start : start + BLOCK + size - 1], size)
        if len(here):
            at = np.searchsorted(wanted, here).clip(max=len(wanted) - 1)
            seen[at[wanted[at] == here]] = True


def hash_ngrams(tokens: npt.NDArray[Any], size: int) -> Hashes:
    """Return a 64-bit hash of every n-gram of ``size`` tokens, shape [L - size + 1].

    The hash is a polynomial in an odd base b modulo 2⁶⁴, mixed once. It is computed as a difference of prefix sums Σ token·bʲ, divided by b to the
    power of the n-gram's start. So long n-grams cost no more than short ones.

    >>> first, *_, last = hash_ngrams(np.array([5, 6, 7, 5, 6]), 2)
    >>> bool(first == last), len(hash_ngrams(np.array([5]), 2))
    (True, 0)
    """
    count = len(tokens) - size + 1
    if count < 1:
        return np.zeros(0, np.uint64)
    wide = (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(0xBF58476D1CE4E5B9)
    wide ^= wide >> np.uint64(31)
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(wide * _powers(_BASE, len(tokens)), dtype=np.uint64)])
    total = (sums[size:] - sums[:count]) * _powers(pow(_BASE, -1, 1 << 64), count)
    return total ^ (total >> np.uint64(29))


def _powers(base: int, count: int) -> Hashes:
    """Return the first ``count`` powers of ``base`` modulo 2⁶⁴, from b⁰ on."""
    powers = np.full(count, base, np.uint64)
    powers[0] = 1
    return np.cumprod(powers, dtype=np.uint64)
