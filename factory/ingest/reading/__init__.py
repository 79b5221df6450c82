"""Bytes into rows, one file a family of formats; ``factory/ingest/readers.py`` says which suffix is read by which.

``rows``          what a reader hands on, and the keys that say where a row came from
``streams``       decompression, within the limits; lines
``kinds``         which suffix means what: text, code, and what is not read, with what to do in its place
``json_values``   JSON arrays and JSON values one after another, without holding the whole
``tables``        CSV and TSV
``columns``       Parquet, Arrow, Feather, Hugging Face data sets on disk
``pages``         HTML, web archives, notebooks
``archives``      zip and tar: each member by its own suffix

A reader is a function of a ``Readable`` that yields rows. It imports nothing of ``factory/ingest`` but ``rules/policy``.
"""
