"""A bundle is a release as a folder that another team can check without the factory that made it (docs/BUNDLE.md).

``writing`` reads a release from the ledger (``release_files``, ``provenance``, ``shards``), generates documents (``documents``: model card,
Croissant,
SPDX) and signs the folder (``signing``). ``verifying`` checks a bundle. It reads only the bundle's folder, and trusts nothing in the folder.
"""
