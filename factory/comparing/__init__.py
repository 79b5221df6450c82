"""Compares the metrics of another run with ours, step by step, for ``factory compare``.

``curve_files`` reads a file, a segment's folder or a segment's lineage as curves. ``curve_comparison`` puts two curves on one grid, and finds the
first step where they diverge. ``page`` formats the result as lines, as JSON and as an HTML page.
"""
