"""A bundle: a release as a folder that another team can check without the factory that made it (docs/BUNDLE.md).

``writing`` reads a release from the ledger (``gathering``, ``provenance``, ``shards``), derives documents from it (``documents``: model card,
Croissant, SPDX) and signs the folder (``signing``). ``verifying`` checks a bundle. It reads only the folder and trusts nothing in it.
"""
