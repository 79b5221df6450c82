"""The proposer that needs no language model: it has registered implementations measured, and reads fusion candidates."""
