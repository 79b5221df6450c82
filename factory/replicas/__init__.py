"""Trains an anneal again on another order of its data, and measures how much that changes the model. A replica never becomes a candidate."""
