"""The suite: which held-out documents every candidate is measured on, and the hash that names them.

The release gate decides on documents of the *sealed* half (``factory.ingest.rules.split``), which nothing else reads. A few of the dev half are
measured beside them: a model that is better there, and not on what nobody saw, was fitted to the dev half, and one that is better on the
sealed half alone has seen that.

The choice is by content hash, so it is the same for every candidate; new held-out documents may displace old ones, which makes a new
suite, and the champion is then measured again on that one before the two are compared.
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

from factory.core.policy_file import policy_sha256
from factory.evals.policy import EvalPolicy
from factory.ingest.shapes.chats import carries_loss
from factory.ledger.ledger import Ledger, documents, held_out
from factory.ledger.removals import FATE


# How much of a domain one source may be, in bytes that are scored: documents of one source rise and fall together.
def within(share: float, sizes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """How many documents each source gives, so that none gives more than ``share`` of the bytes of all. ``sizes``: by source, bytes of its
    documents in the order in which it gives them.

    Each gives its first one, whatever its size, and more up to one number of bytes, the same for all sources and the largest with which none of
    them is above the share. Where so few sources cannot, all.

    >>> within(0.25, {"a": [2000] * 9, "b": [300] * 9, "c": [300] * 9, "d": [300] * 9, "e": [300] * 9})
    {'a': 1, 'b': 9, 'c': 9, 'd': 9, 'e': 9}
    >>> within(0.25, {"a": [2000] * 9, "b": [300], "c": [300]})
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


# Raise a task's number when its items or their scoring change: old evaluations are then never compared with new ones.
TASK_VERSIONS = {"bpb": 1, "cloze": 1, "chat": 3, "baselines": 1, "noise": 1, "dev": 1}


@dataclass(frozen=True)
class HeldOutDocument:
    """One held-out document. ``content`` is {"text": …} or {"messages": […]}."""

    key: str
    domain: str
    cluster: str  # its group, ``held_out.group_key``: its items rise and fall together
    content: dict[str, Any]

    @property
    def messages(self) -> list[dict[str, Any]] | None:
        return self.content.get("messages")

    @property
    def bytes(self) -> int:
        """UTF-8 bytes of what is scored: of messages, the assistant's words, but for answers of weight 0."""
        said = [str(one["content"]) for one in self.messages or () if carries_loss(one)]
        return len("".join(said if self.messages is not None else [self.content["text"]]).encode())


@dataclass(frozen=True)
class SourceCap:
    """No source gives more than ``share`` of a domain's bytes, ``document_bytes`` of a document at most (``within``)."""

    share: float
    document_bytes: int

    def kept(self, ones: Sequence[HeldOutDocument]) -> set[str]:
        """Keys of those of a domain that stay, of each source the first ones."""
        of: dict[str, list[HeldOutDocument]] = defaultdict(list)
        for one in ones:
            of[one.cluster].append(one)
        sizes = {cluster: [min(self.document_bytes, one.bytes) for one in mine] for cluster, mine in of.items()}
        return {one.key for cluster, count in within(self.share, sizes).items() for one in of[cluster][:count]}


@dataclass(frozen=True)
class Suite:
    sha256: str
    documents: tuple[HeldOutDocument, ...]  # sealed, sorted by domain, then by hash
    dev: tuple[HeldOutDocument, ...] = ()  # sorted so too

    @property
    def domains(self) -> list[str]:
        return sorted({document.domain for document in self.documents})

    def of(self, domain: str) -> list[HeldOutDocument]:
        return [document for document in self.documents if document.domain == domain]


def build_suite(ledger: Ledger, policy: EvalPolicy, tokenizer_sha256: str) -> Suite:
    """The suite of the ledger's held-out documents as they are now."""
    cap = SourceCap(policy.source_share, policy.document_bytes)
    sealed = held_out_documents(ledger, policy.documents_per_domain, sealed=True, cap=cap)
    dev = held_out_documents(ledger, policy.dev_documents_per_domain, sealed=False, cap=cap)
    identity = {"tasks": TASK_VERSIONS, "policy": policy_sha256(policy), "tokenizer": tokenizer_sha256}
    items = {"items": list(map(item_identity, sealed)), "dev": list(map(item_identity, dev))}
    return Suite(identity_sha256(identity | items), sealed, dev)


def held_out_documents(
    ledger: Ledger, per_domain: int, sealed: bool, cap: SourceCap | None = None
) -> tuple[HeldOutDocument, ...]:
    """At most so many documents of a domain and half, by content hash: one of each cluster first, then a second; of one cluster no more than
    ``cap`` allows."""
    h, d = held_out.c, documents.c
    by_domain: dict[str, list[tuple[str, str, str]]] = defaultdict(list)
    listed = sa.select(h.key, h.domain, h.group_key, d.content_sha256).join(documents, d.key == h.key)
    for row in ledger.rows(listed.where(d.fate != FATE, h.sealed == sealed)):
        drawn = order("suite", row["content_sha256"] or row["key"])
        by_domain[row["domain"]].append((drawn, row["group_key"], row["key"]))
    chosen: dict[str, list[str]] = {}  # by domain, in the order of turns
    for domain, drawn_ones in by_domain.items():
        seen: Counter[str] = Counter()
        turns = []
        for drawn, cluster, key in sorted(drawn_ones):
            turns.append((seen[cluster], drawn, key))
            seen[cluster] += 1
        chosen[domain] = [key for _, _, key in sorted(turns)[:per_domain]]
    found = documents_of(ledger, [key for keys in chosen.values() for key in keys])
    if cap is None:
        return found
    known = {document.key: document for document in found}
    kept = {key for keys in chosen.values() for key in cap.kept([known[key] for key in keys])}
    return tuple(document for document in found if document.key in kept)


def documents_of(ledger: Ledger, keys: list[str]) -> tuple[HeldOutDocument, ...]:
    """Held-out documents, in the order of a suite."""
    parts = [sa.select(held_out).where(held_out.c.key.in_(keys[at : at + 500])) for at in range(0, len(keys), 500)]
    rows = [row for part in parts for row in ledger.rows(part)]
    found = [HeldOutDocument(row["key"], row["domain"], row["group_key"], row["content"]) for row in rows]
    return tuple(sorted(found, key=lambda document: (document.domain, order("suite", document.key))))


def item_identity(document: HeldOutDocument) -> list[str]:
    """What names a held-out document without its text: key, domain, cluster, SHA-256 of its content."""
    content = hashlib.sha256(_canonical(document.content)).hexdigest()
    return [document.key, document.domain, document.cluster, content]


def identity_sha256(identity: Mapping[str, Any]) -> str:
    """The name of a suite: of its tasks, policy, tokenizer and items."""
    return hashlib.sha256(_canonical(identity)).hexdigest()


def order(*parts: str) -> str:
    """A fixed, arbitrary order: the hash of the parts."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=True).encode()
