"""Which documents may become held-out: a pure function of their content, or of their source (see ``hold_out_by``).

A document is chosen independently of when it arrives and with which others. Whether it *is* held out also depends on the
number of held-out documents of its domain (``least``, ``hold_out_at_most``) and on earlier training data (``decontaminate``).
"""

from __future__ import annotations

import hashlib

from factory.ingest.rules.policy import DomainRules


def chosen(content_sha256: str, source: str | None, rules: DomainRules, share: float) -> bool:
    """Is this document among the ``share`` that is held out?"""
    return draw(content_sha256, source, rules) < share * 2**64


def draw(content_sha256: str, source: str | None, rules: DomainRules) -> int:
    """A number below 2**64: the lowest are held out. Equal for all of a source where whole sources are held out; without a source the
    content decides."""
    unit = "source:" + source if rules.hold_out_by == "source" and source else "content:" + content_sha256
    return int.from_bytes(hashlib.sha256(unit.encode("utf-8")).digest()[:8], "big")
