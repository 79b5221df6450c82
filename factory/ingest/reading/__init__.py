"""Readers turn bytes into rows. Each module reads one family of formats. ``factory/ingest/readers.py`` maps suffixes to readers.

``rows``          the types of a row, and the keys that name its origin
``streams``       decompression within the limits of the data policy; lines of text
``file_kinds``         the meaning of each suffix; for files that are not read, how to convert them
``json_values``   JSON arrays and sequences of JSON values, in the memory of one value
``tables``        CSV and TSV
``columns``       Parquet, Arrow, Feather, Hugging Face data sets on disk
``pages``         HTML, web archives, notebooks
``archives``      zip and tar: each member is read by its own suffix

A reader is a function that takes a ``ReadableFile`` and yields rows. Of ``factory/ingest`` it imports only ``rules/policy``.
"""
