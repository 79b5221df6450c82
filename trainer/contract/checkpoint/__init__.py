"""Checkpoints on disk: their format and checks, regions of sharded tensors, the export to transformers' files."""
