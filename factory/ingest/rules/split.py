"""Which documents may become held-out: a pure function of their content, or of their source (see ``hold_out_by``).

A document is chosen independently of when it arrives and with which others. Whether it *is* held out also depends on the
number of held-out documents of its domain (``hold_out_at_most``) and on earlier training data (``decontaminate``).
"""

from __future__ import annotations

import hashlib

from factory.ingest.rules.policy import DomainRules


def chosen(content_sha256: str, source: str | None, rules: DomainRules, share: float) -> bool:
    """Is this document among the ``share`` that is held out? Without a source its content decides."""
    if rules.hold_out_by == "source" and source:
        unit = "source:" + source
    else:
        unit = "content:" + content_sha256
    draw = int.from_bytes(hashlib.sha256(unit.encode("utf-8")).digest()[:8], "big")
    return draw < share * 2**64
