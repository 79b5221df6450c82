"""Chooses how a segment is computed on this machine: precision and tuned kernels."""
