"""The embedded engine. ``server`` answers requests. ``engine_loop`` calls ``batch`` for each step, and ``decoder`` computes the next tokens."""
