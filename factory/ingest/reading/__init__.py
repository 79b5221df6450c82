"""Readers turn bytes into rows. Each module reads one family of formats. ``factory/ingest/readers.py`` maps suffixes to readers.

``rows``         defines the types of a row, and the keys that name the origin of a row
``streams``      decompresses within the limits of the data policy, and splits text into lines
``file_kinds``   knows the meaning of each suffix, and how to convert files that cannot be read
``json_values``  reads JSON arrays and sequences of JSON values, with one value in memory at a time
``tables``       reads CSV and TSV
``columns``      reads Parquet, Arrow, Feather, and Hugging Face data sets on disk
``pages``        reads HTML, web archives and notebooks
``archives``     reads zip and tar: the suffix of each member selects its reader

A reader is a function that takes a ``ReadableFile`` and yields rows. Of ``factory/ingest`` it imports only ``rules/policy``.
"""
