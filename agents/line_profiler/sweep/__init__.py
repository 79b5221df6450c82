"""Times thousands of operations, each alone, on several workers, for models of many widths and depths."""
