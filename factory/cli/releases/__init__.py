"""Commands about releases: ``factory releases``, ``factory verify`` and ``factory release --bundle``."""
