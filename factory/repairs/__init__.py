"""Repairs damaged files: the ledger, token shards, checkpoints, exports.

``workspace_examination`` compares the files with the ledger and lists each damage with its remedy. ``repairing`` repairs: ``token_shards`` makes a
token shard again from its raw shard, ``checkpoints`` replays a segment, ``lost_ledger`` restores the ledger.
"""
