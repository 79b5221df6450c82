"""Which documents may become held-out: a pure function of their content, or of their source (see ``hold_out_by``).

A document is chosen independently of when it arrives and with which others. Whether it *is* held out also depends on the
number of held-out documents of its domain (``least``, ``hold_out_at_most``) and on earlier training data (``decontaminate``).

What is held out has two halves. The *sealed* half is read by the release gate alone. The *dev* half is for all else: the gates of the code
loop, agents, the weights of an average. A cluster, whose documents rise and fall together, lies in one half, for ever: its name decides.
"""

from __future__ import annotations

import hashlib

from factory.ingest.rules.policy import DomainRules

BLOCK = 16  # neighbouring rows of a shard that count as one source where none is named: what arrives together is often of one


def chosen(content_sha256: str, source: str | None, rules: DomainRules, share: float) -> bool:
    """Is this document among the ``share`` that is held out?"""
    return draw(content_sha256, source, rules) < share * 2**64


def draw(content_sha256: str, source: str | None, rules: DomainRules) -> int:
    """A number below 2**64: the lowest are held out. Equal for all of a source where whole sources are held out; without a source the
    content decides."""
    unit = "source:" + source if rules.hold_out_by == "source" and source else "content:" + content_sha256
    return int.from_bytes(hashlib.sha256(unit.encode("utf-8")).digest()[:8], "big")


def cluster_of(key: str, source: str | None) -> str:
    """The source document; of a document that names none, its neighbourhood in the shard that it arrived in.

    >>> cluster_of("00112233:40", "a/book"), cluster_of("00112233:40", None), cluster_of("00112233:47", "")
    ('a/book', '00112233:rows 32-47', '00112233:rows 32-47')
    """
    prefix, _, row = key.rpartition(":")
    if source or not (prefix and row.isdigit()):
        return source or key
    first = int(row) // BLOCK * BLOCK
    return f"{prefix}:rows {first}-{first + BLOCK - 1}"


def is_sealed(cluster: str) -> bool:
    """Is a cluster in the sealed half? Half of all are."""
    return hashlib.sha256(f"half:{cluster}".encode()).digest()[0] % 2 == 0
