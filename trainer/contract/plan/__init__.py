"""Before a segment runs: its specification, its precision, whether it can run, what it will take."""
