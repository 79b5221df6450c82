"""Trains an anneal again on another order of its data, and measures how far that moves the model. No replica becomes a candidate."""
