"""A release as a folder that another team can check without us (docs/BUNDLE.md).

``writing`` gathers it from the ledger (``gathering``, ``provenance``, ``shards``), adds what follows from that (``documents``: card, Croissant,
SPDX) and signs it (``signing``); ``verifying`` checks a folder that anyone may have written, with nothing but what lies in it.
"""
