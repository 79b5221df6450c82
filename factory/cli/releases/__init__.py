"""``factory releases``, ``factory verify`` and ``factory release --bundle``: commands about releases."""
