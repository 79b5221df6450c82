"""What a checkpoint on disk is: its format and checks, regions of sharded tensors, the export to transformers' files."""
