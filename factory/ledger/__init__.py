"""The ledger: SQL tables of shards, segments, candidates, verdicts, releases and proposals, their rows as dataclasses, and the data of
``factory status``."""
