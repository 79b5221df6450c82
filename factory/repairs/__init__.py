"""What a machine damages, and how it is mended: a lost ledger, token shards, checkpoints.

``examining`` compares what is there with the ledger and names every fault, with what to do. ``mending`` mends those that can be mended:
``token_shards`` makes a token shard again from its raw shard, ``checkpoints`` replays a segment, ``lost_ledger`` makes the ledger again.
"""
