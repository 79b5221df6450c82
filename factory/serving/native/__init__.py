"""The embedded engine: ``server`` answers requests, ``engine_loop`` steps ``batch``, which holds what ``decoder`` needs to write a token for each."""
