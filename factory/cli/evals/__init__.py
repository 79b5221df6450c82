"""The commands for evaluation tasks, ``factory tasks``."""
