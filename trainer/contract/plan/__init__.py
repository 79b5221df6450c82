"""Before a segment runs: its specification, its precision, whether it is possible, and its cost."""
