"""The suite: the held-out documents on which every candidate is measured, and the hash that identifies them.

The release gate decides on documents of the *sealed* half (``factory.ingest.rules.held_out_split``), which nothing else reads. Some documents of the
dev half are measured too. A model that improves only on the dev half was fitted to it, and a model that improves only on the sealed half has seen it.

Documents are chosen by content hash, so every candidate gets the same ones. New held-out documents may displace old ones and make a new suite. Then
the champion is measured again before a comparison.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import sqlalchemy as sa

from factory.core.policy_file import hash_policy
from factory.evals.policy import EvalPolicy
from factory.ingest.shapes.chats import has_loss
from factory.ledger.ledger import Ledger, documents, held_out
from factory.ledger.removals import REMOVED_FATE


# Documents of a source are correlated, so each source gets a limited share of a domain's scored bytes.
def compute_document_limit_by_source(share: float, sizes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Return the number of documents to take from each source, so that no source gives more than ``share`` of all bytes.

    ``sizes``: the bytes of each source's documents, in order. Each source gives its first document. It gives more documents up to a common limit of
    bytes, which is the largest that keeps all sources within the share. If there are too few sources for that, all documents are taken.

    >>> compute_document_limit_by_source(0.25, {"a": [2000] * 9, "b": [300] * 9, "c": [300] * 9, "d": [300] * 9, "e": [300] * 9})
    {'a': 1, 'b': 9, 'c': 9, 'd': 9, 'e': 9}
    >>> compute_document_limit_by_source(0.25, {"a": [2000] * 9, "b": [300], "c": [300]})
    {'a': 9, 'b': 1, 'c': 1}
    """
    sums = {source: list(accumulate(ones)) for source, ones in sizes.items() if ones}
    if len(sums) * share <= 1:
        return {source: len(ones) for source, ones in sums.items()}

    def fits(given: Mapping[str, int]) -> bool:
        total = sum(sums[source][count - 1] for source, count in given.items())
        return all(count == 1 or sums[source][count - 1] <= share * total for source, count in given.items())

    limits = sorted({one for ones in sums.values() for one in ones}, reverse=True)
    each = ({source: max(1, bisect_right(ones, most)) for source, ones in sums.items()} for most in limits)
    return next(filter(fits, each), dict.fromkeys(sums, 1))


# Raise a task's number when its items or scoring change, so that old evaluations are never compared with new ones.
TASK_VERSIONS = {"bpb": 1, "cloze": 1, "chat": 3, "baselines": 1, "noise": 1, "dev": 1}


@dataclass(frozen=True)
class HeldOutDocument:
    """A held-out document. ``content`` is {"text": …} or {"messages": […]}."""

    key: str
    domain: str
    cluster: str  # its group (``held_out.group_key``), whose items are correlated
    content: dict[str, Any]

    @property
    def messages(self) -> list[dict[str, Any]] | None:
        return self.content.get("messages")

    @property
    def bytes(self) -> int:
        """The number of UTF-8 bytes of the scored text. In a chat, only answers of the assistant with a weight above 0 are scored."""
        said = [str(one["content"]) for one in self.messages or () if has_loss(one)]
        return len("".join(said if self.messages is not None else [self.content["text"]]).encode())


@dataclass(frozen=True)
class SourceCap:
    """Limits each source to ``share`` of a domain's bytes (``compute_document_limit_by_source``). A document counts as at most ``document_bytes``
    bytes."""

    share: float
    document_bytes: int

    def select_keys_to_keep(self, documents: Sequence[HeldOutDocument]) -> set[str]:
        """Return the keys of those of a domain's documents that are kept: the first ones of each source."""
        of: dict[str, list[HeldOutDocument]] = defaultdict(list)
        for one in documents:
            of[one.cluster].append(one)
        sizes = {cluster: [min(self.document_bytes, one.bytes) for one in mine] for cluster, mine in of.items()}
        return {
            one.key
            for cluster, count in compute_document_limit_by_source(self.share, sizes).items()
            for one in of[cluster][:count]
        }


@dataclass(frozen=True)
class Suite:
    sha256: str
    documents: tuple[HeldOutDocument, ...]  # of the sealed half, sorted by domain, then by hash
    dev: tuple[HeldOutDocument, ...] = ()  # of the dev half, sorted in the same way

    @property
    def domains(self) -> list[str]:
        return sorted({document.domain for document in self.documents})

    def list_documents_of_domain(self, domain: str) -> list[HeldOutDocument]:
        return [document for document in self.documents if document.domain == domain]


def build_suite(ledger: Ledger, policy: EvalPolicy, tokenizer_sha256: str) -> Suite:
    """Return the suite of the ledger's present held-out documents."""
    cap = SourceCap(policy.source_share, policy.document_bytes)
    sealed = select_held_out_documents(ledger, policy.documents_per_domain, sealed=True, cap=cap)
    dev = select_held_out_documents(ledger, policy.dev_documents_per_domain, sealed=False, cap=cap)
    identity = {"tasks": TASK_VERSIONS, "policy": hash_policy(policy), "tokenizer": tokenizer_sha256}
    items = {
        "items": list(map(make_held_out_document_identity, sealed)),
        "dev": list(map(make_held_out_document_identity, dev)),
    }
    return Suite(hash_suite(identity | items), sealed, dev)


def select_held_out_documents(
    ledger: Ledger, per_domain: int, sealed: bool, cap: SourceCap | None = None
) -> tuple[HeldOutDocument, ...]:
    """Return at most ``per_domain`` documents of each domain from one half, in the order of content hashes.

    Each cluster gives its first document before any cluster gives a second, and no more than ``cap`` allows.
    """
    h, d = held_out.c, documents.c
    by_domain: dict[str, list[tuple[str, str, str]]] = defaultdict(list)
    listed = sa.select(h.key, h.domain, h.group_key, d.content_sha256).join(documents, d.key == h.key)
    for row in ledger.select_rows(listed.where(d.fate != REMOVED_FATE, h.sealed == sealed)):
        drawn = make_shuffling_sort_key("suite", row["content_sha256"] or row["key"])
        by_domain[row["domain"]].append((drawn, row["group_key"], row["key"]))
    chosen: dict[str, list[str]] = {}  # by domain, in the order of turns
    for domain, drawn_ones in by_domain.items():
        seen: Counter[str] = Counter()
        turns = []
        for drawn, cluster, key in sorted(drawn_ones):
            turns.append((seen[cluster], drawn, key))
            seen[cluster] += 1
        chosen[domain] = [key for _, _, key in sorted(turns)[:per_domain]]
    found = read_held_out_documents(ledger, [key for keys in chosen.values() for key in keys])
    if cap is None:
        return found
    known = {document.key: document for document in found}
    kept = {key for keys in chosen.values() for key in cap.select_keys_to_keep([known[key] for key in keys])}
    return tuple(document for document in found if document.key in kept)


def read_held_out_documents(ledger: Ledger, keys: list[str]) -> tuple[HeldOutDocument, ...]:
    """Return the held-out documents with these keys, in the order of a suite."""
    parts = [sa.select(held_out).where(held_out.c.key.in_(keys[at : at + 500])) for at in range(0, len(keys), 500)]
    rows = [row for part in parts for row in ledger.select_rows(part)]
    found = [HeldOutDocument(row["key"], row["domain"], row["group_key"], row["content"]) for row in rows]
    return tuple(sorted(found, key=lambda document: (document.domain, make_shuffling_sort_key("suite", document.key))))


def make_held_out_document_identity(document: HeldOutDocument) -> list[str]:
    """Return the identity of a held-out document without its text: key, domain, cluster, SHA-256 of its content."""
    content = hashlib.sha256(_canonical(document.content)).hexdigest()
    return [document.key, document.domain, document.cluster, content]


def hash_suite(identity: Mapping[str, Any]) -> str:
    """Return the hash of a suite's tasks, policy, tokenizer and items."""
    return hashlib.sha256(_canonical(identity)).hexdigest()


def make_shuffling_sort_key(*parts: str) -> str:
    """Return a sort key that gives a fixed, arbitrary order: the hash of the parts."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=True).encode()
