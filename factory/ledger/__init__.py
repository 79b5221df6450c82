"""The ledger: SQL tables of every shard, segment, candidate, verdict, release and proposal; typed rows; the facts of ``factory status``."""
