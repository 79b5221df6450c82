"""Measurements of each step (norms, noise scale, anomalies, throughput), and the files that they are written to."""
