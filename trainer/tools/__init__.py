"""Commands over a run's files: average checkpoints, list the documents of steps, report on packing."""
