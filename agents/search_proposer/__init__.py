"""The proposer that needs no language model: it lets the workbench measure registered implementations, and reads fusion candidates."""
