"""Thousands of operations timed alone by several workers, for many widths and depths."""
