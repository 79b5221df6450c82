"""The ledger: SQL that remembers every shard, segment, candidate, verdict, release and proposal; and what is asked of it all day."""
