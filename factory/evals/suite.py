"""The suite: which held-out documents every candidate is measured on, and the hash that names them.

The choice is by content hash, so it is the same for every candidate; new held-out documents may displace old ones, which makes a new
suite, and the champion is then measured again on that one before the two are compared.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from factory.core.policy_file import policy_sha256
from factory.evals.policy import EvalPolicy
from factory.ledger.ledger import Ledger, documents, held_out

# Raise a task's number when its items or their scoring change: old evaluations are then never compared with new ones.
TASK_VERSIONS = {"bpb": 1, "cloze": 1, "chat": 2, "baselines": 1, "noise": 1}


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
    documents: tuple[HeldOutDocument, ...]  # sorted by domain, then by hash

    @property
    def domains(self) -> list[str]:
        return sorted({document.domain for document in self.documents})

    def of(self, domain: str) -> list[HeldOutDocument]:
        return [document for document in self.documents if document.domain == domain]


def build_suite(ledger: Ledger, policy: EvalPolicy, tokenizer_sha256: str) -> Suite:
    """The suite of the ledger's held-out documents as they are now."""
    listed = ledger.rows(
        sa.select(held_out.c.key, held_out.c.domain, documents.c.content_sha256).join(
            documents, documents.c.key == held_out.c.key
        )
    )
    by_domain: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for row in listed:
        by_domain[row["domain"]].append((order("suite", row["content_sha256"] or row["key"]), row["key"]))
    chosen = [key for domain in by_domain for _, key in sorted(by_domain[domain])[: policy.documents_per_domain]]
    rows = [row for start in range(0, len(chosen), 500) for row in _fetch(ledger, chosen[start : start + 500])]
    found = [HeldOutDocument(row["key"], row["domain"], row["source"] or row["key"], row["content"]) for row in rows]
    found.sort(key=lambda document: (document.domain, order("suite", document.key)))
    identity = {
        "tasks": TASK_VERSIONS,
        "policy": policy_sha256(policy),
        "tokenizer": tokenizer_sha256,
        "items": [item_identity(document) for document in found],
    }
    return Suite(identity_sha256(identity), tuple(found))


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
