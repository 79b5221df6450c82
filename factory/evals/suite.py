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
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from factory.core.policy_file import policy_sha256
from factory.evals.policy import EvalPolicy
from factory.ingest.rules.split import cluster_of, is_sealed
from factory.ledger.ledger import Ledger, documents, held_out
from factory.ledger.removals import FATE

# Raise a task's number when its items or their scoring change: old evaluations are then never compared with new ones.
TASK_VERSIONS = {"bpb": 1, "cloze": 1, "chat": 2, "baselines": 1, "noise": 1, "dev": 1}


@dataclass(frozen=True)
class HeldOutDocument:
    """One held-out document. ``content`` is {"text": …} or {"messages": […]}."""

    key: str
    domain: str
    cluster: str  # source document: its items rise and fall together
    content: dict[str, Any]

    @property
    def messages(self) -> list[dict[str, Any]] | None:
        return self.content.get("messages")


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
    sealed = held_out_documents(ledger, policy.documents_per_domain, sealed=True, share=policy.source_share)
    dev = held_out_documents(ledger, policy.dev_documents_per_domain, sealed=False, share=policy.source_share)
    identity = {"tasks": TASK_VERSIONS, "policy": policy_sha256(policy), "tokenizer": tokenizer_sha256}
    items = {"items": list(map(item_identity, sealed)), "dev": list(map(item_identity, dev))}
    return Suite(identity_sha256(identity | items), sealed, dev)


def held_out_documents(
    ledger: Ledger, per_domain: int, sealed: bool, share: float = 1.0
) -> tuple[HeldOutDocument, ...]:
    """At most so many documents of a domain and half, by content hash: one of each cluster first, then a second; of one cluster at most
    ``share`` of them."""
    h, d = held_out.c, documents.c
    by_domain: dict[str, list[tuple[str, str, str]]] = defaultdict(list)
    listed = sa.select(h.key, h.domain, h.source, d.content_sha256).join(documents, d.key == h.key)
    for row in ledger.rows(listed.where(d.fate != FATE)):
        cluster = cluster_of(row["key"], row["source"])
        if is_sealed(cluster) == sealed:
            drawn = order("suite", row["content_sha256"] or row["key"])
            by_domain[row["domain"]].append((drawn, cluster, row["key"]))
    chosen: list[str] = []
    for drawn_ones in by_domain.values():
        seen: Counter[str] = Counter()
        turns = []
        for drawn, cluster, key in sorted(drawn_ones):
            turns.append((seen[cluster], drawn, key))
            seen[cluster] += 1
        turns.sort()
        most = largest_share(Counter(turn for turn, _, _ in turns[:per_domain]), share)
        chosen += [key for turn, _, key in turns[:per_domain] if turn < most]
    return documents_of(ledger, chosen)


def largest_share(turns: Mapping[int, int], share: float) -> int:
    """How many documents a source gives at most, so that none gives more than ``share`` of all; where so few sources cannot, no limit.

    ``turns``: turn (0: a source's first document) → how many sources have so many.

    >>> largest_share({0: 9, 1: 1, 2: 1, 3: 1, 4: 1}, 0.25), largest_share({0: 2, 1: 2, 2: 2}, 0.25)
    (2, 3)
    """
    most = total = 0
    for turn in sorted(turns):
        total += turns[turn]
        if turn + 1 <= share * total:
            most = turn + 1
    return most or len(turns)


def documents_of(ledger: Ledger, keys: list[str]) -> tuple[HeldOutDocument, ...]:
    """Held-out documents, in the order of a suite."""
    rows = [row for start in range(0, len(keys), 500) for row in _fetch(ledger, keys[start : start + 500])]
    found = [
        HeldOutDocument(row["key"], row["domain"], cluster_of(row["key"], row["source"]), row["content"])
        for row in rows
    ]
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


def _fetch(ledger: Ledger, keys: list[str]) -> list[dict[str, Any]]:
    return ledger.rows(sa.select(held_out).where(held_out.c.key.in_(keys)))


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=True).encode()
