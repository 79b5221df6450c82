"""Random mutants: one small change of the code at a time, to see which tests notice it. ``python -m tests.mutants --help``."""
