"""The embedded engine: ``server`` answers requests. ``engine_loop`` steps ``batch``, which lets ``decoder`` compute a token for each sequence."""
