"""Trains replicas: an anneal is trained again on another order of its data, to measure how much the order changes the model."""
